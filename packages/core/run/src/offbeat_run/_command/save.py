"""The command `save`: a checkpoint of a run that goes on."""

import time
from typing import Final

from offbeat_core import DeadlineError, RunFolderError
from offbeat_run._checkpoints import Checkpoint
from offbeat_run._command.command import CommandWords
from offbeat_run._console.printing import print_text
from offbeat_run._console.status import doing
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lock import writer_of

_LOOK_EVERY_S: Final = 0.2


def save_running(run: RunFolder, timeout_s: float | None = None) -> Checkpoint:
    """Ask a run for a checkpoint after the update in progress, and wait until it is written.

    Args:
        run: open for reading.
        timeout_s: longest wait, seconds; None: as long as the run lives, whose updates have a deadline.

    Raises:
        RunFolderError: nothing trains in this folder, or it has ended without a checkpoint.
        DeadlineError: it is not written in time; the run still writes it.
    """
    begun_s, checkpoints = time.monotonic(), run.checkpoints
    if writer_of(run.path) is None:
        raise RunFolderError(f"{run.path}: no run is active here; {_latest(checkpoints.latest())}")
    checkpoints.ask()
    while checkpoints.is_awaited and writer_of(run.path) is not None:
        if timeout_s is not None and time.monotonic() - begun_s > timeout_s:
            raise DeadlineError("save", f"the update in progress of {run.path}", timeout_s)
        time.sleep(_LOOK_EVERY_S)
    if checkpoints.is_awaited or (latest := checkpoints.latest()) is None:
        checkpoints.forget_request()
        raise RunFolderError(f"{run.path}: the run has ended; {_latest(checkpoints.latest())}")
    return latest


def save_command(words: CommandWords, folder: str) -> int:
    """`save RUN`: write a checkpoint of a run that goes on."""
    with RunFolder.open(folder, write=False) as run:
        doing("waiting for the update in progress", str(run.path))
        checkpoint = save_running(run)
    doing("")
    print_text(f"checkpoint of update {checkpoint.step}: {checkpoint.path}")
    return 0


def _latest(checkpoint: Checkpoint | None) -> str:
    return f"its latest checkpoint is {checkpoint.path}" if checkpoint else "it has no checkpoint"
