"""Children of multiprocessing: how those that may still be waited for have ended, and which of them write."""

import sys
from typing import Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.other_processes import written_by
from offbeat_liveness._process.proc import exit_code, pid_state

MAX_ENDED: Final = 4  # that are named
STREAMS: Final = ("pipe:", "socket:")
WELL: Final = "has ended with exit code 0"


def pid_of(process: object) -> int:
    """Return the pid of a Process of multiprocessing; 0 where it has none (not started, or a thread in its place)."""
    return peek.integer(peek.path(process, "_popen.pid")) or 0


def ended_children() -> str:
    """Name the children of multiprocessing's that have ended or are stopped, as the rest of a sentence.

    What they were to do is not done. One that has ended well is named only where none is left. multiprocessing forgets
    those whose end the program has asked for, or that had ended before the last child was started.
    """
    module = sys.modules.get("multiprocessing.process")
    children = [(each, pid) for each in peek.members(getattr(module, "_children", None)) if (pid := pid_of(each))]
    states = {pid: pid_state(pid) for _, pid in children}
    is_alone = all(state == "gone" for state in states.values())
    ends = [(each, pid, _end_of(each, pid)) for each, pid in children if states[pid] in ("gone", "stopped")]
    named = [(each, pid, end) for each, pid, end in ends if is_alone or end != WELL]
    if not named:
        return ""
    share = "its child" if len(named) == len(children) == 1 else f"of its {len(children)} children,"
    words = [f"{peek.text(peek.attribute(each, '_name'))!r} (pid {pid}) {end}" for each, pid, end in named[:MAX_ENDED]]
    return f"; {share} {', '.join(words)}" + (f" and {len(named) - MAX_ENDED} more" * (len(named) > MAX_ENDED))


def troubled_children() -> str:
    """Name the children that have ended, else those that wait for a reader, as the rest of a sentence."""
    return ended_children() or _writing_children()


def _writing_children() -> str:
    """Name the children that stand in a write to a pipe or a socket: this process may be the one that should read."""
    module = sys.modules.get("multiprocessing.process")
    children = [(each, pid) for each in peek.members(getattr(module, "_children", None)) if (pid := pid_of(each))]
    named = [(each, pid) for each, pid in children if any(name.startswith(STREAMS) for name in written_by(pid))]
    if not named:
        return ""
    words = [f"{peek.text(peek.attribute(each, '_name'))!r} (pid {pid})" for each, pid in named[:MAX_ENDED]]
    share = "its child" if len(named) == len(children) == 1 else f"of its {len(children)} children,"
    return f"; {share} {', '.join(words)} waits too, for room to write what nobody reads"


def _end_of(process: object, pid: int) -> str:
    code = peek.integer(peek.path(process, "_popen.returncode"))
    code = exit_code(pid) if code is None else code
    if code is None:
        return "is stopped" if pid_state(pid) == "stopped" else "has ended"
    return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
