"""Commands are run as a user runs them, nothing of them stays, and the suite for bad input can fail."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from offbeat_testing import CommandLine, RunningCommand, wait_until_gone
from offbeat_testing._commands import COMMON_MISTAKES, CommandConformance

SLEEPER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", *sys.argv[1:], flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "offbeat_sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "offbeat_sleeper"


def test_a_command_is_interrupted_as_in_a_terminal_and_its_processes_are_seen(sleeper: str) -> None:
    with RunningCommand(sleeper, "--fast", 3) as process:
        process.wait_until(lambda: "ready --fast 3" in process.output, "its line")
        [started] = process.descendants()
        process.press_ctrl_c()
        assert process.wait() == 130
        with pytest.raises(AssertionError, match=r"still there after 0\.2 s.*time\.sleep"):
            wait_until_gone([started], 0.2)
    # It is no descendant of the command any more, so the block could not know of it.
    os.kill(started, signal.SIGKILL)
    wait_until_gone([started], 30)


def test_a_block_ends_with_all_of_its_processes_gone(sleeper: str) -> None:
    with RunningCommand(sleeper) as process:
        process.wait_until(lambda: "ready" in process.output, "its line")
        pids = [process.pid, *process.descendants()]
        assert len(pids) == 2
    wait_until_gone(pids, 30)


def block_with_gil() -> None:
    """Block with the GIL, so that Python's own handlers would wait as long."""
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(600)


def test_a_forked_command_can_be_killed_with_its_group_from_its_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(lead: Callable[[], None] = os.setsid) -> None:  # as on a crowded machine
        time.sleep(0.5)
        lead()

    monkeypatch.setattr(os, "setsid", late)
    with RunningCommand(block_with_gil) as process:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(30) == -9


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_a_forked_command_that_stands_still_shows_where() -> None:
    with RunningCommand(block_with_gil) as process:
        process.wait_until(lambda: "ready" in process.output, "its line")
        with pytest.raises(AssertionError, match=r"(?s)still running after 0\.2 s.*in block_with_gil"):
            process.wait(0.2)


def test_waiting_ends_with_the_command_or_the_deadline_and_shows_the_output(sleeper: str) -> None:
    with RunningCommand(sleeper) as process:
        process.wait_until(lambda: "ready" in process.output, "its line")
        with pytest.raises(AssertionError, match=r"waited 0\.2 s in vain for more; so far:\s+ready"):
            process.wait_until(lambda: False, "more", 0.2)
        with pytest.raises(AssertionError, match=r"still running after 0\.2 s"):
            process.wait(0.2)
        process.kill()
        assert process.wait() == -9
        with pytest.raises(AssertionError, match=r"ended with -9 before more:\s+ready"):
            process.wait_until(lambda: False, "more", 5)


def test_what_a_command_did_last_counts_though_it_has_ended(sleeper: str) -> None:
    with RunningCommand(sleeper) as process:
        process.kill()
        assert process.wait() == -9
        answers = iter([False, True, True])
        process.wait_until(lambda: next(answers), "its last act", 5)


def test_a_forked_command_takes_the_signals_of_a_new_process() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a runner of tests may
    try:
        with RunningCommand(block_with_gil) as process:
            process.wait_until(lambda: "ready" in process.output, "its line")
            process.terminate()
            assert process.wait(10) == -15
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse() -> NoReturn:
    print("error: /nowhere/model: no such folder", file=sys.stderr)
    sys.exit(2)


def accept() -> NoReturn:
    sys.exit(0)


def test_the_suite_for_bad_input_distinguishes_an_application_that_refuses_from_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, config, mistake = CommandConformance(), tmp_path / "config.toml", COMMON_MISTAKES["no such model"]
    refusing = CommandLine("app", refuse, monkeypatch, capsys)
    accepting = CommandLine("app", accept, monkeypatch, capsys)
    suite.test_a_mistake_is_named_and_nothing_is_made(refusing, config, tmp_path, mistake)
    with pytest.raises(AssertionError, match=r"data\.jsonl"):
        suite.test_a_mistake_is_named_and_nothing_is_made(refusing, config, tmp_path, COMMON_MISTAKES["no such data"])
    with pytest.raises(AssertionError):
        suite.test_a_mistake_is_named_and_nothing_is_made(accepting, config, tmp_path, mistake)
    (tmp_path / "run").mkdir()
    with pytest.raises(AssertionError):
        suite.test_a_mistake_is_named_and_nothing_is_made(refusing, config, tmp_path, mistake)
