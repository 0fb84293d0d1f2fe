"""Messages of the control connections, and their frames: a length in four bytes, then the message as msgpack."""

import struct
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from offbeat_core import DeadlineError, OffbeatError, PeerFailedError

LENGTH: Final = struct.Struct("!I")
MAX_FRAME_BYTES: Final = 1 << 20
"""A message is short; a longer frame is not ours."""

MAX_LINE_CHARS: Final = 1000
"""Longest line of an error; user code may raise one that is longer than a frame."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first frame of a connection."""

    rank: int
    token: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The control server's answer to a hello, once every rank has said it."""


class Roll(msgspec.Struct, tag="roll", frozen=True):
    """Question of a rank that waits for its welcome, and the control server's answer: the ranks without a hello."""

    missing: tuple[int, ...] = ()


class Record(msgspec.Struct, tag="record", frozen=True, kw_only=True):
    """A failure, or an end: why a group, or every group of a rank, can go no further.

    Args:
        kind: "failed" raised an error; "deadline" waited too long; "died" ended without a word; "left" ended well.
        rank: the rank that failed or ended, a global rank.
        group: key of the one group that it ends; "" ends every group that holds the rank.
        peer: the process at fault, for people; "" means `rank`.
        reason: the error in one line; for "deadline" the advice.
        waiting, deadline_s: of a "deadline", with `peer` as the process that did not come.
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
        """Return the record of an error; of a peer's failure it keeps the first cause."""
        if isinstance(error, DeadlineError):
            said = {"peer": error.on, "reason": error.advice, "waiting": error.waiting}
            return cls(kind="deadline", rank=rank, group=group, deadline_s=error.deadline_s, **said)
        if isinstance(error, PeerFailedError):
            return cls(kind="failed", rank=rank, group=group, peer=error.peer, reason=error.reason)
        return cls(kind="failed", rank=rank, group=group, peer=peer, reason=one_line(error))

    def error(self, name: str) -> OffbeatError:
        """Return what the other members raise; `name` is what they call the rank."""
        if self.kind == "deadline":
            return DeadlineError(self.waiting, self.peer, self.deadline_s, self.reason)
        return PeerFailedError(self.peer or name, self.reason or ENDS[self.kind])


ENDS: Final = {
    "failed": "it raised an error",
    "died": "its process ended without a word: killed, out of memory, or crashed; look at its log",
    "left": "it has left the world, so it comes to no further call",
}


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Asks where the members of a group are. Relayed to each of them."""

    asker: int
    number: int
    group: str
    members: tuple[int, ...]


class CallPosition(msgspec.Struct, tag="standing", frozen=True):
    """Position of one member in a group: collectives entered, its newest call ("" if none), and if it is in it."""

    asker: int
    number: int
    rank: int
    entered: int
    call: str
    inside: bool


class Left(msgspec.Struct, tag="bye", frozen=True):
    """The rank has left well: the end of its connection is no death."""

    rank: int


ControlMessage: TypeAlias = Hello | Welcome | Roll | Record | Ask | CallPosition | Left
DECODER: Final = msgspec.msgpack.Decoder(ControlMessage)


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, cut, in characters that can travel (file names may not)."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line[:MAX_LINE_CHARS].encode(errors="backslashreplace").decode()


def pack(message: ControlMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts what arrives on a socket into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Messages completed by `data`; a ValueError says that the bytes are none."""
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
