"""A socket with messages, deadlines, and errors that name the other side."""

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from offbeat_liveness import waiting
from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync._messages import Failure, Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")

PATIENCE_S: Final = 0.05
"""A shorter wait is nobody's business. A longer one is declared to the liveness monitor, and ends with the deadline."""

LOOK_UP_S: Final = 0.2
"""Whoever waits longer looks up so often: is the sync wanted still?"""

_LAST_READ_S: Final = 1.0
"""How long a side that has said why it gives up still takes what was sent to it: see `Connection.close`."""

_LAST_WORDS_S: Final = 5.0
"""How long a side whose sending failed waits to be told why. One that gave up says so before it hangs up; where only a
connection between two living sides was lost, neither has anything to say."""

_HEADER: Final = struct.Struct("<I")
_MAX_MESSAGE_BYTES: Final = 256 << 20
_SIGNAL_BYTES: Final = 4
_UCRED: Final = struct.Struct("3i")
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Deadline:
    """A point in time, shared by all the waits of one sync.

    Args:
        waiting: name of the sync, such as "weight sync of version 3".
        seconds: time allowed from now.
        is_withdrawn: asked while somebody is waited for: True ends the wait, as nobody will come or answer.
    """

    def __init__(self, waiting: str, seconds: float, is_withdrawn: Callable[[], bool] = lambda: False) -> None:
        self.waiting, self.seconds, self.is_withdrawn = waiting, seconds, is_withdrawn
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def declared(self, on: str) -> waiting:
        """Let the liveness monitor see a wait for `on`, for a verdict to name it."""
        return waiting(self.waiting, on=on, deadline_s=self.seconds)

    def look_up(self, on: str) -> None:
        """Raise WeightSyncError if the sync, which waits for `on`, is not wanted any more."""
        if self.is_withdrawn():
            raise WeightSyncError(f"{self.waiting} was withdrawn while it waited for {on}")

    def missed(self, on: str) -> DeadlineError:
        """The error to raise when it has passed while waiting for `on`."""
        return DeadlineError(self.waiting, on, self.seconds, "is it stuck, or is the deadline too short?")


def was_heard(error: BaseException) -> bool:
    """Whether an error is what another side said, or that it is gone: the fault is not here."""
    return getattr(error, "heard", False)


def _heard(text: str) -> WeightSyncError:
    error = WeightSyncError(text)
    error.heard = True  # type: ignore[attr-defined]
    return error


class LaneLostError(WeightSyncError):
    """A connection of a lane has ended. Why, the principal one says."""

    def __init__(self, text: str, principal: "Connection") -> None:
        super().__init__(text)
        self._principal = principal

    def reason(self) -> WeightSyncError:
        """What the other side has said; if nothing, that it is gone."""
        return self._principal.last_words(str(self))


class Connection:
    """One connected socket of a sync.

    Args:
        sock: connected stream socket.
        peer: who is at the other end, for errors.
        deadline: of the sync.
        principal: the connection to the same process on which it says why it gives up; None: this one.
    """

    def __init__(
        self, sock: socket.socket, peer: str, deadline: Deadline, principal: "Connection | None" = None
    ) -> None:
        self.peer, self.deadline, self._principal = peer, deadline, principal
        self._socket, self._failed = sock, False
        self._reading_last_words = threading.Lock()
        self._last_words = ""
        sock.settimeout(PATIENCE_S)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def join(self, principal: "Connection", peer: str) -> None:
        """Become a lane to the same process."""
        self._principal, self.peer = principal, peer

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WeightSyncError: the other side is gone.
            DeadlineError: it does not read.
        """
        body = msgspec.msgpack.encode(message)
        self.send_bytes(memoryview(_HEADER.pack(len(body)) + body))

    def receive(self, kind: type[M], what: str) -> M:
        """Return the next message, which must be of this kind.

        Args:
            kind: message class.
            what: what is waited for, for errors, such as "bucket 3".

        Raises:
            WeightSyncError: the other side failed, with its reason, or is gone.
            DeadlineError: nothing came.
        """
        message = self.receive_any(what)
        if isinstance(message, Failure):
            raise _heard(f"{self.peer} gave up: {message.text}")
        if not isinstance(message, kind):
            raise WeightSyncError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def send_bytes(self, data: memoryview) -> None:
        """Send plain bytes; raises as `send` does."""
        done = 0
        try:
            while done < len(data):
                done += self._patiently(partial(self._socket.send, data[done:]), self.peer)
        except OSError as error:
            raise self.last_words() from error

    def receive_bytes(self, room: memoryview, what: str) -> None:
        """Fill memory with plain bytes; raises as `receive` does."""
        done = 0
        while done < len(room):
            done += self._read(partial(self._socket.recv_into, room[done:]), what)

    def receive_some(self, num_bytes: int) -> bytes:
        """Return what has come, at least one byte and at most so many; raises as `receive` does."""
        room = bytearray(num_bytes)
        return bytes(room[: self._read(partial(self._socket.recv_into, room), "its greeting")])

    def signal(self, number: int) -> None:
        """Send a number, at a tenth of a message's cost; raises as `send` does."""
        self.send_bytes(memoryview(number.to_bytes(_SIGNAL_BYTES, "little")))

    def receive_signal(self, what: str) -> int:
        """Return the next number; raises as `receive` does."""
        if self.deadline.left_s() > PATIENCE_S:
            with contextlib.suppress(OSError):  # it takes long, or is gone: see below
                quick = self._socket.recv(_SIGNAL_BYTES)
                if len(quick) == _SIGNAL_BYTES:  # four bytes that were sent at once come at once, over a Unix socket
                    return int.from_bytes(quick, "little")
        number = bytearray(_SIGNAL_BYTES)
        self.receive_bytes(memoryview(number), what)
        return int.from_bytes(number, "little")

    def raise_if_spoken(self) -> None:
        """Raise if the other side, from which nothing is due, has given up or is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if selector.select(0):
                raise self.last_words()

    def send_descriptor(self, fd: int) -> None:
        """Give the other side a copy of an open file."""
        try:
            socket.send_fds(self._socket, [b"\0"], [fd])
        except OSError as error:
            raise self.last_words() from error

    def receive_descriptor(self) -> int:
        """Take what `send_descriptor` gave; the caller closes it."""
        when = "before it handed over the memory"
        try:
            _, fds, _, _ = self._patiently(
                lambda: socket.recv_fds(self._socket, 1, 1, _CLOSE_ON_EXEC), f"{self.peer} to hand over the memory"
            )
        except OSError as error:
            raise self._gone(when) from error
        if not fds:
            raise self._gone(when)
        return fds[0]

    def fail(self, text: str) -> None:
        """Tell the other side why this one gives up, if it still listens."""
        self._failed = True
        with contextlib.suppress(WeightSyncError, DeadlineError):
            self.send(Failure(text))

    def break_off(self) -> None:
        """End all waits on it, here and at the other side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        if self._failed and self._socket.family != getattr(socket, "AF_UNIX", None):
            self._read_to_the_end()
        self._socket.close()

    def _read_to_the_end(self) -> None:
        """TCP that is closed with bytes unread is reset, and the reset may overtake the reason that was given."""
        end = time.monotonic() + _LAST_READ_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1 << 20) and time.monotonic() < end:
                pass

    def receive_any(self, what: str) -> Message:
        """Return the next message, of whatever kind; raises as `receive` does."""
        try:
            header = bytearray(_HEADER.size)
            self.receive_bytes(memoryview(header), what)
            (num_bytes,) = _HEADER.unpack(header)
            if num_bytes > _MAX_MESSAGE_BYTES:
                raise WeightSyncError(f"{self.peer} announced a message of {num_bytes} bytes: it is none of ours")
            body = bytearray(num_bytes)
            self.receive_bytes(memoryview(body), what)
            message: Message = msgspec.msgpack.decode(body, type=Message)
        except msgspec.MsgspecError as error:
            raise WeightSyncError(f"{self.peer} sent a message that cannot be read: {error}") from error
        return message

    def _read(self, operation: Callable[[], int], what: str) -> int:
        """Do one read; it gives the number of bytes."""
        try:
            num_bytes = self._patiently(operation, f"{self.peer} ({what})")
        except OSError as error:
            raise self._gone(f"while {what} was awaited") from error
        if not num_bytes:
            raise self._gone(f"while {what} was awaited")
        return num_bytes

    def _patiently(self, operation: Callable[[], T], on: str) -> T:
        """Do what may wait, declared if it takes long, until the deadline."""
        if self.deadline.left_s() > PATIENCE_S:
            try:
                return operation()
            except TimeoutError:
                pass  # it takes long
        try:
            with self.deadline.declared(self.peer):
                while True:
                    self._socket.settimeout(min(self.deadline.left_s(), LOOK_UP_S) or 1e-3)
                    try:
                        return operation()
                    except TimeoutError as error:
                        self.deadline.look_up(on)
                        if not self.deadline.left_s():
                            raise self.deadline.missed(on) from error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(PATIENCE_S)

    def last_words(self, otherwise: str = "") -> WeightSyncError:
        """Why sending failed: a side that gives up says so before it hangs up, once for all lanes."""
        if self._principal is not None:
            return self._gone("before all was sent")
        with self._reading_last_words:
            if not self._last_words:
                self._last_words = self._read_last_words(otherwise)
            return _heard(self._last_words)

    def _read_last_words(self, otherwise: str) -> str:
        deadline = self.deadline
        self.deadline = Deadline(deadline.waiting, min(deadline.left_s(), _LAST_WORDS_S))
        try:
            while not isinstance(message := self.receive_any("its last words"), Failure):
                pass
        except DeadlineError:
            if otherwise:
                otherwise += "; its other connection still stands: was this one reset on the way?"
        except WeightSyncError:
            pass  # it is gone
        else:
            return f"{self.peer} gave up: {message.text}"
        finally:
            self.deadline = deadline
        return otherwise or f"{self.peer} hung up or died before all was sent"

    def _gone(self, when: str) -> WeightSyncError:
        text = f"{self.peer} hung up or died {when}"
        return _heard(text) if self._principal is None else LaneLostError(text, self._principal)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user. True where the system cannot say."""
    if sys.platform != "linux":
        return True  # there the socket is a file in a folder that only its owner may enter
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())
