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


def test_an_interrupted_run_says_how_to_resume(tmp_path: Path) -> None:
    body = (
        "import os, signal\n"
        f"with RunFolder.create({str(tmp_path / 'r')!r}):\n"
        f"    os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "    import time; time.sleep(30)"
    )
    done = run(body)
    assert done.returncode == 130
    assert f"interrupted; resume with: app resume {tmp_path / 'r'}" in done.stderr
    assert "Traceback" not in done.stderr


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
