"""What driver and keeper say to each other: msgpack, handed to Ray as bytes.

Ray carries top-level bytes as they are, and numbers and short texts as msgpack, so that no call of ours is pickled.
Source: Ray 2.60, python/ray/_private/serialization.py, SerializationContext.serialize.
"""

from typing import TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class LogFile(msgspec.Struct, frozen=True):
    """A log file of the driver, so described that another process can tell whether it has the same file.

    Args:
        path: on the driver's machine.
        inode: number of the file.
        modified_ns: time of the last change.
    """

    path: str
    inode: int
    modified_ns: int


class Order(msgspec.Struct, frozen=True):
    """Driver to keeper: start the process of a role.

    Args:
        key: names this process among all that the keeper will ever start.
        role: its name.
        env: variables to add to those of the node.
        folder: to run in, where the node has it.
        log: takes its output; None: that of the keeper.
        devices: ordinals among the devices of the keeper's block; None: all of them.
        lease_s: it is ended when the driver asks for no report for so long.
    """

    key: str
    role: str
    env: dict[str, str]
    folder: str
    log: LogFile | None
    devices: list[int] | None
    lease_s: float


class Started(msgspec.Struct, frozen=True):
    """Keeper to driver: the process id, or why there is none."""

    pid: int
    error: str = ""


class Report(msgspec.Struct, frozen=True):
    """Keeper to driver: what has come from a process since the last report.

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


class Whereabouts(msgspec.Struct, frozen=True):
    """Keeper to driver: where it is.

    Args:
        node: Ray's id of the node, in hex.
        address: IP address of the node.
        devices: ids of its devices on that node, in order.
    """

    node: str
    address: str
    devices: list[str]


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[S]) -> S:
    """A message from its bytes.

    Raises:
        msgspec.ValidationError: it is of another type.
    """
    return msgspec.msgpack.decode(data, type=kind)
