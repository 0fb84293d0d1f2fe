"""A role that is started when it is called, ended when it does not answer in time, and started again by the next call.

It needs no budget and no supervision: its calls are many and have short deadlines.
"""

import asyncio
from typing import Any

from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import Launcher
from offbeat_actors._spec import RoleSpec
from offbeat_core import DeadlineError


class RoleOnCall:
    """One role that runs code which may block or end its process, such as a user's reward.

    Args:
        launcher: starts it.
        spec: of it.
    """

    def __init__(self, launcher: Launcher, spec: RoleSpec) -> None:
        self._launcher, self._spec = launcher, spec
        self._handle: ActorHandle | None = None
        self._starting = asyncio.Lock()

    @property
    def name(self) -> str:
        """Name of the role, such as "scorer-0"."""
        return self._spec.name

    @property
    def handle(self) -> ActorHandle | None:
        """Its process, where one runs."""
        return self._handle if self._handle is not None and self._handle.alive else None

    async def start(self) -> ActorHandle:
        """Start a process unless one runs; raises as `Launcher.start`."""
        # Many may call while no process runs: the first starts it, the others wait and share it.
        async with self._starting:
            handle = self._handle = self.handle or await self._launcher.start(self._spec)
            return handle

    async def call(self, method: str, *args: Any, returns: Any = None, deadline_s: float) -> Any:
        """Call a method of the role: see `ActorHandle.call`. A process that does not answer in time is killed.

        Args:
            method: its name.
            args: of the method.
            returns: type of the result.
            deadline_s: for the answer of a process that runs; one that must be started has the launcher's deadline.

        Raises:
            DeadlineError: no answer in time; the process is gone.
            PeerFailedError: the process died.
            OffbeatError: it cannot be started, or the method raised it.
        """
        handle = await self.start()
        try:
            return await handle.call(method, *args, returns=returns, deadline_s=deadline_s)
        except DeadlineError:
            # What it runs may hold its thread, and then only the end of its process stops it. Until it is seen to be
            # dead, another call would get this process again.
            handle.kill()
            await handle.wait_dead()
            raise
