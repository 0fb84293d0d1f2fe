"""Connections over TCP between processes that share a secret token. The token itself never travels.

    receiver                                        sender
                                            <-      its nonce
    its nonce, HMAC(token, both nonces)     ->
                                            <-      HMAC(token, both nonces, the other way round)

Who does not know the token is sent away before anything it says is read. The HMACs are of SHA-256; each side answers to
the other's nonce, so an answer that was overheard is worth nothing. What follows is neither encrypted nor signed: use
networks that you trust.
"""

import hmac
import secrets
import socket
from typing import Final

import msgspec

from offbeat_types import WeightSyncError
from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._connections import Connection, Deadline
from offbeat_weightsync._lanes import num_tcp_lanes
from offbeat_weightsync._messages import Join, JoinLane

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
ANSWER_BYTES: Final = _NONCE_BYTES + _MAC_BYTES
"""What a receiver says before it is let in."""


def listen_tcp(address: TcpAddress) -> tuple[socket.socket, TcpAddress]:
    """Listen there, and say at which port.

    Raises:
        WeightSyncError: the port is taken, or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        raise WeightSyncError(f"cannot listen for receivers at {address}: {error.strerror or error}") from error
    listener.setblocking(False)  # who has gone before it is accepted shall not make anybody wait
    return listener, address._replace(port=listener.getsockname()[1])


def connect_tcp(address: TcpAddress, deadline: Deadline, principal: Connection | None = None) -> Connection:
    """Connect to a `TcpSender`, and prove to each other that both know the token.

    Args:
        address: the sender's.
        deadline: of the sync.
        principal: the connection that this one is a lane of.

    Raises:
        WeightSyncError: it is not there, or has another token.
        DeadlineError: it does not answer.
    """
    try:
        sock = socket.create_connection((address.host, address.port), timeout=deadline.left_s() or 1e-3)
    except TimeoutError:
        raise deadline.missed(f"the sender at {address}") from None
    except OSError as error:
        raise WeightSyncError(f"no sender listens at {address}: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(sock, f"the sender at {address}", deadline, principal)
    try:
        _ask(connection, address.token.encode())
    except WeightSyncError as error:
        connection.close()
        raise WeightSyncError(
            f"{address} did not show that it knows this address's token: it is another sender, or none ({error})"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def join_tcp(address: TcpAddress, join: Join, connection: Connection) -> list[Connection]:
    """Ask for the weights, and open the lanes they come in.

    Raises:
        WeightSyncError: see `connect_tcp`.
        DeadlineError: see `connect_tcp`.
    """
    ticket, lanes = secrets.token_hex(16), list[Connection]()
    connection.send(msgspec.structs.replace(join, ticket=ticket, num_lanes=num_tcp_lanes()))
    try:
        for index in range(num_tcp_lanes()):
            lanes.append(connect_tcp(address, connection.deadline, connection))
            lanes[-1].send(JoinLane(ticket, index))
    except BaseException:
        for lane in lanes:
            lane.close()
        raise
    return lanes


def greet(connection: Connection) -> bytes:
    """The sender's part, first half: its nonce, sent.

    Raises:
        WeightSyncError: the other side is gone.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(memoryview(ours))
    return ours


def admit(connection: Connection, ours: bytes, answer: bytes, token: bytes) -> bool:
    """The sender's part, second half: whether the other side knows the token, by its answer of `ANSWER_BYTES`.

    Raises:
        WeightSyncError: it is gone.
    """
    theirs, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(token, b"receiver", ours, theirs)):
        return False
    connection.send_bytes(memoryview(_mac(token, b"sender", theirs, ours)))
    return True


def _ask(connection: Connection, token: bytes) -> None:
    """The receiver's part."""
    theirs = bytearray(_NONCE_BYTES)
    connection.receive_bytes(memoryview(theirs), "its greeting")
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(memoryview(ours + _mac(token, b"receiver", bytes(theirs), ours)))
    mac = bytearray(_MAC_BYTES)
    connection.receive_bytes(memoryview(mac), "its token")
    if not hmac.compare_digest(bytes(mac), _mac(token, b"sender", ours, bytes(theirs))):
        raise WeightSyncError("it answered with another token")


def _mac(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token, b"offbeat-weights " + role + first + second, "sha256")
