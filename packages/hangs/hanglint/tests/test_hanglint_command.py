"""The command as people and programs use it: processes, exit codes, files, and one line for a mistake."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat_hanglint._command import main

WRONG = """import torch.distributed as dist


def log_loss(loss):
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
"""
RIGHT = """import torch.distributed as dist


def log_loss(loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(loss)
"""


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Done:
    """The command in this process: fast, and with the same streams."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = main([str(each) for each in arguments])
        except SystemExit as left:  # of argparse
            code = int(left.code or 0)
    return Done(code, stdout.getvalue(), stderr.getvalue())


def rules_found(folder: Path, *options: object) -> list[str]:
    """Rules of the findings at any confidence."""
    done = run(folder, "--format", "json", "--confidence", "low", "--no-cache", "--jobs", 1, *options)
    assert done.code in {0, 1}, done.stderr
    return [each["rule"] for each in json.loads(done.stdout)["findings"]]


def process(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat_hanglint", *map(str, arguments)]
    extra = {"XDG_CACHE_HOME": str(cwd / "cache"), **environment}
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **extra}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one finding, HL001 in src/loss.py."""
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.hanglint]\n")
    (tmp_path / "src" / "loss.py").write_text(WRONG)
    return tmp_path


def test_the_exit_code_is_0_when_clean_1_for_findings_and_2_for_a_mistake(project: Path) -> None:
    found = process("src", cwd=project)
    assert found.returncode == 1, found.stderr
    assert found.stdout.startswith("src/loss.py:6:9: HL001 ")
    assert found.stderr == ""
    (project / "src" / "loss.py").write_text(RIGHT)
    clean = process("src", cwd=project)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert clean.stdout.startswith("no findings in 1 file, 7 lines")
    mistake = process("source", cwd=project)
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr == "hanglint: PATH must be a file or folder that exists: got source\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs at least one PATH"),
        (["src", "--select", "HL9"], "--select must name rules"),
        (["src", "--ignore", "guards"], "--ignore must name rules"),
        (["src", "--baseline", "none.json"], "the baseline must be a readable file"),
        (["src", "--config", "none.toml"], "must be readable"),
        (["src", "--output", "no/folder/file"], "--output must be writable"),
        (["src", "--write-baseline", "no/folder/file"], "the baseline must be writable"),
        (["--explain", "HL999"], "--explain must name a rule"),
        (["src", "--jobs", "0"], "must be 1 or more"),
        (["src", "--jobs", "many"], "invalid"),
        (["src", "--confidence", "sure"], "invalid choice"),
        (["src", "--format", "xml"], "invalid choice"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    project: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    done = run(*arguments)
    assert done.code == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_reader_that_stops_sees_no_traceback(project: Path) -> None:
    (project / "src" / "loss.py").write_text(WRONG + "\n\n".join(WRONG.partition("\n\n\n")[2] for _ in range(3_000)))
    command = [sys.executable, "-m", "offbeat_hanglint", "src", "--no-cache"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=60) == 1


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
@pytest.mark.nightly
def test_an_interrupt_ends_it_without_a_traceback(project: Path) -> None:
    for number in range(600):
        (project / "src" / f"m{number}.py").write_text(WRONG * 100)
    command = [sys.executable, "-m", "offbeat_hanglint", "src", "--no-cache", "--jobs", "2"]
    running = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first_child(running.pid)  # now it reads
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=100)
    assert running.returncode == 130
    assert stderr == ""


@pytest.mark.parametrize("form", ["text", "json", "sarif", "github"])
def test_a_report_goes_where_it_is_asked_to(project: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    printed = run("src", "--format", form)
    written = run("src", "--format", form, "--output", "report")
    report = (project / "report").read_text()
    if form == "json":
        seconds = {"seconds": 0.0}
        one, other = json.loads(report), json.loads(printed.stdout)
        assert one | {"statistics": one["statistics"] | seconds} == other | {
            "statistics": other["statistics"] | seconds
        }
    elif form == "sarif":
        assert report == printed.stdout
    assert "HL001" in report
    assert "src/loss.py" in report
    assert written.stdout == ""
    assert "1 finding (1 high)" in written.stderr
    assert printed.code == written.code == 1


def test_rules_are_chosen_by_how_they_begin_and_by_level(project: Path) -> None:
    assert run(project, "--select", "HL00").code == 1
    assert run(project, "--select", "HL01,HL02").code == 0
    assert run(project, "--ignore", "HL001").code == 0
    (project / "pyproject.toml").write_text('[tool.hanglint.levels]\nHL001 = "off"\n')
    assert run(project).code == 0
    (project / "pyproject.toml").write_text('[tool.hanglint.levels]\nHL001 = "note"\n')
    noted = run(project, "--format", "github")
    assert noted.code == 0, "a note does not fail a build"
    assert noted.stdout.startswith("::notice file=src/loss.py,line=6,")


def test_confidence_is_a_threshold_and_what_is_below_it_is_counted(project: Path) -> None:
    (project / "src" / "loss.py").write_text("import torch.distributed as dist\n\ndist.init_process_group('nccl')\n")
    assert run(project, "--confidence", "low").code == 1
    unsaid = run(project)
    assert unsaid.code == 0
    assert "not said: 1 less sure (--confidence low)" in unsaid.stdout


def test_a_suppression_needs_a_reason_and_one_in_vain_is_reported(project: Path) -> None:
    path = project / "src" / "loss.py"
    path.write_text(WRONG.replace("(loss)\n", "(loss)  # hanglint: ignore[HL001] a world of one\n"))
    quiet = run(project)
    assert (quiet.code, quiet.stderr) == (0, "")
    assert "1 suppressed" in quiet.stdout
    path.write_text(WRONG.replace("(loss)\n", "(loss)  # hanglint: ignore[HL001]\n"))
    assert rules_found(project) == ["HL000", "HL001"]
    path.write_text(RIGHT.replace("(loss)\n", "(loss)  # hanglint: ignore[HL001] a world of one\n"))
    vain = run(project)
    assert vain.code == 0
    assert "hanglint: src/loss.py:5: ignore[HL001] suppresses nothing" in vain.stderr
    assert run(project, "--select", "HL01").stderr == "", "of a rule that did not run nothing is known"


def test_a_baseline_leaves_what_is_new(project: Path) -> None:
    path, baseline = project / "src" / "loss.py", project / "known.json"
    written = run(project, "--write-baseline", baseline)
    assert written.code == 0
    assert "known.json holds 1 findings" in written.stderr
    path.write_text("import os\n\n\n" + WRONG.replace("def", "\n\n# moved\ndef"))
    known = run(project, "--baseline", baseline)
    assert known.code == 0
    assert "1 in the baseline" in known.stdout
    again = WRONG.partition("\n\n\n")[2]
    path.write_text(WRONG + "\n\n" + again.replace("log_loss", "log_norm"))
    new = json.loads(run(project, "--baseline", baseline, "--format", "json").stdout)
    assert [each["function"] for each in new["findings"]] == ["log_norm"]
    (project / "pyproject.toml").write_text('[tool.hanglint]\nbaseline = "known.json"\n')
    path.write_text(RIGHT)
    gone = run(project, "--statistics")
    assert "1 of the baseline are no longer found" in gone.stderr


def test_a_second_run_reads_the_cache_and_says_the_same(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    first = json.loads(run(project, "--format", "json").stdout)
    entries = list((tmp_path / "kept" / "hanglint").rglob("*.json"))
    assert len(entries) == 1
    assert json.loads(run(project, "--format", "json").stdout)["findings"] == first["findings"]
    for content in ("{}", "[1, 2]", '["a"'):
        entries[0].write_text(content)
        assert json.loads(run(project, "--format", "json").stdout)["findings"] == first["findings"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    run(project, "--no-cache")
    assert not (tmp_path / "none").exists()


def test_processes_side_by_side_find_the_same(project: Path) -> None:
    for number in range(6):
        text = f"'''{'x' * 1_000_000}'''\n" + WRONG
        (project / "src" / f"m{number}.py").write_text(text)
    (project / "src" / "odd.py").write_text("no python")
    reports = [json.loads(run(project, "--no-cache", "--format", "json", "--jobs", jobs).stdout) for jobs in (1, 3)]
    assert reports[0]["findings"] == reports[1]["findings"]
    assert len(reports[0]["findings"]) == 7
    assert (
        reports[0]["unreadable"]
        == reports[1]["unreadable"]
        == [{"path": "src/odd.py", "why": "line 1: invalid syntax"}]
    )


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
@pytest.mark.nightly
def test_a_process_that_is_killed_is_said_in_one_line(project: Path) -> None:
    for number in range(600):
        (project / "src" / f"m{number}.py").write_text(WRONG * 100)
    command = [sys.executable, "-m", "offbeat_hanglint", "src", "--no-cache", "--jobs", "2"]
    running = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.kill(first_child(running.pid), signal.SIGKILL)
    _, stderr = running.communicate(timeout=100)
    assert running.returncode == 2
    assert stderr == "hanglint: a process that read files was killed, perhaps for its memory: try --jobs 1\n"


def first_child(pid: int) -> int:
    """A process that this one has started, as soon as there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("it has started no process")


def test_names_that_are_no_text_are_printed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"l\xf6ss.py")).write_text(WRONG)
    done = process(".", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith(r"l\udcf6ss.py:6:9: HL001")


def test_a_program_it_reads_is_never_run(tmp_path: Path) -> None:
    trap = "import pathlib; pathlib.Path(__file__).with_name('run').touch()\n"
    for name in (
        "conftest.py",
        "sitecustomize.py",
        "torch.py",
        "ast.py",
        "__init__.py",
        "offbeat_hanglint.py",
        "setup.py",
    ):
        (tmp_path / name).write_text(trap)
    with tempfile.TemporaryDirectory() as elsewhere:
        process(tmp_path, cwd=Path(elsewhere))
    assert not (tmp_path / "run").exists()


HEAVY = (
    "asyncio",
    "email",
    "http",
    "importlib.metadata",
    "multiprocessing",
    "socket",
    "ssl",
    "unittest",
    "urllib.request",
)


def test_it_starts_fast_because_it_imports_little(project: Path) -> None:
    code = (
        "import sys; from offbeat_hanglint._command import main; main(sys.argv[1:]);"
        f"sys.exit(', '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
    )
    command = [sys.executable, "-c", code, str(project), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""


def test_help_and_lists_name_every_rule_and_option() -> None:
    listed = run("--list-rules").stdout.splitlines()
    assert len(listed) >= 20
    assert all(line.startswith("HL") for line in listed)
    assert "--write-baseline" in run("--help").stdout
    assert run("--version").stdout.startswith("hanglint ")


def test_the_hook_of_pre_commit_runs_from_a_clone_with_nothing_installed(project: Path) -> None:
    root = Path(__file__).parents[4]
    entry = next(line for line in (root / ".pre-commit-hooks.yaml").read_text().splitlines() if "entry:" in line)
    hook = root / entry.partition("entry:")[2].strip()
    assert os.access(hook, os.X_OK)
    done = subprocess.run(
        [sys.executable, "-I", "-S", hook, "."], cwd=project, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("src/loss.py:6:9: HL001")
