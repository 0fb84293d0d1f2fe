"""A role process that a node agent runs, as the driver has it."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from offbeat_actors._agent import CHUNK_BYTES, Order, Report, Started, describe_log
from offbeat_actors._launcher import open_log
from offbeat_actors._spec import ClusterConfig, RoleSpec
from offbeat_core import PeerFailedError, RunFolderError

_log: Final = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0
"""A node agent reports at least so often, even when there is nothing to report."""
_LOOK_AGAIN_S: Final = 2.0
"""Time after `silent_after_s` for reading what has come."""
_LEASE: Final = 5
"""Times `silent_after_s` after which a cut-off node ends its roles. More than once: a driver may be suspended."""
_KILL_S: Final = 5.0
"""Time that the node agent has after SIGKILL to report the end, before it is given up itself."""


class AgentLostError(ConnectionError):
    """A node agent cannot be reached any more; the text says how it was lost."""


class AgentLink(ABC):
    """One node agent, as the driver has it. Its calls raise AgentLostError when it is lost.

    Args:
        address: of its node.

    Attributes:
        lost: how it was lost, as text; "" while it is not.
        is_silent: it was lost because it did not answer.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost, self.is_silent = "", False

    @abstractmethod
    async def start_process(self, order: Order) -> Started:
        """Start a process."""

    @abstractmethod
    async def send(self, key: str, data: bytes) -> None:
        """Write to the socket of a process; returns when that is done."""

    @abstractmethod
    async def receive(self, key: str, patience_s: float) -> Report:
        """Wait for news of a process."""

    @abstractmethod
    async def state(self, key: str) -> str:
        """Return what a process is doing, when that is odd."""

    @abstractmethod
    def send_signal(self, key: str, number: int) -> None:
        """Send a signal to the group of a process, without waiting."""

    @abstractmethod
    def kill(self) -> None:
        """End it and all its processes."""


async def start_remote(
    link: AgentLink,
    spec: RoleSpec,
    env: Mapping[str, str],
    config: ClusterConfig,
    *,
    devices: Sequence[int] | None,
    device_kind: str = "",
) -> "RemoteProcess":
    """Have a node agent start the process of a role.

    Args:
        link: to the agent.
        spec: of the role.
        env: variables of the role.
        config: names those that every role gets, and says when a node is silent.
        devices: see `Order`.
        device_kind: see `Order`.

    Raises:
        PeerFailedError: it could not be started there, or the agent is lost.
    """
    log = None
    if spec.log_path is not None:
        os.close(open_log(spec.log_path, spec.name))
        log = describe_log(spec.log_path)
    carried = {name: os.environ[name] for name in config.forward_env if name in os.environ}
    order = Order(
        key=f"{spec.name} {secrets.token_hex(4)}",
        role=spec.name,
        env={**carried, **env},
        dropped_settings={variable: list(names) for variable, names in spec.dropped_settings.items()},
        folder=os.getcwd(),
        log=log,
        devices=None if devices is None else list(devices),
        lease_s=_LEASE * config.silent_after_s,
        device_kind=device_kind,
    )
    try:
        started = await link.start_process(order)
    except AgentLostError as error:
        raise PeerFailedError(spec.name, str(error)) from error
    except asyncio.CancelledError:
        link.send_signal(order.key, int(signal.SIGKILL))
        raise
    if started.error:
        raise PeerFailedError(spec.name, f"could not be started on {link.address}: {started.error}")
    return RemoteProcess(link, order.key, started.pid, spec.log_path, config.silent_after_s)


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
        self._link.send_signal(self._key, int(number))
        if number == signal.SIGKILL:
            lost = f"its node agent on {self.address} did not answer and was ended"
            self._loop.call_later(_KILL_S, self._give_up, lost)

    async def state(self) -> str:
        """Return what it is doing, when that is odd."""
        try:
            async with asyncio.timeout(1.0):
                return await self._link.state(self._key)
        except TimeoutError:
            silent_s = time.monotonic() - self._last_message_s
            return f"no message from its node {self.address} for {silent_s:.0f} s: stopped, or cut off?"
        except AgentLostError as error:
            return str(error)

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
            await self._link.send(self._key, bytes(data[start : start + CHUNK_BYTES]))

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
        except AgentLostError as error:
            self._finish(str(error))

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
        return await self._link.receive(self._key, patience_s)

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
