"""One process at a time in a run folder."""

import fcntl
import os
from pathlib import Path
from typing import Final

from offbeat_types import RunFolderError

LOCK_NAME: Final = ".lock"
_last_locked: list[Path] = []


def last_locked() -> Path | None:
    """The run folder this process locked last, or None: what an interrupted command says can be resumed."""
    return _last_locked[-1] if _last_locked else None


class FolderLock:
    """An exclusive lock on a folder, held until `release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            RunFolderError: another process holds it; the text names its process id.
        """
        self._descriptor: int | None = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            raise RunFolderError(
                f"{folder}: process {pid} is working in this run folder; wait for it, end it, or choose another folder"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _last_locked[:] = [folder]

    def forget(self) -> None:
        """Make `last_locked` forget this folder: there is nothing in it to resume."""
        _last_locked.clear()

    def release(self) -> None:
        """Let go; a second call does nothing. The lock file stays, since removing it would race."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
