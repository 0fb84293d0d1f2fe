"""Sends and receives frames over one end of a socket pair, with asyncio."""

import asyncio
import contextlib
import socket
from typing import Final

import numpy as np

from offbeat_cluster._frames import HEADER, Bytes, Frame

_SEND_BUFFER_BYTES: Final = 4 << 20
"""Asked of the kernel, which may give less: fewer wake-ups make big arrays several times faster."""


class Channel:
    """Frames both ways over a connected stream socket. Must be made inside a running event loop.

    One task writes, in order, so a cancelled sender never leaves half a frame behind.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[Bytes] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, frame: Bytes) -> None:
        """Queue a frame. One that can no longer be delivered is dropped: the reading side learns of the death."""
        self._outbox.put_nowait(frame)

    async def receive(self) -> Frame | None:
        """Return the next frame, or None once the other side has closed or died."""
        try:
            envelope_bytes, array_bytes = HEADER.unpack((await self._read(HEADER.size)).data)
            envelope = (await self._read(envelope_bytes)).tobytes()
            return Frame(envelope, await self._read(array_bytes))
        except (EOFError, ConnectionError):
            return None

    async def flush(self) -> None:
        """Wait until every frame queued so far has been handed to the kernel."""
        await self._outbox.join()

    async def close(self) -> None:
        """Stop writing and close the socket."""
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
        self._socket.close()

    async def _read(self, num_bytes: int) -> Bytes:
        buffer = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            received = await self._loop.sock_recv_into(self._socket, buffer.data[done:])
            if not received:
                raise EOFError
            done += received
        return buffer

    async def _write(self) -> None:
        while True:
            frame = await self._outbox.get()
            with contextlib.suppress(ConnectionError):
                await self._loop.sock_sendall(self._socket, frame.data)
            self._outbox.task_done()
