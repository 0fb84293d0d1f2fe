"""The wire: messages as frames of bytes, and the channel that carries them.

    | u64 envelope bytes | u64 array bytes | envelope (msgpack) | arrays, each at a multiple of 64 bytes |

Arrays travel beside the msgpack, not inside it, so that the receiver reads them from the socket straight into
the memory they will live in. In the envelope an array is an extension value (dtype, shape, offset).
Arguments and results are packed one by one as `msgspec.Raw`: the receiver decodes each to the type it declares.
"""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

HEADER: Final = struct.Struct("<QQ")
_ARRAY_CODE: Final = 1
_ALIGNMENT: Final = 64


class Start(msgspec.Struct, tag="start", frozen=True):
    """Parent to child, first: import `target` with `path` added to sys.path, and construct it."""

    target: str
    path: list[str]
    kwargs: dict[str, msgspec.Raw]


class Call(msgspec.Struct, tag="call", frozen=True):
    """Parent to child: call a method of the role."""

    id: int
    method: str
    args: list[msgspec.Raw]
    kwargs: dict[str, msgspec.Raw]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Parent to child: no caller waits for call `id` any more."""

    id: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Parent to child: close the role and exit."""


class Result(msgspec.Struct, tag="result", frozen=True):
    """Child to parent: what call `id` returned. Starting has id 0, stopping id -1."""

    id: int
    value: msgspec.Raw


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """Child to parent: what call `id` raised.

    Args:
        id: as in `Result`.
        types: class names of the error and its bases, most derived first.
        args: the error's args, when they are plain data.
        text: str(error).
        traceback: as Python prints it.
    """

    id: int
    types: list[str]
    args: list[str | int | float | bool | None] | None
    text: str
    traceback: str


Message = Start | Call | Cancel | Stop | Result | Failure
_MESSAGES: Final = msgspec.msgpack.Decoder(Message)
START_ID: Final = 0
STOP_ID: Final = -1
MAIN_THREAD: Final = "OFFBEAT_MAIN_THREAD"
"""Variable of a process whose main thread runs the methods of its role: known before the first message is read."""


class FrameWriter:
    """Builds one frame: pack the values, then `finish` with the message that holds them."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, npt.NDArray[Any]]] = []
        self._num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_custom)

    def pack(self, value: object) -> msgspec.Raw:
        """Encode one value.

        Raises:
            TypeError: it holds something that is neither plain data, nor a dataclass, nor an array.
        """
        return msgspec.Raw(self._encoder.encode(value))

    def finish(self, message: Message) -> Bytes:
        """Return the frame as [bytes] uint8. The arrays are copied here, so the caller may change his afterwards."""
        envelope = self._encoder.encode(message)
        start = HEADER.size + len(envelope)
        frame = np.empty(start + self._num_bytes, np.uint8)
        frame[:start] = np.frombuffer(HEADER.pack(len(envelope), self._num_bytes) + envelope, np.uint8)
        for offset, array in self._arrays:
            slot = frame[start + offset : start + offset + array.nbytes]
            np.copyto(slot.view(array.dtype).reshape(array.shape), array)  # packs an array with strides, too
        return frame

    def _encode_custom(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Path):
            return str(value)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"a call carries plain data, dataclasses and numpy arrays; got {name}")

    def _encode_array(self, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
        # Arrays of objects would need pickle.
        if array.dtype.kind not in "biufcSUmM":
            raise TypeError(f"a call carries arrays of numbers, bools or strings; got dtype {array.dtype}")
        offset = self._num_bytes
        self._arrays.append((offset, array))
        self._num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return msgspec.msgpack.Ext(
            _ARRAY_CODE, msgspec.msgpack.encode((array.dtype.str, array.shape, array.nbytes, offset))
        )


def write_frame(message: Message) -> Bytes:
    """Build the frame of a message without packed values."""
    return FrameWriter().finish(message)


class Frame:
    """One received message and the arrays that came with it.

    Args:
        envelope: the msgpack part.
        arrays: [bytes] uint8. Arrays unpacked from the frame are writable views of it: nothing is copied.
    """

    def __init__(self, envelope: bytes, arrays: Bytes) -> None:
        self.message = _MESSAGES.decode(envelope)
        self._arrays = arrays

    def unpack(self, raw: msgspec.Raw, kind: Any) -> Any:
        """Decode one packed value as the type `kind`; `Any` gives plain data and arrays.

        Raises:
            msgspec.ValidationError: it is not of that type.
        """
        return msgspec.msgpack.decode(raw, type=kind, dec_hook=_decode_custom, ext_hook=self._decode_extension)

    def _decode_extension(self, code: int, data: memoryview) -> npt.NDArray[Any]:
        if code != _ARRAY_CODE:
            raise ValueError(f"unknown msgpack extension {code}")
        dtype, shape, num_bytes, offset = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int, int])
        return self._arrays[offset : offset + num_bytes].view(np.dtype(dtype)).reshape(shape)


def _decode_custom(kind: Any, value: object) -> object:
    """Turn decoded data into a type that msgspec does not know: arrays, numpy scalars, paths."""
    if (get_origin(kind) or kind) is np.ndarray:
        return _check_array(kind, value)
    if kind is Path:
        return Path(str(value))
    if isinstance(kind, type) and issubclass(kind, np.generic):
        return kind(value)
    raise TypeError(f"a call carries plain data, dataclasses and numpy arrays; {kind!r} was declared")


def _check_array(kind: Any, value: object) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"Expected a numpy array, got `{type(value).__name__}`")
    dtypes = [scalar for argument in get_args(kind)[1:] for scalar in get_args(argument)]
    for wanted in dtypes:  # one, a numpy scalar type; or Any, which is a class too
        if isinstance(wanted, type) and issubclass(wanted, np.generic) and not np.issubdtype(value.dtype, wanted):
            raise TypeError(f"Expected an array of {wanted.__name__}, got {value.dtype}")
    return value


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
        sock.setblocking(False)  # asyncio's `sock_*` calls need it
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
        self._outbox: asyncio.Queue[Bytes] = asyncio.Queue()  # without a bound, as `send` does not wait
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
        except (EOFError, ConnectionError):  # in the middle of a frame, too: the other side has died while it wrote
            return None

    async def flush(self) -> None:
        """Wait until every frame queued so far has been handed over."""
        await self._outbox.join()

    async def close(self) -> None:
        """Stop writing and close the stream."""
        self._writer.cancel()
        # The stream is closed only when the task that writes to it has ended.
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
            with contextlib.suppress(ConnectionError):  # the reading side learns of the death
                await self._stream.send((np.concatenate(frames) if len(frames) > 1 else frames[0]).data)
            for _ in frames:
                self._outbox.task_done()  # not before: `flush` waits until a frame is handed over
