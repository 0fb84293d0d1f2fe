"""A run folder on a file system that shows no machine the locks of another: two machines never write to one run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat_core import RunFolderError
from offbeat_run import RunFolder, writer_of
from offbeat_run._folder import lock

ELSEWHERE = """
import fcntl, signal, sys
from offbeat_run import RunFolder
from offbeat_run._folder import lock
fcntl.flock = lambda *_: None  # as where locks are the machine's own
lock._boot = lambda: "another-kernel"
lock.BEAT_S = 0.1
lock.socket.gethostname = lambda: "node7"
run = RunFolder.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
run.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "")
        run.keep()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_AFTER_S", 3.0)
    monkeypatch.setattr(lock, "_LOOK_S", 0.1)


def another_machine(folder: Path) -> subprocess.Popen[str]:
    """A process under another kernel, as far as the lock shows, that writes to a run folder until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_a_writer_on_another_machine_keeps_its_folder_and_is_named(folder: Path) -> None:
    with another_machine(folder) as process:
        try:
            writer = writer_of(folder)
            assert writer is not None
            assert str(writer) == f"process {process.pid} on node7"
            with pytest.raises(RunFolderError, match=rf"process {process.pid} on node7 is working in this run folder"):
                RunFolder.open(folder)
        finally:
            process.kill()


def test_one_that_has_ended_well_leaves_nothing_to_wait_for(folder: Path) -> None:
    with another_machine(folder) as process:
        process.communicate("\n")
    assert (folder / ".lock").read_text() == ""
    began_s = time.monotonic()
    RunFolder.open(folder).close()
    assert time.monotonic() - began_s < 2.0


def test_one_that_was_killed_is_stale_after_a_while(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with another_machine(folder) as process:
        process.kill()
    began_s = time.monotonic()
    with RunFolder.open(folder) as run:
        assert time.monotonic() - began_s >= 3.0
        writer = writer_of(run.path)
        assert writer is not None
        assert writer.pid == os.getpid()
    assert f"process {process.pid} on node7 has not let go of {folder}: waits 3 s" in capsys.readouterr().out


def test_a_clock_that_jumps_makes_no_living_writer_stale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another_machine(folder) as process:
        try:
            monkeypatch.setattr(time, "time", lambda: 4e9)
            with pytest.raises(RunFolderError, match="is working in this run folder"):
                RunFolder.open(folder)
        finally:
            process.kill()


def test_where_a_file_system_has_no_locks_signs_of_life_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    with RunFolder.open(folder), pytest.raises(RunFolderError, match=f"process {os.getpid()} on "):
        RunFolder.open(folder)
    RunFolder.open(folder).close()
    assert writer_of(folder) is None


def test_a_lock_gives_signs_of_life_and_leaves_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    before = set(lock.threading.enumerate())
    with RunFolder.open(folder) as run:
        first = writer_of(run.path)
        end_s = time.monotonic() + 30
        while writer_of(run.path) == first:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert first is not None
        assert len((folder / ".lock").read_text().splitlines()) == 1
    assert not [each for each in set(lock.threading.enumerate()) - before if each.name == "run-folder-lock"]


def test_a_killed_writer_of_this_machine_is_no_reason_to_wait(folder: Path) -> None:
    program = "import sys\nfrom offbeat_run import RunFolder\nrun = RunFolder.open(sys.argv[1])\nprint(flush=True)\n"
    program += "sys.stdin.readline()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    began_s = time.monotonic()
    RunFolder.open(folder).close()
    assert time.monotonic() - began_s < 2.0
