"""A role process that is a child of this one."""

import asyncio
import contextlib
import os
import signal
from typing import Final

from offbeat_actors._guardian import GuardianPipe
from offbeat_actors._process_state import describe_process

_KILL_S: Final = 20.0
"""After SIGKILL: how long a process may take to end. The memory of a large one is given back in seconds."""


class LocalProcess:
    """Implements `RoleProcess` for a child process that leads a process group of its own.

    Args:
        process: the child.
        guardian: of its group, where it has one.
    """

    address = "127.0.0.1"
    place = ""

    def __init__(self, process: asyncio.subprocess.Process, guardian: GuardianPipe | None = None) -> None:
        self._process, self._guardian = process, guardian
        self._killed = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has been seen to end."""
        return self._process.returncode is None

    async def wait(self) -> int | str:
        """Wait for its end: its exit code, or minus the signal that killed it; words when SIGKILL does not end it."""
        ended = asyncio.ensure_future(self._process.wait())
        killed = asyncio.ensure_future(self._killed.wait())
        try:
            await asyncio.wait({ended, killed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=_KILL_S)
            if ended.done():
                return ended.result()
        finally:
            ended.cancel()
            killed.cancel()
            await self._end_group()
        doing = describe_process(self.pid) or "it holds its devices and memory until it does"
        return f"its process {self.pid} has not ended {_KILL_S:g} s after SIGKILL: {doing}"

    async def _end_group(self) -> None:
        """What it has started must not outlive it."""
        if self._guardian is not None:
            self.send_signal(signal.SIGKILL)
            await self._guardian.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            self._killed.set()

    async def state(self) -> str:
        """What it is doing, when that is odd."""
        return describe_process(self.pid)
