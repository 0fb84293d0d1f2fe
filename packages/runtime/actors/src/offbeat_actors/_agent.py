"""The agent of a node, which runs the processes of roles there, and what it and the driver say to each other.

Messages are msgpack, handed over as bytes: by Ray, where the agent is a Ray actor (`ray/_agent.py`), or by our own
wire, where torchrun has started its process (`torchrun/_member.py`).
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from offbeat_actors._launcher import child_command, drop_settings, open_log
from offbeat_actors._local import describe_process, show_devices
from offbeat_actors._processes.reaper import ReaperPipe
from offbeat_core import OffbeatError

S = TypeVar("S", bound=msgspec.Struct)


class LogFile(msgspec.Struct, frozen=True):
    """A log file of the driver, described so that another process can check whether it has the same file.

    Args:
        path: on the driver's machine.
        inode: number of the file.
        modified_ns: time of the last change.
    """

    path: str
    inode: int
    modified_ns: int


class Order(msgspec.Struct, frozen=True):
    """Driver to node agent: start the process of a role.

    Args:
        key: names this process among all that the node agent will ever start.
        role: its name.
        env: variables to add to those of the node.
        dropped_settings: see `RoleSpec`.
        folder: to run in, where the node has it.
        log: takes its output; None: that of the node agent.
        devices: ordinals among the devices of the node agent; None: all of them.
        device_kind: of these devices, as the device seam calls it; "" where the agent knows.
        lease_s: it is ended when the driver asks for no report for so long.
    """

    key: str
    role: str
    env: dict[str, str]
    dropped_settings: dict[str, list[str]]
    folder: str
    log: LogFile | None
    devices: list[int] | None
    lease_s: float
    device_kind: str = ""


class Started(msgspec.Struct, frozen=True):
    """NodeAgent to driver: the process id, or why there is none."""

    pid: int
    error: str = ""


class Report(msgspec.Struct, frozen=True):
    """NodeAgent to driver: what has come from a process since the last report.

    Args:
        stream: the next bytes from its socket.
        log: the next bytes of its log, unless driver and node share the file.
        closed: nothing more will come from the socket.
        ended: exit code, or minus the signal that killed it; None while it runs.
    """

    stream: bytes
    log: bytes
    closed: bool
    ended: int | None


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[S]) -> S:
    """Return a message from its bytes.

    Raises:
        msgspec.ValidationError: it is of another type.
    """
    return msgspec.msgpack.decode(data, type=kind)


_REPORT_BYTES: Final = 1 << 20


def describe_log(path: Path) -> LogFile:
    """Touch a log file and describe it, so that a node agent can check whether it has the same one."""
    os.utime(path)
    found = path.stat()
    return LogFile(str(path.absolute()), found.st_ino, found.st_mtime_ns)


class LogMirror:
    """Copies a role's log from its node to the driver, part by part.

    Where driver and node share the file, the role writes straight to it and there is nothing to send. Otherwise it
    writes to a file of the node, which is read from here and is gone with the process.

    Args:
        log: the driver's.
        role: its name.
    """

    def __init__(self, log: LogFile, role: str) -> None:
        self.is_shared = _is_same(log)
        if self.is_shared:
            self.fd = open_log(Path(log.path), role)
        else:
            self.fd, path = tempfile.mkstemp(prefix=f"offbeat-{role}-", suffix=".log")
            self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.set_inheritable(self.fd, False)
            os.unlink(path)  # it lives as long as a process holds it open

    def news(self) -> bytes:
        """Return what has been written since the last time."""
        return b"" if self.is_shared else os.read(self._reader, _REPORT_BYTES)

    def close(self) -> None:
        """Let go of the files."""
        os.close(self.fd)
        if not self.is_shared:
            os.close(self._reader)


def _is_same(log: LogFile) -> bool:
    try:
        found = os.stat(log.path)
    except OSError:
        return False
    return (found.st_ino, found.st_mtime_ns) == (log.inode, log.modified_ns)


CHUNK_BYTES: Final = 4 << 20
"""Most bytes that travel in one message of Ray."""
_HELD_BYTES: Final = 4 * CHUNK_BYTES
_LAST_WORDS_S: Final = 0.5
_LOG_PATIENCE_S: Final = 1.0


class AgentProcess:
    """Starts the process. Must be made inside a running event loop, whose thread must outlive it.

    Args:
        order: what to start.
        env: all its environment variables.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: Order, env: Mapping[str, str]) -> None:
        self._log = LogMirror(order.log, order.role) if order.log else None
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        output = self._log.fd if self._log else None
        self._reaper = ReaperPipe()
        try:
            self._child = subprocess.Popen(
                child_command(theirs.fileno(), self._reaper.theirs, order.role),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=order.folder if Path(order.folder).is_dir() else None,
                pass_fds=(theirs.fileno(), self._reaper.theirs),
                start_new_session=True,
            )
        except BaseException:
            self._reaper.abandon()
            raise
        finally:
            theirs.close()
            self._reaper.hand_over()
        self._held = bytearray()
        self._last_message_s = time.monotonic()
        self._code: int | None = None
        self._loop = asyncio.get_running_loop()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self._exited = asyncio.Event()
        # A thread, not a child watcher: the loop of a Ray actor does not run in the main thread.
        threading.Thread(target=self._wait, name=f"wait for {order.role}", daemon=True).start()
        self._ending = asyncio.create_task(self._end())
        self._leasing = asyncio.create_task(self._end_without_lease(order.lease_s))

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._child.pid

    async def send(self, data: bytes) -> None:
        """Write to its socket; what it no longer reads is dropped: the report has its end."""
        with contextlib.suppress(ConnectionError):
            await self._loop.sock_sendall(self._socket, data)

    async def report(self, patience_s: float) -> Report:
        """Return what has come since the last report; waits for something to come, at most `patience_s`."""
        self._last_message_s = time.monotonic()
        if not self._held and self._code is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(patience_s, _LOG_PATIENCE_S) if self._is_mirrored else patience_s):
                    await self._news.wait()
        self._news.clear()
        stream = bytes(self._held[:CHUNK_BYTES])
        del self._held[:CHUNK_BYTES]
        self._room.set()
        closed = self._reading.done() and not self._held
        log = self._log.news() if self._log else b""
        # The log goes first: a driver that learns of the end reads the last lines at once.
        ended = self._code if not self._held and not log else None
        if ended is not None and self._log is not None:
            self._log.close()
            self._log = None
        return Report(stream=stream, log=log, closed=closed, ended=ended)

    def send_signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def state(self) -> str:
        """Return what it is doing, when that is odd."""
        return describe_process(self.pid)

    @property
    def _is_mirrored(self) -> bool:
        return self._log is not None and not self._log.is_shared

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await self._loop.sock_recv(self._socket, CHUNK_BYTES):
                self._held += data
                self._news.set()
                while len(self._held) >= _HELD_BYTES:
                    self._room.clear()
                    await self._room.wait()
        self._news.set()

    def _wait(self) -> None:
        self._child.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node agent is on its way out
            self._loop.call_soon_threadsafe(self._exited.set)

    async def _end_without_lease(self, lease_s: float) -> None:
        """End it when the driver has asked nothing for so long: it has given this node up, or cannot reach it."""
        while (left_s := self._last_message_s + lease_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        self.send_signal(signal.SIGKILL)

    async def _end(self) -> None:
        await self._exited.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started must not outlive it
        await self._reaper.close()
        await asyncio.wait({self._reading}, timeout=_LAST_WORDS_S)
        self._reading.cancel()
        self._leasing.cancel()
        self._code = self._child.returncode
        self._news.set()
        self._socket.close()


class NodeAgent:
    """Runs processes for the driver. All its methods take and give bytes, numbers and texts."""

    def __init__(self) -> None:
        self._processes: dict[str, AgentProcess] = {}

    def _environment_of(self, order: Order) -> Mapping[str, str]:
        """Return the variables of a process, before those of its order.

        Raises:
            OffbeatError: its devices cannot be shown to it.
        """
        shown = show_devices(order.device_kind, order.devices) if order.devices else {}
        return {**os.environ, **shown}

    async def start_process(self, order: bytes) -> bytes:
        """Start a process."""
        wanted = decode(order, Order)
        try:
            env = drop_settings({**self._environment_of(wanted), **wanted.env}, wanted.dropped_settings)
            process = AgentProcess(wanted, env)
        except (OSError, OffbeatError) as error:
            return encode(Started(0, str(error)))
        self._processes[wanted.key] = process
        return encode(Started(process.pid))

    async def send(self, key: str, data: bytes) -> None:
        """Write to the socket of a process."""
        if process := self._processes.get(key):
            await process.send(data)

    async def receive(self, key: str, patience_s: float) -> bytes:
        """Wait for news of a process; the last report, with its end, is given once."""
        report = await self._processes[key].report(patience_s)
        if report.ended is not None:
            self._processes.pop(key, None)
        return encode(report)

    async def send_signal(self, key: str, number: int) -> None:
        """Send a signal to the group of a process."""
        if process := self._processes.get(key):
            process.send_signal(number)

    async def state(self, key: str) -> str:
        """Return what a process is doing, when that is odd."""
        process = self._processes.get(key)
        return process.state() if process else ""
