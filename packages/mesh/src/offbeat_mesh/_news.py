"""What the processes of a world tell each other beside their collectives, and how it is framed on a socket."""

import socket
import struct
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from offbeat_types import DeadlineError, OffbeatError, PeerFailedError

LENGTH: Final = struct.Struct("!I")
MAX_FRAME_BYTES: Final = 1 << 20
"""News is short; a longer frame is not ours."""

MAX_LINE_CHARS: Final = 1000
"""Of an error's line; what somebody prints into it may be longer than a frame."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first frame of a connection."""

    rank: int
    token: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The hub's answer to a hello."""


class Record(msgspec.Struct, tag="record", frozen=True, kw_only=True):
    """A failure, or an end: why a group, or every group of a rank, can go no further.

    Args:
        kind: "failed" raised an error; "deadline" waited too long; "died" ended without a word; "left" ended well.
        rank: whom it befell, a global rank.
        group: key of the one group that it ends; "" ends every group that holds the rank.
        peer: who is to blame, for people; "" means `rank`.
        reason: the error in one line; for "deadline" the advice.
        waiting, deadline_s: of a "deadline", with `peer` as the one who did not come.
    """

    kind: Literal["failed", "deadline", "died", "left"]
    rank: int
    group: str = ""
    peer: str = ""
    reason: str = ""
    waiting: str = ""
    deadline_s: float = 0.0

    @classmethod
    def of(cls, error: BaseException, rank: int, group: str = "", peer: str = "") -> "Record":
        """The record of an error; of a peer's failure it keeps who failed first and why."""
        if isinstance(error, DeadlineError):
            return cls(
                kind="deadline",
                rank=rank,
                group=group,
                peer=error.on,
                reason=error.advice,
                waiting=error.waiting,
                deadline_s=error.deadline_s,
            )
        if isinstance(error, PeerFailedError):
            return cls(kind="failed", rank=rank, group=group, peer=error.peer, reason=error.reason)
        return cls(kind="failed", rank=rank, group=group, peer=peer, reason=one_line(error))

    def error(self, name: str) -> OffbeatError:
        """What the other members raise; `name` is what they call the rank."""
        if self.kind == "deadline":
            return DeadlineError(self.waiting, self.peer, self.deadline_s, self.reason)
        return PeerFailedError(self.peer or name, self.reason or ENDS[self.kind])


ENDS: Final = {
    "failed": "it raised an error",
    "died": "its process ended without a word: killed, out of memory, or crashed; look at its log",
    "left": "it has left the world, so it comes to no further call",
}


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Where do the members of a group stand? Relayed to each of them."""

    asker: int
    number: int
    group: str
    members: tuple[int, ...]


class Standing(msgspec.Struct, tag="standing", frozen=True):
    """Where one member stands in a group.

    Args:
        asker, number: of the question.
        rank: who answers.
        entered: calls it has come to, counted from the group's start.
        call: the newest of them; "" if none.
        inside: it is still in that call.
    """

    asker: int
    number: int
    rank: int
    entered: int
    call: str
    inside: bool


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The rank has left well: the end of its connection is no death."""

    rank: int


News: TypeAlias = Hello | Welcome | Record | Ask | Standing | Bye
DECODER: Final = msgspec.msgpack.Decoder(News)


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its text, cut and in characters that can travel (file names may not)."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line[:MAX_LINE_CHARS].encode(errors="backslashreplace").decode()


def pack(news: News) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(news)
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts what arrives on a socket into news."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[News]:
        """News completed by `data`.

        Raises:
            ValueError: the bytes are not news.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._buffer) < LENGTH.size + length:
                return
            body = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            yield DECODER.decode(body)  # msgspec's errors are ValueErrors


def keep_watch(connection: socket.socket) -> None:
    """Let the kernel notice a host that vanished, in about 10 s; a process that dies closes its socket at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
