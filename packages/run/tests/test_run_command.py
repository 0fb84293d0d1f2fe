"""A command leaves with the right exit code and one clear message."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_run import split_arguments
from offbeat_types import ConfigError


def run(body: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import sys\nfrom offbeat_run import *\nfrom offbeat_types import *\ndef main():\n"
    code += "".join(f"    {line}\n" for line in body.splitlines()) + "run_command(main, program='app')\n"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return None", 0),
        ("return 7", 7),
        ("raise ConfigError('what is wrong')", 2),
        ("raise MemoryError('what is wrong')", 2),
        ("raise PeerFailedError('rollout-0', 'what is wrong')", 3),
        ("raise DeadlineError('what is wrong', 'x', 1.0)", 4),
    ],
)
def test_the_exit_code_says_what_happened(body: str, code: int) -> None:
    done = run(body)
    assert done.returncode == code
    if code not in (0, 7):
        assert done.stderr.startswith("error: ")
        assert "what is wrong" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unexpected_error_shows_its_traceback_and_leaves_with_1() -> None:
    done = run("raise KeyError('lost')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'lost'" in done.stderr
    assert "this is a bug" in done.stderr


def test_a_typed_error_shows_its_traceback_on_request() -> None:
    done = run("raise ConfigError('x')", OFFBEAT_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(30)", 130, "interrupted; resume with: app resume {}"),
        ("raise PeerFailedError('rollout-0', 'no memory')", 3, "resume with: app resume {}"),
        ("raise ConfigError('what is wrong')", 2, ""),
    ],
)
def test_a_run_that_ends_early_says_how_to_resume(tmp_path: Path, fault: str, code: int, said: str) -> None:
    folder = tmp_path / "r"
    done = run(f"import os, time\nwith RunFolder.create({str(folder)!r}) as run:\n    run.keep()\n    {fault}")
    assert done.returncode == code
    assert said.format(folder) in done.stderr
    assert ("resume" in done.stderr) == bool(said)
    assert "Traceback" not in done.stderr
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("fault", "code"), [(f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(30)", 130), ("raise ConfigError", 2)]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_that_is_refused_or_interrupted_before_it_begins_leaves_no_folder(
    tmp_path: Path, fault: str, code: int, is_there: bool
) -> None:
    folder = tmp_path / "r"
    if is_there:
        folder.mkdir()
    body = f"import os, time\nwith RunFolder.create({str(folder)!r}) as run:\n    run.write_text(run.config, '')\n"
    done = run(f"{body}    run.log('trainer-0').touch()\n    {fault}")
    assert done.returncode == code
    assert "resume" not in done.stderr
    assert list(tmp_path.rglob("*")) == ([folder] if is_there else [])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "from offbeat_run import *\ndef main():\n    for _ in range(10**5): print('x' * 80)\nrun_command(main)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_words_are_sorted_into_command_overrides_and_options() -> None:
    words = split_arguments(
        ["train", "my.toml", "--log.every", "5", "--log.keep=-1", "--out", "runs/a", "--fast", "-h"],
        options=("out",),
        switches=("fast",),
    )
    assert words.positionals == ("train", "my.toml")
    assert words.overrides == ("--log.every=5", "--log.keep=-1")
    assert words.options == {"out": "runs/a"}
    assert words.switches == {"fast", "help"}
    assert words.explain is None
    assert split_arguments(["--explain", "log.every"]).explain == "log.every"
    assert split_arguments(["--explain=log"]).explain == "log"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--otu", "x"], r"--otu: unknown option; did you mean --out\?"),
        (["--qqqqq"], "unknown option; a setting is --section.key VALUE"),
        (["--out"], "--out: needs a value"),
        (["--log.every", "--out", "x"], r"--log\.every: needs a value"),
        (["--fast=1"], "unknown option"),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split_arguments(words, options=("out",), switches=("fast",))


@pytest.mark.parametrize(("made", "stays"), [("", False), ("compiled", True)])
def test_a_run_that_compiles_nothing_leaves_no_folder_of_the_compiler(tmp_path: Path, made: str, stays: bool) -> None:
    body = "import os, pathlib\n"
    body += f"folder = pathlib.Path({str(tmp_path / 'torchinductor_me')!r})\n"
    body += "folder.mkdir()\n"  # as importing torch's compiler does
    body += "os.environ['TORCHINDUCTOR_CACHE_DIR'] = str(folder)\n"
    body += f"if {made!r}: (folder / {made!r}).write_text('x')"
    done = run(body)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "torchinductor_me").exists() == stays
