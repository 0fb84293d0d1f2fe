"""Whatever it is given, it ends with findings that make sense, and the same ones however it got there."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hanglint_deep_programs import deep_programs
from hanglint_programs import ProgramMaker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat_hanglint import RULES, Analysis, Settings, analyse
from offbeat_hanglint._config import Config
from offbeat_hanglint._output.as_github import as_github
from offbeat_hanglint._output.as_json import as_json
from offbeat_hanglint._output.as_sarif import as_sarif
from offbeat_hanglint._output.as_text import as_text
from offbeat_hanglint._reading.files import find_files
from offbeat_hanglint._report.report import FindingFilter

FILES = ("a.py", "b.py", "c.py", "d.py")
KNOWN_RULES = {rule.id for rule in RULES}


def write(folder: Path, sources: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8", errors="surrogatepass")


def check(analysis: Analysis, root: Path) -> None:
    """Each finding is at a place that is there, and every form of a report can say it."""
    files, _ = find_files([root])
    num_lines = {each.path: len(each.file.read_bytes().splitlines()) for each in files}
    assert {each.path for each in analysis.unreadable} <= num_lines.keys()
    assert analysis.num_files + len(analysis.unreadable) >= len(files)
    for finding in analysis.findings:
        assert finding.rule in KNOWN_RULES
        assert 1 <= finding.line <= finding.end_line <= num_lines[finding.path]
        assert finding.column >= 1
        assert all(1 <= step.line <= num_lines[step.path] for step in finding.steps)
        assert finding.message
        assert finding.advice
    config = Config(root=root, confidence="low")
    report = FindingFilter(config, files).report(analysis)
    as_text(report, is_coloured=True)
    as_github(report)
    as_json(report)
    as_sarif(report, config)


def check_random_program(seed: int, folder: Path) -> None:
    write(folder, ProgramMaker(seed).modules(FILES))
    plain = analyse([folder], Settings())
    check(plain, folder)
    assert plain.unreadable == (), "syntax-valid, so it is read"
    cache = folder / "cache"
    for settings_ in (Settings(), Settings(cache_folder=cache), Settings(cache_folder=cache)):
        assert analyse([folder], settings_).findings == plain.findings, (
            "the same again, written to the cache, read from it"
        )


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, tmp_path: Path) -> None:
    check_random_program(seed, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10_000, 12_000, 200))
def test_thousands_of_random_programs(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 200):
        check_random_program(seed, tmp_path)


@pytest.mark.parametrize(("shape", "source"), deep_programs().items(), ids=deep_programs())
def test_deep_and_long_programs(shape: str, source: str, tmp_path: Path) -> None:
    del shape
    write(tmp_path, {"odd.py": source, "other.py": "import odd\nimport torch.distributed as dist\n\nodd.f()\n"})
    analysis = analyse([tmp_path], Settings())
    check(analysis, tmp_path)
    assert {each.path for each in analysis.unreadable} <= {"odd.py"}, "one file never keeps another from being read"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "odd.py").write_bytes(content)
        check(analyse([folder], Settings()), folder)


CALL = "import torch.distributed as dist\n\n\ndef f(x):\n    if dist.get_rank() == 0:\n        dist.all_reduce(x)\n"
READ = {
    "empty": b"",
    "blank": b"\n\n\n",
    "comment": b"# only",
    "no newline at the end": CALL.encode().rstrip(),
    "byte order mark": b"\xef\xbb\xbf" + CALL.encode(),
    "latin-1, said": b"# coding: latin-1\nname = '\xe4'\n" + CALL.encode(),
    "ends of lines of Windows": CALL.replace("\n", "\r\n").encode(),
    "ends of lines of old Macs": CALL.replace("\n", "\r").encode(),
    "form feeds": CALL.replace("def", "\f\ndef").encode(),
    "tabs": CALL.replace("    ", "\t").encode(),
    "invalid escape": b"a = '\\d'\n" + CALL.encode(),
    "lines joined": CALL.replace(" == 0", " \\\n    == 0").encode(),
}
NOT_READ = {
    "no UTF-8": b"name = '\xe4'\n",
    "null bytes": b"a = 1\0\n",
    "UTF-16": "a = 1\n".encode("utf-16"),
    "unknown encoding": b"# coding: klingon\na = 1\n",
    "Python 2": b"print 'a'\n",
    "a template": b"import {{ cookiecutter.name }}\n",
    "tabs and spaces": b"if a:\n\tb\n        c\n",
    "a program": b"\x7fELF\x02\x01\x01\0\0\0\0" + bytes(range(256)) * 10,
}


@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_files_that_python_reads_are_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(content)
    analysis = analyse([tmp_path], Settings())
    check(analysis, tmp_path)
    assert analysis.unreadable == ()
    assert bool(analysis.findings) == (b"all_reduce" in content)


@pytest.mark.parametrize("content", NOT_READ.values(), ids=NOT_READ)
def test_files_that_python_does_not_read_are_said_in_a_line_and_the_others_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(content)
    (tmp_path / "good.py").write_text(CALL)
    analysis = analyse([tmp_path], Settings())
    check(analysis, tmp_path)
    ((unreadable),) = analysis.unreadable
    assert unreadable.path == "odd.py"
    assert unreadable.why
    assert "\n" not in unreadable.why
    assert {each.path for each in analysis.findings} == {"good.py"}


def test_a_file_that_is_gone_when_it_is_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(CALL)
    (tmp_path / "b.py").write_text(CALL)
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        path.unlink(missing_ok=path.name != "b.py") if path.name == "b.py" else None
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    (unreadable,) = analyse([tmp_path], Settings()).unreadable
    assert unreadable.path == "b.py"


LARGE = """
import resource, sys
from pathlib import Path
from offbeat_hanglint._command import main
code = main([sys.argv[1], "--no-cache", "--jobs", "1", "--confidence", "low", "--output", sys.argv[2]])
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(code, peak_mib)
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["functions", "one function", "data"])
def test_a_file_of_a_hundred_thousand_lines_fits_into_a_gibibyte(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    if kind == "functions":
        body = CALL.partition("\n\n\n")[2]
        path.write_text(
            "import torch.distributed as dist\n" + "".join(body.replace("f(", f"f{n}(") for n in range(33_000))
        )
    elif kind == "one function":
        lines = "".join(f"    if rank == {n}:\n        dist.all_reduce(x)\n" for n in range(50_000))
        path.write_text(f"import torch.distributed as dist\ndef f(x, rank):\n{lines}")
    else:
        path.write_text("TABLE = [\n" + "    ('name', 1, 2.0, None),\n" * 100_000 + "]\n")
    start_s = time.monotonic()
    command = [sys.executable, "-c", LARGE, str(path), str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    code, peak_mib = done.stdout.split()
    print(f"{kind}: {time.monotonic() - start_s:.1f} s, {float(peak_mib):.0f} MiB")
    assert code in {"0", "1"}
    assert float(peak_mib) < 1024
