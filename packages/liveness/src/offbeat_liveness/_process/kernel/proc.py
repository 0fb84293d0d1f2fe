"""What has become of a process that gives no answer."""

import contextlib
import hashlib
import os
import socket
from pathlib import Path
from typing import Final, Literal

PidState = Literal["runs", "stopped", "gone", "unknown"]
STOPPED: Final = frozenset("Tt")
AT_WORK: Final = frozenset("RD")
DEAD: Final = frozenset("ZX")


def _name_host() -> str:
    """Name of this host, with what tells it from another of that name: only where it is the same may pids be compared.

    Source: proc_sys_kernel(5), random/boot_id; namespaces(7), /proc/pid/ns/pid.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        return f"{name}#{hashlib.sha256(space.encode()).hexdigest()[:6]}"
    return name


HOST: Final = _name_host()


def pid_state(pid: int, born: int = 0) -> PidState:
    """State of a process of this machine.

    Args:
        pid: its number; numbers are used again, so a young process may bear that of a dead one.
        born: what `birth` said of it, 0 if that is not known.
    """
    return state_and_letter(pid, born)[0]


def state_and_letter(pid: int, born: int = 0) -> tuple[PidState, str]:
    """`pid_state`, and the kernel's letter: S and D wait, R is on a core or ready for one; "?" where it is not told.

    Source: proc_pid_stat(5): state is field 3, the first after the name in parentheses; starttime is field 22.
    """
    try:
        fields = _stat_fields(str(pid))
    except FileNotFoundError:
        return "gone" if Path("/proc/self").exists() else _ask_kernel(pid), "?"
    except OSError:
        return "unknown", "?"
    letter = fields[0]
    if letter in DEAD or (born and int(fields[19]) != born):
        return "gone", letter
    return "stopped" if letter in STOPPED else "runs", letter


def thread_cpu_s(pid: int, thread: int) -> float:
    """Seconds that a thread has run or been ready to run; 0 where the platform does not tell.

    Waiting for a core counts: on a crowded machine a thread that computes may get little of one.

    Source: kernel documentation, scheduler/sched-stats.rst: /proc/pid/task/tid/schedstat holds nanoseconds run,
    nanoseconds waited on a run queue, and time slices.
    """
    with contextlib.suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    return 0.0


def is_at_work(pid: int, thread: int) -> bool:
    """Whether a thread is on a core or ready for one (R), or in the kernel for a disk or a network file system (D).

    Its CPU alone does not tell: the kernel counts the time on a run queue when it ends, and on a crowded machine that
    takes seconds (measured: nothing for 1.8 s, then all of it). No where the platform is silent.
    """
    with contextlib.suppress(OSError):
        return _stat_fields(f"{pid}/task/{thread}")[0] in AT_WORK
    return False


def birth(pid: int) -> int:
    """When a process started, in the kernel's clock ticks; 0 where the platform does not tell."""
    try:
        return int(_stat_fields(str(pid))[19])
    except OSError:
        return 0


def _stat_fields(task: str) -> list[str]:
    """Of a process or thread, from the state on; the name before it may hold anything."""
    return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()


def _ask_kernel(pid: int) -> PidState:
    """Where there is no /proc: whether a signal could be sent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "runs"
    return "runs"
