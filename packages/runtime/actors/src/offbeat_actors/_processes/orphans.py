"""Ends what has left the process group of its role: a daemon, or a child with `setsid`, that a user's code started.

The signal that ends a role's group does not reach it. So the process that starts roles becomes the parent of every
descendant that loses its own (a subreaper), and finds among its children those that carry a mark in their environment.
It also has to take note of the end of each of them, as init would: otherwise they would stay as zombies.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "OFFBEAT_LAUNCHER"
"""Environment variable of every role, and of what it starts: which launcher has started it."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_GONE_S: Final = 2.0
"""Time for processes to end after SIGKILL, on a machine under load."""
_POLL_EVERY_S: Final = 0.005
_REAP_EVERY_S: Final = 10.0
"""Between looks for processes that have ended; a reward that starts one for each completion leaves few until then."""


@dataclass(frozen=True)
class _Child:
    pid: int
    session: int
    is_zombie: bool


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs. Linux alone has this; elsewhere init gets them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def end_orphans(mark: str, roles: frozenset[int]) -> None:
    """End adopted processes, when the roles of a launcher have ended.

    Args:
        mark: value of `MARK` in their environment.
        roles: process ids of those roles, which are also their sessions.
    """
    end_s, killed = time.monotonic() + _GONE_S, set[int]()
    while time.monotonic() < end_s:
        children = list(_children())
        marked = {child.pid for child in children if not child.is_zombie and _has_mark(child.pid, mark)}
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= marked
        ended = {each.pid for each in children if each.is_zombie and (each.pid in killed or each.session in roles)}
        for pid in ended:
            _reap(pid)
        killed -= ended
        if not killed and not ended:  # what has ended may have left children of its own, which are seen next
            return
        await asyncio.sleep(_POLL_EVERY_S)


async def end_session(session: int) -> None:
    """End adopted processes that have stayed in the session of a role, when the role has ended.

    Args:
        session: of the role: its process id.
    """
    end_s = time.monotonic() + _GONE_S
    while left := [child for child in _children() if child.session == session and child.pid != session]:
        for child in left:
            if child.is_zombie:
                _reap(child.pid)
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child.pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(_POLL_EVERY_S)


async def reap_orphans() -> None:
    """Take note of the ends of adopted processes until cancelled.

    Those that the program has started itself it waits for itself: so a process that has ended is left for one look, and
    those of this process' own session are left for good.
    """
    own, before = os.getsid(0), set[int]()
    while True:
        await asyncio.sleep(_REAP_EVERY_S)
        children = await asyncio.to_thread(lambda: list(_children()))
        ended = {child.pid for child in children if child.is_zombie and child.session != own}
        for pid in ended & before:
            _reap(pid)
        before = ended - before


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _children() -> Iterator[_Child]:
    """All children of this process. Source: proc_pid_stat(5), fields 3, 4 and 6."""
    own = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):  # it is gone
            continue
        if parent == own:
            yield _Child(int(path.parent.name), int(session), state == "Z")


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False
