"""A Unix socket with messages, deadlines, and errors that name the other side."""

import contextlib
import os
import socket
import struct
import sys
import time
from typing import Final, TypeVar

import msgspec

from offbeat_dist.liveness import waiting
from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync._messages import Failure, Message

M = TypeVar("M", bound=Message)

_HEADER: Final = struct.Struct("<I")
_UCRED: Final = struct.Struct("3i")
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Deadline:
    """A point in time, shared by all the waits of one sync.

    Args:
        waiting: name of the sync, such as "weight sync of version 3".
        seconds: time allowed from now.
    """

    def __init__(self, waiting: str, seconds: float) -> None:
        self.waiting, self.seconds = waiting, seconds
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def declared(self, on: str) -> waiting:
        """Let the liveness monitor see a wait for `on`, for a verdict to name it."""
        return waiting(self.waiting, on=on, deadline_s=self.seconds)

    def missed(self, on: str) -> DeadlineError:
        """The error to raise when it has passed while waiting for `on`."""
        return DeadlineError(self.waiting, on, self.seconds, "is it stuck, or is the deadline too short?")


class LaneLostError(WeightSyncError):
    """A connection of a lane has ended. Why, the principal one says."""

    def __init__(self, text: str, principal: "Connection") -> None:
        super().__init__(text)
        self.principal = principal


class Connection:
    """One connected socket of a sync.

    Args:
        sock: connected Unix stream socket.
        peer: who is at the other end, for errors.
        deadline: of the sync.
        principal: the connection to the same process on which it says why it gives up; None: this one.
    """

    def __init__(
        self, sock: socket.socket, peer: str, deadline: Deadline, principal: "Connection | None" = None
    ) -> None:
        self.peer, self.deadline, self._principal = peer, deadline, principal
        self._socket = sock

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WeightSyncError: the other side is gone.
            DeadlineError: it does not read.
        """
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.settimeout(self.deadline.left_s() or 1e-3)
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except TimeoutError as error:
            raise self.deadline.missed(self.peer) from error
        except OSError as error:
            raise self.last_words() from error

    def receive(self, kind: type[M], what: str) -> M:
        """Return the next message, which must be of this kind.

        Args:
            kind: message class.
            what: what is waited for, for errors, such as "bucket 3".

        Raises:
            WeightSyncError: the other side failed, with its reason, or is gone.
            DeadlineError: nothing came.
        """
        with self.deadline.declared(self.peer):
            message = self._receive_any(what)
        if isinstance(message, Failure):
            raise WeightSyncError(f"{self.peer} gave up: {message.text}")
        if not isinstance(message, kind):
            raise WeightSyncError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def send_descriptor(self, fd: int) -> None:
        """Give the other side a copy of an open file."""
        try:
            socket.send_fds(self._socket, [b"\0"], [fd])
        except OSError as error:
            raise self.last_words() from error

    def receive_descriptor(self) -> int:
        """Take what `send_descriptor` gave; the caller closes it."""
        self._socket.settimeout(self.deadline.left_s() or 1e-3)
        try:
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1, _CLOSE_ON_EXEC)
        except TimeoutError as error:
            raise self.deadline.missed(f"{self.peer} to hand over the memory") from error
        except OSError as error:
            raise self._gone("before it handed over the memory") from error
        if not fds:
            raise self._gone("before it handed over the memory")
        return fds[0]

    def fail(self, text: str) -> None:
        """Tell the other side why this one gives up, if it still listens."""
        with contextlib.suppress(WeightSyncError, DeadlineError):
            self.send(Failure(text))

    def break_off(self) -> None:
        """End all waits on it, here and at the other side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _receive_any(self, what: str) -> Message:
        try:
            (length,) = _HEADER.unpack(self._read(_HEADER.size))
            message: Message = msgspec.msgpack.decode(self._read(length), type=Message)
        except TimeoutError as error:
            raise self.deadline.missed(f"{self.peer} ({what})") from error
        except (EOFError, OSError) as error:
            raise self._gone(f"while {what} was awaited") from error
        except msgspec.MsgspecError as error:
            raise WeightSyncError(f"{self.peer} sent a message that cannot be read: {error}") from error
        return message

    def _read(self, num_bytes: int) -> bytes:
        chunks = []
        while num_bytes:
            self._socket.settimeout(self.deadline.left_s() or 1e-3)
            chunk = self._socket.recv(min(num_bytes, 1 << 20))
            if not chunk:
                raise EOFError
            chunks.append(chunk)
            num_bytes -= len(chunk)
        return b"".join(chunks)

    def last_words(self) -> WeightSyncError:
        """Why sending failed: a side that gives up says so before it hangs up."""
        if self._principal is not None:
            return self._gone("before all was sent")
        with contextlib.suppress(WeightSyncError, DeadlineError):
            while not isinstance(message := self._receive_any("its last words"), Failure):
                pass
            return WeightSyncError(f"{self.peer} gave up: {message.text}")
        return self._gone("before all was sent")

    def _gone(self, when: str) -> WeightSyncError:
        text = f"{self.peer} hung up or died {when}"
        return WeightSyncError(text) if self._principal is None else LaneLostError(text, self._principal)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user. True where the system cannot say."""
    if sys.platform != "linux":
        return True  # there the socket is a file in a folder that only its owner may enter
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())
