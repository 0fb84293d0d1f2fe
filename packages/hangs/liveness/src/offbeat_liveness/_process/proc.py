"""Readings of the kernel (/proc) about this process and others: states, CPU time, I/O, TCP sockets."""

import contextlib
import hashlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from offbeat_liveness._process.stacks import OwnThread, own_native_ids

PidState = Literal["runs", "stopped", "gone", "unknown"]
STOPPED: Final = frozenset((b"T", b"t"))
AT_WORK: Final = frozenset((b"R", b"D"))
DEAD: Final = frozenset((b"Z", b"X"))
# Fields of /proc/pid/stat, counted from the state, which is the first after the name.
STATE, PARENT, OWN_TICKS, USED_TICKS, NUM_THREADS, BORN, EXIT = 0, 1, slice(11, 13), slice(11, 15), 17, 19, 49
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
READ_BYTES: Final = 1 << 16
MANY_THREADS: Final = 64  # from there on one scan of all processes is cheaper than asking each thread for its children
MAX_PROCESSES: Final = 4096
MOVING_BYTES_PER_S: Final = 64 << 10
LISTENS: Final = "0A"
TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
MAX_TABLE_BYTES: Final = 4 << 20
MAX_PORTS: Final = 64


def _name_host() -> str:
    """Return a name of this host that no other one of that name has: only where it is the same may pids be compared.

    Source: proc_sys_kernel(5), random/boot_id; namespaces(7), /proc/pid/ns/pid.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        return f"{name}#{hashlib.sha256(space.encode()).hexdigest()[:6]}"
    return name


HOST: Final = _name_host()


def pid_state(pid: int, born: int = 0) -> PidState:
    """State of a process of this machine; `born` is its `birth`, 0 if not known: pids are used again."""
    return state_and_letter(pid, born)[0]


def state_and_letter(pid: int, born: int = 0) -> tuple[PidState, str]:
    """Return `pid_state`, and the kernel's letter: S and D wait, R is on a core or ready for one; "?" if unknown.

    Source: proc_pid_stat(5): state is field 3, the first after the name in parentheses; starttime is field 22.
    """
    try:
        fields = _stat_fields(str(pid))
    except FileNotFoundError:
        return "gone" if Path("/proc/self").exists() else _ask_kernel(pid), "?"
    except OSError:
        return "unknown", "?"
    letter = fields[STATE].decode()
    if fields[STATE] in DEAD or (born and int(fields[BORN]) != born):
        return "gone", letter
    return "stopped" if fields[STATE] in STOPPED else "runs", letter


def thread_cpu_s(pid: int, thread: int) -> float:
    """Return seconds that a thread has run or been ready to run; 0 where the platform does not report them.

    Waiting for a core counts: on a crowded machine a thread that computes may get little of one.

    Source: kernel documentation, scheduler/sched-stats.rst: /proc/pid/task/tid/schedstat holds nanoseconds run,
    nanoseconds waited on a run queue, and time slices.
    """
    with contextlib.suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    return 0.0


def is_at_work(pid: int, thread: int) -> bool:
    """Return whether a thread runs or is ready to (R), or waits in the kernel for a disk or network file system (D).

    Its CPU time alone does not show it: the kernel counts the time on a run queue when it ends, and on a crowded
    machine that takes seconds (measured: nothing for 1.8 s, then all of it). False where the platform reports nothing.
    """
    fields = _stat_or_nothing(f"{pid}/task/{thread}")
    return bool(fields) and fields[STATE] in AT_WORK


def birth(pid: int) -> int:
    """Return when a process started, in the kernel's clock ticks; 0 where the platform does not report it."""
    fields = _stat_or_nothing(str(pid))
    return int(fields[BORN]) if fields else 0


def birth_of_thread(thread: int) -> int:
    """Return when a thread of this process started, likewise."""
    fields = _stat_or_nothing(f"self/task/{thread}")
    return int(fields[BORN]) if fields else 0


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has not been waited for yet, a signal below 0; None where it is unknown.

    Source: proc_pid_stat(5): exit_code is field 52, in the form of waitpid.
    """
    fields = _stat_or_nothing(str(pid))
    has_code = len(fields) > EXIT and fields[STATE] in DEAD
    return os.waitstatus_to_exitcode(int(fields[EXIT])) if has_code else None


def _stat_fields(task: str) -> list[bytes]:
    """Return the fields of a process or thread, from the state on; the name before it may hold anything."""
    return _read_bytes(f"/proc/{task}/stat").rpartition(b")")[2].split()


def _stat_or_nothing(task: str) -> list[bytes]:
    """Return `_stat_fields`; [] where the process is gone, or the platform does not report them."""
    with contextlib.suppress(OSError):
        return _stat_fields(task)
    return []


def _ask_kernel(pid: int) -> PidState:
    """Return where there is no /proc: whether a signal could be sent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "runs"


class TcpSocket(NamedTuple):
    """One line of the kernel's table; addresses in hex as they stand there, such as "0100007F:1F40"."""

    inode: str
    own: str
    peer: str
    state: str


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yield all sockets of this network namespace; none where the platform does not report them.

    Source: proc_pid_net(5), tcp: local address, remote address and state are fields 1, 2 and 3, the inode field 9.
    """
    for table in TABLES:
        with contextlib.suppress(OSError), open(table, "rb") as file:
            for line in file.read(MAX_TABLE_BYTES).decode(errors="replace").splitlines()[1:]:
                fields = line.split(None, 10)
                if len(fields) > 9:
                    yield TcpSocket(inode=fields[9], own=fields[1], peer=fields[2], state=fields[3])


def listening_ports() -> tuple[int, ...]:
    """Return the ports of this process in order, by which a wait for an answer from one is traced to it.

    Empty where the platform does not report them.
    """
    own = set(_own_sockets())
    ports = {
        int(each.own.rpartition(":")[2], 16) for each in tcp_sockets() if each.state == LISTENS and each.inode in own
    }
    return tuple(sorted(ports))[:MAX_PORTS]


def _own_sockets() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").rstrip("]")


@dataclass(frozen=True, kw_only=True)
class TreeUsage:
    """Usage of a process and its descendants, since each began; ended children that were waited for count too.

    Args:
        cpu_s: seconds on a core, without the watch's own threads.
        io_bytes: written by write() and its like, and read from a disk or a network file system; what goes through
            send() and recv() is not counted by the kernel, and what is read from memory does not count.
        at_work: a thread is on a core or ready for one (R), or in the kernel for a disk or a network file system (D).
        time_s: monotonic seconds of this look.
        num_processes: that were found; 0 where the platform does not report them.
    """

    cpu_s: float = 0.0
    io_bytes: int = 0
    at_work: bool = False
    time_s: float = 0.0
    num_processes: int = 0


@dataclass(frozen=True, kw_only=True)
class UsageRates:
    """Usage of a process and its descendants between two looks.

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
        """More than an occasional line of a log."""
        return self.io_bytes_per_s >= MOVING_BYTES_PER_S


def tree_usage(pid: int) -> TreeUsage:
    """Return what a process of this machine and its descendants have used until now.

    Source: proc(5): /proc/pid/stat fields 14 to 17 (own and waited-for children's ticks), /proc/pid/io (wchar,
    read_bytes), /proc/pid/task/tid/children.
    """
    scan = _Scan()
    ticks, io_bytes, at_work, found = 0, 0, False, 0
    waiting, seen = [pid], {pid}
    while waiting and found < MAX_PROCESSES:
        each = waiting.pop()
        fields = _stat_or_nothing(str(each))
        if not fields:
            continue
        found += 1
        io_bytes += _io_bytes(each)
        threads = _threads_of(each, int(fields[NUM_THREADS]))
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
    """Return what was done between two looks.

    A descendant that ended unwaited for takes its share with it, never below 0.
    """
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
        FileNotFoundError: this kernel does not list them (CONFIG_PROC_CHILDREN).
    """
    try:
        return _read_bytes(f"/proc/{pid}/task/{thread}/children").split()
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/task/{thread}"):
            raise
    except OSError:
        pass
    return []


def _children_of_all() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat_or_nothing(name)):
            found[int(fields[PARENT])].append(int(name))
    return found


def _threads_of(pid: int, num_threads: int) -> list[int]:
    if num_threads == 1:
        return [pid]
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _thread_ticks(pid: int, thread: int) -> int:
    return sum(map(int, _stat_or_nothing(f"{pid}/task/{thread}")[OWN_TICKS]))


def _is_at_work(pid: int, state: bytes, threads: list[int], own: Collection[int]) -> bool:
    """Return whether any thread is; those of the watch are at work only because they look."""
    if len(threads) == 1:
        return state in AT_WORK and threads[0] not in own
    return any(
        fields[STATE] in AT_WORK
        for thread in threads
        if thread not in own and (fields := _stat_or_nothing(f"{pid}/task/{thread}"))
    )


def _io_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        values = dict(line.split(b": ") for line in _read_bytes(f"/proc/{pid}/io").splitlines())
        return int(values[b"wchar"]) + int(values[b"read_bytes"])
    return 0


def _read_bytes(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, READ_BYTES)
    finally:
        os.close(file)
