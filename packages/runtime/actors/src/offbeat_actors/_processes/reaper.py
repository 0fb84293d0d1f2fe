"""Ends what a role has started when the role or its driver is gone, also after `kill -9`.

The kernel ends a role whose driver dies, but not the processes that the role has started: an engine's core would keep
its devices. So each role starts a reaper in its own process group: a shell that waits for the end of a pipe whose
other end the driver holds, or for the end of the role, and then ends the group. A shell, since it holds 0.2 MB and
starts in 2 ms; a Python that does the same holds 3 MB. What leaves the group on purpose (`setsid`) is not followed.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

GRACE_S: Final = 2
"""Time between SIGTERM and SIGKILL."""
PR_SET_PDEATHSIG: Final = 1

_ROLE_ENDED: Final = signal.SIGRTMAX - 7 if sys.platform == "linux" else signal.SIGUSR1
"""Signal that the kernel sends. No program sends it to the group for a reason of its own."""
# `read` returns at the end of the pipe or at the signal; the last line ends the reaper too.
_SCRIPT: Final = f"""
trap '' HUP INT QUIT TERM
trap : {int(_ROLE_ENDED)}
read _
kill -TERM 0
sleep {GRACE_S}
kill -KILL 0
"""
_POLL_EVERY_S: Final = 0.005
_GONE_S: Final = 2.0
"""Time for a process to end after SIGKILL, on a machine under load."""


class ReaperPipe:
    """The pipe of one reaper, as held by the process that starts the role.

    Attributes:
        theirs: the end for the role to inherit; close it with `hand_over` when the role was started.
    """

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()

    def hand_over(self) -> None:
        """Close the role's end: the role has its own by now, or was never started."""
        os.close(self.theirs)

    async def close(self) -> None:
        """Let go of the pipe when the group of the role was killed: returns when the reaper is gone too."""
        give_up_s = time.monotonic() + _GONE_S
        poll = select.poll()
        poll.register(self._ours, 0)  # reports POLLERR once the pipe has no reader any more
        while not poll.poll(0) and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_EVERY_S)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the pipe; a reaper that is still there ends what is left of the group."""
        if self._ours >= 0:
            os.close(self._ours)
        self._ours = -1


class Reaper:
    """The reaper of this process, which leads a process group. Start it before anything makes threads.

    Args:
        fd: the role's end of its pipe, inherited; closed here.
    """

    def __init__(self, fd: int) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "offbeat-reaper"],
            stdin=fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            preexec_fn=_request_end_signal,
        )
        os.close(fd)

    def dismiss(self) -> None:
        """End it, and leave no zombie: for a role that was asked to stop. Its driver ends the rest of the group."""
        with contextlib.suppress(ChildProcessError):
            self._process.kill()
            self._process.wait()


def _request_end_signal() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, _ROLE_ENDED)
