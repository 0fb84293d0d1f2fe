"""A role process as its keeper has it: a child, its socket, and what has come from both since the last report."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat_actors._guardian import GuardianPipe
from offbeat_actors._process_state import describe_process
from offbeat_actors._spawn import child_command
from offbeat_actors.ray._log_mirror import LogMirror
from offbeat_actors.ray._messages import Order, Report

CHUNK_BYTES: Final = 4 << 20
"""Most bytes that travel in one message of Ray."""
_HELD_BYTES: Final = 4 * CHUNK_BYTES
_LAST_WORDS_S: Final = 0.5
_LOG_PATIENCE_S: Final = 1.0


class KeptProcess:
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
        self._guardian = GuardianPipe()
        try:
            self._child = subprocess.Popen(
                child_command(theirs.fileno(), self._guardian.theirs, order.role),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=order.folder if Path(order.folder).is_dir() else None,
                pass_fds=(theirs.fileno(), self._guardian.theirs),
                start_new_session=True,
            )
        except BaseException:
            self._guardian.abandon()
            raise
        finally:
            theirs.close()
            self._guardian.hand_over()
        self._held = bytearray()
        self._heard_s = time.monotonic()
        self._code: int | None = None
        self._loop = asyncio.get_running_loop()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self._exited = asyncio.Event()
        # A thread, not a child watcher: the loop of a Ray actor does not run in the main thread.
        threading.Thread(target=self._wait, name=f"wait for {order.role}", daemon=True).start()
        self._ending = asyncio.create_task(self._end())
        self._leasing = asyncio.create_task(self._end_unheard(order.lease_s))

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._child.pid

    async def send(self, data: bytes) -> None:
        """Write to its socket; what it no longer reads is dropped: the report tells of its end."""
        with contextlib.suppress(ConnectionError):
            await self._loop.sock_sendall(self._socket, data)

    async def report(self, patience_s: float) -> Report:
        """What has come since the last report; waits for something to come, at most `patience_s`."""
        self._heard_s = time.monotonic()
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
        # The log goes first: who learns of the end reads the last lines at once.
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
        """What it is doing, when that is odd."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: the keeper is on its way out
            self._loop.call_soon_threadsafe(self._exited.set)

    async def _end_unheard(self, lease_s: float) -> None:
        """End it when the driver has asked nothing for so long: it has given this node up, or cannot reach it."""
        while (left_s := self._heard_s + lease_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        self.send_signal(signal.SIGKILL)

    async def _end(self) -> None:
        await self._exited.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started must not outlive it
        await self._guardian.close()
        await asyncio.wait({self._reading}, timeout=_LAST_WORDS_S)
        self._reading.cancel()
        self._leasing.cancel()
        self._code = self._child.returncode
        self._news.set()
        self._socket.close()
