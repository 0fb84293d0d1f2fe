"""The first messages between the driver and another process of its job: nothing is read from one without the token."""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import fields
from importlib.metadata import distributions
from typing import Any, Final, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 20
"""Bytes of one message; a hello with the versions of all packages has some 2 KB."""
HANDSHAKE_S: Final = 10.0
"""Time for each message of a handshake."""
_IDLE_S, _PROBE_S, _NUM_PROBES = 10, 5, 4
"""A peer whose machine is lost sends no end; the kernel asks after 10 s without traffic, and gives up after 30 s."""


class Hello(msgspec.Struct, frozen=True):
    """Member to driver: who it is, what its node has, and what it runs.

    Args:
        rank: in the job.
        local_rank: on its node.
        host: name of its machine.
        pid: its process id.
        num_cpus: that it may use.
        memory_bytes: main memory of the machine.
        device_kind: of the accelerators, as the device seam calls it; "" where there is none.
        num_devices: accelerators.
        device_bytes: memory of the smallest of them.
        versions: of Python and of offbeat's packages.
        sections: digest of each section of the configuration.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    num_cpus: float
    memory_bytes: float
    device_kind: str
    num_devices: int
    device_bytes: int
    versions: dict[str, str]
    sections: dict[str, str]


class Welcome(msgspec.Struct, frozen=True):
    """Driver to member: "" or why it is refused."""

    refusal: str = ""


class HandshakeError(ConnectionError):
    """The other side is not a process of this job, or is gone."""


def admit(sock: socket.socket, token: str) -> Hello:
    """Check that the other side knows the token, show it that this side does, and read its hello.

    Raises:
        HandshakeError: it does not, is too slow, or sends something else.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, ours)
    answer = _receive(sock, _NONCE_BYTES + _MAC_BYTES)
    theirs, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(token, b"member", ours + theirs)):
        raise HandshakeError("it does not know the token of this job")
    _send(sock, _mac(token, b"driver", theirs + ours))
    return read_message(sock, Hello)


def introduce(sock: socket.socket, token: str, hello: Hello) -> Welcome:
    """Show the driver that this side knows the token, check that it does, and send the hello.

    Raises:
        HandshakeError: it does not, is too slow, or sends something else.
    """
    theirs, ours = _receive(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    _send(sock, ours + _mac(token, b"member", theirs + ours))
    if not hmac.compare_digest(_receive(sock, _MAC_BYTES), _mac(token, b"driver", ours + theirs)):
        raise HandshakeError("it does not know the token of this job")
    write_message(sock, hello)
    return read_message(sock, Welcome)


def write_message(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    _send(sock, _LENGTH.pack(len(data)) + data)


def read_message(sock: socket.socket, kind: type[S]) -> S:
    """Return the next message.

    Raises:
        HandshakeError: it is too long, or something else.
    """
    (num_bytes,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if num_bytes > _MOST_BYTES:
        raise HandshakeError(f"a message of {num_bytes} bytes, and {_MOST_BYTES} are the most")
    try:
        return msgspec.msgpack.decode(_receive(sock, num_bytes), type=kind)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"another message than {kind.__name__}: {error}") from error


def watch_peer(sock: socket.socket) -> None:
    """Have the kernel end the connection when the peer's machine is gone, and send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _PROBE_S), ("TCP_KEEPCNT", _NUM_PROBES)):
        if hasattr(socket, name):  # not on macOS
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def config_digests(config: Any) -> dict[str, str]:
    """Return a digest of each section of a configuration, a dataclass of dataclasses."""

    def digest(section: Any) -> str:
        return hashlib.sha256(msgspec.json.encode(section, enc_hook=str, order="deterministic")).hexdigest()

    return {each.name: digest(getattr(config, each.name)) for each in fields(config)}


def installed_versions() -> dict[str, str]:
    """Return the versions of offbeat's packages here."""
    found = {each.name: each.version for each in distributions() if each.name}
    return {name: version for name, version in found.items() if name.startswith("offbeat") or name == "torch"}


def differing(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return the names whose values differ."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise HandshakeError(str(error)) from error


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data, end_s = bytearray(), time.monotonic() + HANDSHAKE_S
    try:
        while len(data) < num_bytes:
            if (left_s := end_s - time.monotonic()) <= 0:  # of the message: one that trickles in ends, too
                raise HandshakeError("timed out")
            sock.settimeout(left_s)
            if not (part := sock.recv(num_bytes - len(data))):
                raise HandshakeError("it has closed the connection")
            data += part
    except OSError as error:
        raise HandshakeError(str(error)) from error
    return bytes(data)


def _mac(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"offbeat-torchrun " + role + nonces, "sha256")
