"""A role process that a node agent runs, as the driver has it."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Final

from offbeat_actors._launcher import open_log
from offbeat_actors.ray._agent import CHUNK_BYTES, Report, decode
from offbeat_core import RunFolderError

_log: Final = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0
"""A node agent reports at least so often, even when there is nothing to report."""
_ASK_S: Final = 5.0
"""Time for Ray to answer whether a node lives."""
_AGAIN_S: Final = 0.1
_REACH_S: Final = 2.0
"""Time for a node to accept a connection."""
_LOOK_AGAIN_S: Final = 2.0
"""Time after `silent_after_s` for reading what has come."""
_KILL_S: Final = 5.0
"""Time that the node agent has after SIGKILL to report the end, before it is given up itself."""


class AgentLink:
    """One node agent, as the driver has it.

    Args:
        ray: the module.
        actor: its handle.
        node: Ray's id of its node.
        address: of its node.

    Attributes:
        lost: how it was lost, as text; "" while it is not.
        is_silent: it was lost because it did not answer.
    """

    def __init__(self, ray: Any, actor: Any, node: str, address: str) -> None:
        self.ray, self.actor, self.node, self.address = ray, actor, node, address
        self.lost, self.is_silent = "", False

    def kill(self) -> None:
        """End it and all its processes."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actor)

    async def explain_loss(self, error: BaseException) -> str:
        """Say in one line how it was lost, and remember that it is."""
        alive = True
        with contextlib.suppress(TimeoutError):  # there is no answer where the driver itself is cut off
            async with asyncio.timeout(_ASK_S):
                error = await self._final_word(error)
                alive = await asyncio.to_thread(is_node_alive, self.ray, self.node)
        text = str(error)
        if not alive or "node has died" in text or "node was terminated" in text:
            self.lost = f"its node {self.address} was lost"
        else:
            last = [type(error).__name__, *(line.strip() for line in text.splitlines() if line.strip())][-1]
            self.lost = f"its node agent, a Ray actor on {self.address}, died: {last}"
        return self.lost

    async def _final_word(self, error: BaseException) -> BaseException:
        """Ask again while Ray only says that it cannot reach it: it learns later whether the node was lost."""
        unavailable = self.ray.exceptions.ActorUnavailableError
        while isinstance(error, unavailable) and await asyncio.to_thread(is_node_alive, self.ray, self.node):
            await asyncio.sleep(_AGAIN_S)
            try:
                await self.actor.whereabouts.remote()
            except self.ray.exceptions.RayError as later:
                error = later
            else:
                break  # but what it said meanwhile is lost
        return error


def is_node_alive(ray: Any, node_id: str) -> bool:
    """Return whether a node lives and can be reached. Ray learns of a lost one by heartbeats, a minute later."""
    found = next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
    if found is None:
        return False
    try:
        socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


class RemoteProcess:
    """Implements `RoleProcess` and `ByteStream` over the reports of a node agent.

    Args:
        link: to the node agent that has started it.
        key: what the node agent calls it.
        pid: its process id there.
        log_path: takes what it writes, when the node does not have this file itself.
        silent_after_s: a node agent that reports nothing for so long is given up: its node is stopped, or cut off.
    """

    def __init__(self, link: AgentLink, key: str, pid: int, log_path: Path | None, silent_after_s: float) -> None:
        self._link, self._key, self.pid, self._log_path = link, key, pid, log_path
        self._silent_after_s = silent_after_s
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int | str] = self._loop.create_future()
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._chunk = memoryview(b"")
        self._is_log_lost = False
        self._last_message_s = time.monotonic()
        self._listening = asyncio.create_task(self._listen())

    @property
    def address(self) -> str:
        """IP address of its machine."""
        return self._link.address

    @property
    def place(self) -> str:
        """Return where it runs, for error texts."""
        return f" on {self.address}"

    @property
    def alive(self) -> bool:
        """False once its end is known."""
        return not self._end.done()

    async def wait(self) -> int | str:
        """Wait for its end: exit code, minus signal, or words."""
        return await asyncio.shield(self._end)

    def send_signal(self, number: signal.Signals) -> None:
        """Have the node agent send it. After SIGKILL a node agent that reports no end is ended itself."""
        if not self.alive:
            return
        self._link.actor.send_signal.remote(self._key, int(number))
        if number == signal.SIGKILL:
            lost = f"its node agent on {self.address} did not answer and was ended"
            self._loop.call_later(_KILL_S, self._give_up, lost)

    async def state(self) -> str:
        """Return what it is doing, when that is odd."""
        try:
            async with asyncio.timeout(1.0):
                return str(await self._link.actor.state.remote(self._key))
        except TimeoutError:
            silent_s = time.monotonic() - self._last_message_s
            return f"no message from its node {self.address} for {silent_s:.0f} s: stopped, or cut off?"
        except self._link.ray.exceptions.RayError as error:
            return await self._link.explain_loss(error)

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the front of the buffer: see `ByteStream`."""
        if not self._chunk:
            self._chunk = memoryview(await self._chunks.get())
        part = self._chunk[: len(buffer)]
        buffer[: len(part)] = part
        self._chunk = self._chunk[len(part) :]
        return len(part)

    async def send(self, data: memoryview) -> None:
        """Send it in pieces, each when the one before has been written: see `ByteStream`."""
        for start in range(0, len(data), CHUNK_BYTES):
            try:
                await self._link.actor.send.remote(self._key, bytes(data[start : start + CHUNK_BYTES]))
            except self._link.ray.exceptions.RayError as error:
                raise ConnectionError(str(error)) from error

    def abandon(self, lost: str) -> None:
        """Take its end as given, where no process is left to report it or bring it about."""
        self._link.lost = lost
        self._finish(lost)

    def close(self) -> None:
        """Stop listening."""
        self._listening.cancel()

    async def _listen(self) -> None:
        try:
            while self.alive:
                report = await self._next_report()
                if report is None:
                    self._give_up(f"no message from its node {self.address} for {self._silent_after_s:g} s")
                    return
                self._last_message_s = time.monotonic()
                self._take(report)
        except self._link.ray.exceptions.RayError as error:
            self._finish(await self._link.explain_loss(error))

    async def _next_report(self) -> Report | None:
        """Return the node agent's report; None: it was silent for too long, and this process was not suspended.

        In a process that continues after SIGSTOP the timers are due before it has read what came meanwhile: it polls
        once more.
        """
        asked = asyncio.ensure_future(self._ask())
        try:
            for patience_s in (self._silent_after_s, _LOOK_AGAIN_S):
                await asyncio.wait({asked}, timeout=patience_s)
                if asked.done():
                    return asked.result()
        finally:
            asked.cancel()
        return None

    async def _ask(self) -> Report:
        patience_s = min(_PATIENCE_S, self._silent_after_s / 3)
        return decode(await self._link.actor.receive.remote(self._key, patience_s), Report)

    def _take(self, report: Report) -> None:
        if report.log and self._log_path is not None:
            self._write_log(self._log_path, report.log)
        if report.stream:
            self._chunks.put_nowait(report.stream)
        if report.ended is not None:
            self._finish(report.ended)
        elif report.closed:
            self._chunks.put_nowait(b"")

    def _write_log(self, path: Path, text: bytes) -> None:
        """Append to the driver's file. Where that fails (its disk is full), the role works on without a log."""
        try:
            with contextlib.closing(os.fdopen(open_log(path, self._key), "wb")) as file:
                file.write(text)
        except (OSError, RunFolderError) as error:
            if not self._is_log_lost:
                _log.warning("what %s writes is lost: %s: %s", self._key.split()[0], path, error)
            self._is_log_lost = True

    def _finish(self, end: int | str) -> None:
        self._chunks.put_nowait(b"")
        if not self._end.done():
            self._end.set_result(end)

    def _give_up(self, lost: str) -> None:
        if self.alive:
            self._link.lost, self._link.is_silent = lost, True
            self._link.kill()
            self._finish(lost)
