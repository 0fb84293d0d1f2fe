"""Addresses of senders, and the handshake by which receivers are admitted.

On one host it is a Unix socket, named without a file on Linux, and both must be processes of the same user. Over TCP it
is host, port and a secret token, which itself never travels:

    receiver                                        sender
                                            <-      its nonce
    its nonce, HMAC(token, both nonces)     ->
                                            <-      HMAC(token, both nonces, the other way round)

A client without the token is disconnected before anything it sends is read. The HMACs are of SHA-256; each side answers
to the other's nonce, so an answer that was overheard is useless. What follows is neither encrypted nor signed: use
networks that you trust.
"""

import hmac
import os
import secrets
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from offbeat_core import WeightSyncError
from offbeat_weightsync._connection import Connection, Deadline

_NAMELESS: Final = sys.platform == "linux"

_MAX_PATH_BYTES: Final = 100
"""The kernel's own limit is 108 bytes on Linux and 104 on macOS, with the closing zero."""

_TCP: Final = "tcp"

_EVERYWHERE: Final = ("0.0.0.0", "::", "*")
_NUM_WAITING: Final = 128
_UCRED: Final = struct.Struct("3i")
_NONCE_BYTES: Final = 32
ANSWER_BYTES: Final = _NONCE_BYTES + 32
"""Bytes that a receiver sends over TCP before it is admitted: its nonce and a MAC."""


class TcpAddress(NamedTuple):
    """Address of a sender for receivers on any host; port 0: any that is free.

    A client that knows the token may connect. As text it is without the token: that is for errors and logs.
    """

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, address: str) -> "TcpAddress | None":
        """Read what `with_token` wrote; None: it is an address of another kind."""
        if not address.startswith(f"{_TCP}://"):
            return None
        try:
            parts = urlsplit(address)
            host, port, token = parts.hostname, parts.port, parts.username
        except ValueError:
            host = port = token = None
        if not host or port is None or not token:
            raise WeightSyncError("an address over TCP reads tcp://TOKEN@HOST:PORT; use new_address(host)")
        return cls(host, port, token)

    def with_token(self) -> str:
        """Return the text to give to receivers, and to no other process."""
        return f"{_TCP}://{self.token}@{self._host_and_port}"

    def __str__(self) -> str:
        return f"{_TCP}://{self._host_and_port}"

    @property
    def _host_and_port(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def new_address(host: str = "", port: int = 0) -> str:
    """Make an address for `open_sender`; the sender's own `address` is then what receivers are given.

    Args:
        host: "" for receivers of this machine, by shared memory. Otherwise the IP address or name under which receivers
            of other machines reach this one: the address gets a secret token, and clients that have it may connect. The
            bytes are not encrypted: use networks that you trust.
        port: to listen on over TCP; 0 takes a free one.

    Raises:
        WeightSyncError: the host stands for every interface.
    """
    if not host:
        return new_socket_path()
    if host in _EVERYWHERE:
        raise WeightSyncError(f"receivers must know where to connect: give this machine's own address, not {host}")
    return TcpAddress(host, port, secrets.token_hex(16)).with_token()


def new_socket_path() -> str:
    """Make an address for a sender to listen on, unique on this machine.

    On Linux it is a name in the kernel ("@offbeat-..."), which vanishes with its process, so that even `kill -9`
    leaves nothing behind; a client is checked to be of the same user. Elsewhere it is a file in a fresh folder.
    """
    if _NAMELESS:
        return f"@offbeat-{os.getpid()}-{secrets.token_hex(8)}"
    return str(Path(tempfile.mkdtemp(prefix="offbeat-", dir="/tmp")) / "weights")  # $TMPDIR may be too long


def kernel_address(socket_path: str | Path) -> str:
    path = str(socket_path)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise WeightSyncError(f"a socket path has at most {_MAX_PATH_BYTES} bytes; use new_socket_path(): got {path}")
    return "\0" + path[1:] if path.startswith("@") else path


def remove_socket(socket_path: str | Path) -> None:
    """Remove what a closed sender leaves in the file system, if anything."""
    if not str(socket_path).startswith("@"):
        Path(socket_path).unlink(missing_ok=True)
        parent = Path(socket_path).parent
        if parent.name.startswith("offbeat-") and not any(parent.iterdir()):
            parent.rmdir()


def listen(address: str | Path) -> tuple[socket.socket, str]:
    """Listen there without blocking; return the socket, and the address with its port."""
    tcp = TcpAddress.parse(str(address))
    try:
        if tcp is None:
            listener = _listen_on_path(str(address))
        else:
            family = socket.AF_INET6 if ":" in tcp.host else socket.AF_INET
            listener = socket.create_server((tcp.host, tcp.port), family=family, backlog=_NUM_WAITING)
    except OSError as error:
        where = address if tcp is None else tcp
        raise WeightSyncError(f"cannot listen for receivers at {where}: {error.strerror or error}") from error
    listener.setblocking(False)  # a client that has gone before it is accepted shall not block the sender
    return listener, str(address) if tcp is None else tcp._replace(port=listener.getsockname()[1]).with_token()


def connect(address: str | Path, deadline: Deadline) -> Connection:
    """Connect to a sender, and make sure that it is the one that was meant."""
    tcp = TcpAddress.parse(str(address))
    where = address if tcp is None else tcp
    timeout_s = deadline.left_s() or 1e-3
    try:
        if tcp is None:
            sock = _connect_to_path(str(address), timeout_s)
        else:
            sock = socket.create_connection((tcp.host, tcp.port), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError:
        raise deadline.missed(f"the sender at {where}") from None
    except OSError as error:
        raise WeightSyncError(f"no sender listens at {where}: {error.strerror or error}") from error
    if tcp is None and not is_same_user(sock):  # a name in the kernel belongs to the process that takes it first
        sock.close()
        raise WeightSyncError(f"the sender at {address} is another user's process: run both as the same user")
    connection = Connection(sock, "the sender" if tcp is None else f"the sender at {tcp}", deadline)
    if tcp is not None:
        _show_token(connection, tcp)
    return connection


def greet(connection: Connection) -> bytes:
    """Return the sender's part of the handshake, first half: its nonce, sent.

    WeightSyncError if the other side is gone.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.send_plain(memoryview(ours))
    return ours


def admit(connection: Connection, ours: bytes, answer: bytes, address: TcpAddress) -> bool:
    """Return the second half: whether the other side knows the token, by its answer of `ANSWER_BYTES`."""
    token, theirs, mac = address.token.encode(), answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(token, b"receiver", ours, theirs)):
        return False
    connection.send_plain(memoryview(_mac(token, b"sender", theirs, ours)))
    return True


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user. True where the system cannot say."""
    if sys.platform != "linux":
        return True  # there the socket is a file in a folder that only its owner may enter
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())


def _show_token(connection: Connection, address: TcpAddress) -> None:
    token, ours = address.token.encode(), secrets.token_bytes(_NONCE_BYTES)
    theirs, mac = bytearray(_NONCE_BYTES), bytearray(ANSWER_BYTES - _NONCE_BYTES)
    why: Exception | str = "it answered with another token"
    try:
        connection.receive_plain(memoryview(theirs), "its greeting")
        connection.send_plain(memoryview(ours + _mac(token, b"receiver", bytes(theirs), ours)))
        connection.receive_plain(memoryview(mac), "its token")
        if hmac.compare_digest(bytes(mac), _mac(token, b"sender", ours, bytes(theirs))):
            return
    except WeightSyncError as error:
        why = error
    except BaseException:
        connection.close()
        raise
    connection.close()
    raise WeightSyncError(
        f"{address} did not show that it knows this address's token: it is another sender, or none ({why})"
    )


def _mac(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token, b"offbeat-weights " + role + first + second, "sha256")


def _listen_on_path(path: str) -> socket.socket:
    where = kernel_address(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(where)
        listener.listen(_NUM_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def _connect_to_path(path: str, timeout_s: float) -> socket.socket:
    where = kernel_address(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(where)
    except OSError:
        sock.close()
        raise
    return sock
