"""Locks of files: which process holds the one that a thread waits for, as the kernel reports it in /proc/locks.

Source: proc_locks(5): "1: FLOCK  ADVISORY  WRITE 22957 fe:00:2172133 0 EOF"; a waiter for a lock has its number and an
arrow: "1: -> FLOCK  ADVISORY  WRITE 22958 fe:00:2172133 0 EOF". A lock of an open file description has the pid -1.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.kernel_calls import read_proc
from offbeat_liveness._process.outside.mounts import file_system
from offbeat_liveness._process.outside.other_processes import process_text
from offbeat_liveness._process.outside.peek import Look, Rule, timed_wait
from offbeat_liveness._process.snapshot import OutsideWait

LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems that answer by themselves: of a file on another one not even its number is asked."""
MAX_PATH: Final = 4096
KINDS: Final = {"lock": ("FLOCK",), "fcntl": ("POSIX",)}


@dataclass(frozen=True)
class FileLock:
    """One line of /proc/locks; `number` joins a lock with those that wait for it."""

    number: str
    kind: str
    pid: int
    place: str
    waits: bool


def _file_locks() -> Iterator[FileLock]:
    for line in read_proc("/proc/locks").splitlines():
        words = [word for word in line.split() if word != "->"]
        if len(words) > 5 and words[4].lstrip("-").isdigit():
            yield FileLock(words[0], words[1], int(words[4]), words[5], waits="->" in line)


def holder_of_wait(call: str) -> int:
    """Pid of the process that holds the lock for which this one waits in a call of the kernel; 0 if not known."""
    known = [*_file_locks()]
    own = {each.number for each in known if each.waits and each.pid == os.getpid() and each.kind in KINDS[call]}
    holders = {each.pid for each in known if not each.waits and each.number in own}
    return max(0, holders.pop()) if len(holders) == 1 else 0


def _holder_of_path(path: str) -> int:
    found = _status(path)
    if found is None:
        return 0
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    holders = {each.pid for each in _file_locks() if each.place == place and not each.waits}
    return max(0, holders.pop()) if len(holders) == 1 else 0


def _status(path: str) -> os.stat_result | None:
    """Return the status of a path; None where the file system might not answer, or there is no such file."""
    if file_system(path) not in LOCAL:
        return None
    try:
        return os.lstat(path)
    except OSError:
        return None


def is_named_pipe(path: str) -> bool:
    found = _status(path)
    return found is not None and stat.S_ISFIFO(found.st_mode)


def held_by(pid: int) -> str:
    """Text such as ", held by pid 12 (python train.py, runs: S)"; "" where the holder is not known."""
    if not pid:
        return ""
    if pid == os.getpid():
        return ", held by this process itself"
    return f", held by pid {pid} ({process_text(pid)})"


def file_lock_wait(path: str, kind: str, pid: int, timeout: object = None) -> OutsideWait:
    """Return a wait for a lock of a file; `kind` says of what sort file system or library are."""
    other = pid if pid != os.getpid() else 0
    text = f"a lock of {path}{f' ({kind})' if kind else ''}{held_by(pid)}"
    return timed_wait("lock", text, timeout, pid=other, on=path)


def _filelock(frame: FrameType, look: Look) -> OutsideWait | None:
    """Describe a wait in filelock, which datasets and huggingface_hub use: it polls, and sleeps in between.

    The lock keeps its path for each thread apart, so it is read off the call: filelock 3 and 4 name it differently.
    """
    timeout = peek.number(peek.local(frame, "timeout"))
    path = _absolute(peek.local(frame, "lock_filename") or peek.local(frame, "canonical_path"))
    has_end = timeout is not None and timeout >= 0
    return file_lock_wait(path, "filelock", _holder_of_path(path), timeout if has_end else None) if path else None


def _baton(frame: FrameType, look: Look) -> OutsideWait | None:
    """Describe a wait for torch's build of an extension. The file itself is the lock: that of a killed build stays."""
    path = peek.text(peek.attribute(peek.local(frame, "self"), "lock_file_path"), MAX_PATH)
    text = f"the file {path} to go, which a build of an extension has made, maybe one that was killed"
    return OutsideWait(kind="lock", text=text, on=path) if path else None


def _absolute(path: object) -> str:
    name = peek.text(path, MAX_PATH)
    return name if not name or name.startswith("/") else f"{os.getcwd()}/{name}"


RULES: Final = (
    Rule("/filelock/_api.py", ("BaseFileLock.acquire",), _filelock, reach=6),
    Rule("/filelock/_core/_lock.py", ("BaseFileLock.acquire",), _filelock, reach=6),  # from 4.3 on
    Rule("/torch/utils/file_baton.py", ("FileBaton.wait",), _baton),
)
