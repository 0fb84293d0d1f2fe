"""A role process that is a child of this one."""

import asyncio
import contextlib
import os
import signal

from offbeat_cluster._process_state import describe_process


class LocalProcess:
    """Implements `RoleProcess` for a child process that leads a process group of its own."""

    address = "127.0.0.1"
    place = ""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has been seen to end."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end: its exit code, or minus the signal that killed it."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def state(self) -> str:
        """What it is doing, when that is odd."""
        return describe_process(self.pid)
