"""A checkpoint that is asked for while a run goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat_core import DeadlineError, RunFolderError
from offbeat_run import RunFolder, save_running

SOON_S = 60.0


@pytest.fixture
def run(tmp_path: Path):
    with RunFolder.create(tmp_path / "run") as run:
        run.keep()
        run.config.write_text("")
        yield run


def wait_until(holds: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(SOON_S / 0.02)):
        if holds():
            return
        waiting.wait(0.02)
    pytest.fail("it does not come true")


def test_the_caller_waits_for_the_next_whole_checkpoint(run: RunFolder) -> None:
    with RunFolder.open(run.path, write=False) as reader, ThreadPoolExecutor(1) as pool:
        with run.checkpoints.write(3) as folder:
            (folder / "weights").touch()
            asking = pool.submit(save_running, reader, SOON_S)
            wait_until(lambda: run.checkpoints.is_asked)
        assert run.checkpoints.is_asked, "what is being written then is of an earlier state"
        with run.checkpoints.write(4) as folder:
            (folder / "weights").touch()
            assert not run.checkpoints.is_asked
            assert not asking.done()
        assert asking.result(SOON_S).step == 4


def test_a_run_that_ends_or_is_late_is_named_and_a_resumed_one_owes_nothing(run: RunFolder) -> None:
    with RunFolder.open(run.path, write=False) as reader:
        with pytest.raises(DeadlineError, match="the update in progress"):
            save_running(reader, 0.0)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(save_running, reader)
            wait_until(lambda: run.checkpoints.is_asked)
            run.close()
            with pytest.raises(RunFolderError, match="the run has ended; it has no checkpoint"):
                asking.result(SOON_S)
        with pytest.raises(RunFolderError, match="no run is active here"):
            save_running(reader)
    run.checkpoints.ask()
    with RunFolder.open(run.path) as resumed:
        assert not resumed.checkpoints.is_asked
