"""What a process and all of its descendants have used, so that two looks tell whether any of them does anything.

A rank whose own threads stand still may have a pool of processes, a compiler or a download at work.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from offbeat_liveness._process.stacks import OwnThread, own_native_ids

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
READ_BYTES: Final = 1 << 16
MANY_THREADS: Final = 64  # from there on one scan of all processes is cheaper than asking each thread for its children
MAX_PROCESSES: Final = 4096
MOVING_BYTES_PER_S: Final = 64 << 10
AT_WORK: Final = frozenset((b"R", b"D"))
# Fields of /proc/pid/stat, counted from the state, which is the first after the name.
STATE, PARENT, USED_TICKS, NUM_THREADS = 0, 1, slice(11, 15), 17
OWN_TICKS = slice(11, 13)


@dataclass(frozen=True, kw_only=True)
class TreeUsage:
    """Of a process and its descendants, since each of them began; children that ended and were waited for count too.

    Args:
        cpu_s: seconds on a core, without the watch's own threads.
        io_bytes: written by write() and its like, and read from a disk or a network file system; what goes through
            send() and recv() is not counted by the kernel, and what is read from memory does not count.
        at_work: a thread is on a core or ready for one (R), or in the kernel for a disk or a network file system (D).
        time_s: monotonic seconds of this look.
        num_processes: that were found; 0 where the platform does not tell.
    """

    cpu_s: float = 0.0
    io_bytes: int = 0
    at_work: bool = False
    time_s: float = 0.0
    num_processes: int = 0


@dataclass(frozen=True, kw_only=True)
class UsageRates:
    """What a process and its descendants did between two looks.

    Args:
        cores: processor seconds for each second.
        io_bytes_per_s: bytes for each second.
        at_work: both looks found a thread at work.
    """

    cores: float
    io_bytes_per_s: float
    at_work: bool

    @property
    def moves_data(self) -> bool:
        """More than the odd line of a log."""
        return self.io_bytes_per_s >= MOVING_BYTES_PER_S


def tree_usage(pid: int) -> TreeUsage:
    """What a process of this machine and its descendants have used until now.

    Source: proc(5): /proc/pid/stat fields 14 to 17 (own and waited-for children's ticks), /proc/pid/io (wchar,
    read_bytes), /proc/pid/task/tid/children.
    """
    scan = _Scan()
    ticks, io_bytes, at_work, found = 0, 0, False, 0
    waiting, seen = [pid], {pid}
    while waiting and found < MAX_PROCESSES:
        each = waiting.pop()
        fields = _fields(f"/proc/{each}/stat")
        if not fields:
            continue
        found += 1
        io_bytes += _io_bytes(each)
        threads = _threads(each, int(fields[NUM_THREADS]))
        own = own_native_ids() if each == os.getpid() else frozenset()
        ticks += sum(map(int, fields[USED_TICKS])) - sum(_thread_ticks(each, thread) for thread in own)
        at_work = at_work or _is_at_work(each, fields[STATE], threads, own)
        children = scan.children(each, threads)
        waiting += [child for child in children if child not in seen]
        seen.update(children)
    return TreeUsage(
        cpu_s=ticks / TICKS_PER_S - (OwnThread.ended_cpu_s if pid == os.getpid() else 0.0),
        io_bytes=io_bytes,
        at_work=at_work,
        time_s=time.monotonic(),
        num_processes=found,
    )


def rates(before: TreeUsage, after: TreeUsage) -> UsageRates:
    """What was done between two looks; a descendant that ended unwaited for takes its share with it, never below 0."""
    passed_s = max(after.time_s - before.time_s, 1e-6)
    return UsageRates(
        cores=max(0.0, after.cpu_s - before.cpu_s) / passed_s,
        io_bytes_per_s=max(0, after.io_bytes - before.io_bytes) / passed_s,
        at_work=before.at_work and after.at_work,
    )


class _Scan:
    """Finds children: by threads where there are few, else by one scan of all processes of the machine."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[int]] | None = None

    def children(self, pid: int, threads: list[int]) -> list[int]:
        if len(threads) <= MANY_THREADS and self._by_parent is None:
            try:
                return [int(child) for thread in threads for child in _read_children(pid, thread)]
            except FileNotFoundError:
                if not os.path.exists(f"/proc/{pid}/task"):  # it has just ended
                    return []
        if self._by_parent is None:
            self._by_parent = _children_of_all()
        return self._by_parent.get(pid, [])


def _read_children(pid: int, thread: int) -> list[bytes]:
    """Children that one thread has started; [] for a thread that has just ended.

    Raises:
        FileNotFoundError: this kernel does not tell (CONFIG_PROC_CHILDREN).
    """
    try:
        return _read(f"/proc/{pid}/task/{thread}/children").split()
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/task/{thread}"):
            raise
    except OSError:
        pass
    return []


def _children_of_all() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _fields(f"/proc/{name}/stat")):
            found[int(fields[PARENT])].append(int(name))
    return found


def _threads(pid: int, num_threads: int) -> list[int]:
    if num_threads == 1:
        return [pid]
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _thread_ticks(pid: int, thread: int) -> int:
    """What a thread has used; 0 where it is gone."""
    return sum(map(int, _fields(f"/proc/{pid}/task/{thread}/stat")[OWN_TICKS]))


def _is_at_work(pid: int, state: bytes, threads: list[int], own: Collection[int]) -> bool:
    """Whether any thread is; those of the watch are at work only because they look."""
    if len(threads) == 1:
        return state in AT_WORK and threads[0] not in own
    return any(
        fields[STATE] in AT_WORK
        for thread in threads
        if thread not in own and (fields := _fields(f"/proc/{pid}/task/{thread}/stat"))
    )


def _io_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        values = dict(line.split(b": ") for line in _read(f"/proc/{pid}/io").splitlines())
        return int(values[b"wchar"]) + int(values[b"read_bytes"])
    return 0


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        data = os.read(file, READ_BYTES)
    finally:
        os.close(file)
    return data


def _fields(path: str) -> list[bytes]:
    """Of a process or thread, from the state on; [] where it is gone, or the platform does not tell."""
    with contextlib.suppress(OSError):
        return _read(path).rpartition(b")")[2].split()
    return []
