"""The lock of a run folder: one process writes to it, on whichever machine it runs."""

import errno
import fcntl
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakSet

from offbeat_core import RunFolderError
from offbeat_run._console.printing import print_text

LOCK_NAME: Final = ".lock"
BEAT_S: Final = 5.0
"""Between two signs of life in the lock file."""
STALE_AFTER_S: Final = 30.0
"""A writer on another machine that has given no sign of life for so long is dead: six beats, on a disk that is slow."""
_LOCK_BYTES: Final = 512
_LOOK_S: Final = 0.5
_LOOK_AGAIN_S: Final = 0.01
_TAKEN: Final = (errno.EWOULDBLOCK, errno.EACCES)
_last_locked: list[Path] = []


def last_locked() -> Path | None:
    """Return the run folder this process locked last, or None: what an interrupted command says can be resumed."""
    return _last_locked[-1] if _last_locked else None


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The process that writes to a run folder, as its lock has it.

    Args:
        pid: process id; 0 where the process has only just taken the lock.
        host: machine of the process; empty where an older version has taken the lock.
        since_s: Unix time when it took the lock; 0 where the host is empty.
        boot: of that machine's kernel, whose locks all its processes see; empty where an older version holds it.
        beat_s: Unix time of its last sign of life; 0 likewise.
    """

    pid: int
    host: str
    since_s: float
    boot: str = ""
    beat_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Writer":
        """Read the text of a lock file; from any other text no process is known."""
        try:
            match text.split():
                case [pid, host, since_s, boot, beat_s]:
                    return cls(pid=int(pid), host=host, since_s=float(since_s), boot=boot, beat_s=float(beat_s))
                case [pid, host, since_s]:
                    return cls(pid=int(pid), host=host, since_s=float(since_s))
                case [pid]:
                    return cls(pid=int(pid), host="", since_s=0.0)
        except ValueError:
            pass
        return cls(pid=0, host="", since_s=0.0)

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it runs under another kernel, whose locks a shared file system may not show here."""
        return bool(self.boot) and self.boot != _boot()

    def __str__(self) -> str:
        return f"process {self.pid or 'unknown'}" + (f" on {self.host}" if self.host else "")


class FolderLock:
    """An exclusive lock on a folder, held until `release` or the end of the process, however it ends.

    It is a lock of the kernel, and a sign of life in the lock file every `BEAT_S`: not every file system shows the
    locks of one machine to another (Lustre without `-o flock`, some of NFS).

    A forked child does not hold it: it would otherwise keep a killed run's folder locked for as long as it lives.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            RunFolderError: another process holds it; the text names its process id and its machine.
        """
        self._file = folder / LOCK_NAME
        self._descriptor: int | None = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o640)
        self._released = threading.Event()
        self._text = ""
        if not self._is_free():
            writer = Writer.parse(_read(self._file))
            self._close()
            raise RunFolderError(
                f"{folder}: {writer} is working in this run folder; wait for it, end it, or choose another folder"
            )
        self._since_s = time.time()
        # An older line may be longer, and its end would stay behind the new one.
        os.ftruncate(self._descriptor, 0)
        self._beat()
        self._beating = threading.Thread(target=self._keep_beating, name="run-folder-lock", daemon=True)
        self._beating.start()
        _locks.add(self)
        _last_locked[:] = [folder]

    def _is_free(self) -> bool:
        """Try to take it, for longer than `writer_of` holds it even if that is preempted."""
        assert self._descriptor is not None
        end_s = time.monotonic() + _LOOK_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _TAKEN:  # a file system without locks: signs of life have to do
                    return not self._is_alive(Writer.parse(_read(self._file)))
                if time.monotonic() > end_s:
                    return False
                time.sleep(_LOOK_AGAIN_S)
            else:
                writer = Writer.parse(_read(self._file))
                return not (writer.is_elsewhere and self._is_alive(writer))

    def _is_alive(self, writer: Writer) -> bool:
        """Return whether a writer that has not let go gives a sign of life; clocks may differ, so it has to change."""
        if not writer.beat_s:  # it has let go, or is of an older version, which gives no signs of life
            return False
        print_text(f"{writer} has not let go of {self._file.parent}: waits {STALE_AFTER_S:g} s for a sign of its life")
        end_s = time.monotonic() + STALE_AFTER_S
        while (now := Writer.parse(_read(self._file))) == writer:
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S)
        return bool(now.beat_s)  # 0: the file was emptied, so the writer has let go

    def _beat(self) -> None:
        """Write the line anew, of the same length: a reader sees a whole one."""
        assert self._descriptor is not None
        self._text = f"{os.getpid()} {socket.gethostname()} {self._since_s} {_boot()} {time.time():017.6f}\n"
        os.pwrite(self._descriptor, self._text.encode(), 0)

    def _keep_beating(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                if _read(self._file) != self._text:  # another writer has taken it
                    return
                self._beat()
            except OSError:  # a disk that is full or gone: what matters there ends the run by itself
                continue

    def forget(self) -> None:
        """Make `last_locked` forget this folder: there is nothing in it to resume."""
        _last_locked.clear()

    def release(self) -> None:
        """Let go; a second call does nothing. The lock file stays, and is empty: removing it would race."""
        if self._descriptor is not None:
            self._released.set()
            self._beating.join()  # first: a beat would write into the emptied file
            with suppress(OSError):
                if _read(self._file) == self._text:  # else another writer has taken it meanwhile
                    os.ftruncate(self._descriptor, 0)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locks: WeakSet[FolderLock] = WeakSet()


def _close_in_child() -> None:
    for lock in list(_locks):
        lock._close()  # closing a copy of the descriptor leaves the parent's lock in place


os.register_at_fork(after_in_child=_close_in_child)


def _read(file: Path) -> str:
    """Return the text of a lock file, which is opened anew: NFS shows what others have written since to no open one."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, _LOCK_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def _boot() -> str:
    """Identify the kernel of this machine: containers on it share its locks, whatever their names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def writer_of(folder: Path) -> Writer | None:
    """Return the process that writes to a run folder, on whichever machine; None where none holds the lock."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    has_locks = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
    except OSError as error:
        has_locks = error.errno in _TAKEN
        if has_locks:
            return Writer.parse(_read(folder / LOCK_NAME))
    finally:
        os.close(descriptor)
    writer = Writer.parse(_read(folder / LOCK_NAME))
    may_live = writer.is_elsewhere or not has_locks
    return writer if may_live and time.time() - writer.beat_s < STALE_AFTER_S else None
