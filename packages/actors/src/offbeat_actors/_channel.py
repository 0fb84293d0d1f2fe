"""Sends and receives frames over a stream of bytes, with asyncio."""

import asyncio
import contextlib
import socket
from typing import Final, Protocol

import numpy as np

from offbeat_actors._frames import HEADER, Bytes, Frame

_SEND_BUFFER_BYTES: Final = 4 << 20
"""Asked of the kernel, which may give less: fewer wake-ups make big arrays several times faster."""
_JOINED_BYTES: Final = 64 << 10
"""Frames that wait together are sent as one up to this size: many small calls cost little more than one."""


class ByteStream(Protocol):
    """Bytes both ways, in order. What it raises when the other side is gone is a ConnectionError."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the front of the buffer; how many bytes came, 0 at the end."""
        ...

    async def send(self, data: memoryview) -> None:
        """Send all of it; returns when the other side has room for more."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class SocketStream:
    """A connected stream socket. Must be made inside a running event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket, self._loop = sock, asyncio.get_running_loop()

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the front of the buffer: see `ByteStream`."""
        return await self._loop.sock_recv_into(self._socket, buffer)

    async def send(self, data: memoryview) -> None:
        """Send all of it: see `ByteStream`."""
        await self._loop.sock_sendall(self._socket, data)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Channel:
    """Frames both ways. Must be made inside a running event loop.

    One task writes, in order, so a cancelled sender never leaves half a frame behind.

    Args:
        stream: closed with the channel.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
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
        """Wait until every frame queued so far has been handed over."""
        await self._outbox.join()

    async def close(self) -> None:
        """Stop writing and close the stream."""
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
        self._stream.close()

    async def _read(self, num_bytes: int) -> Bytes:
        buffer = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            received = await self._stream.receive_into(buffer.data[done:])
            if not received:
                raise EOFError
            done += received
        return buffer

    async def _write(self) -> None:
        while True:
            frames = [await self._outbox.get()]
            num_bytes = len(frames[0])
            while num_bytes < _JOINED_BYTES and not self._outbox.empty():
                frames.append(self._outbox.get_nowait())
                num_bytes += len(frames[-1])
            with contextlib.suppress(ConnectionError):
                await self._stream.send((np.concatenate(frames) if len(frames) > 1 else frames[0]).data)
            for _ in frames:
                self._outbox.task_done()
