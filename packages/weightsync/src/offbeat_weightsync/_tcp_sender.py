"""The trainer's side of the TCP transport, and the choice of a transport by address."""

import selectors
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._connections import LOOK_UP_S, Connection, Deadline
from offbeat_weightsync._messages import Join, JoinLane
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Round
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._shared_sender import SharedMemorySender
from offbeat_weightsync._tcp import ANSWER_BYTES, admit, greet, listen_tcp
from offbeat_weightsync._tcp_rounds import TcpRound

_GREETING_S: Final = 5.0
"""For a receiver that knows the token to say the rest of what it has begun to say: others wait meanwhile."""

_MAX_STRANGERS: Final = 64
"""Connections that have not spoken yet. One more, and the oldest has to go."""


def open_sender(
    address: str | Path, plan: BucketPlan, *, deadline_s: float = 300.0, name: str = "trainer-0"
) -> WeightSender:
    """Listen at an address from `new_address`: over TCP if it names a host, otherwise by shared memory.

    Args:
        address: where to listen. Give receivers the sender's own `address`, which has the port.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.

    Raises:
        WeightSyncError: the address is taken, or no address; there is not enough memory.
    """
    if TcpAddress.parse(str(address)) is None:
        return SharedMemorySender(address, plan, deadline_s=deadline_s, name=name)
    return TcpSender(str(address), plan, deadline_s=deadline_s, name=name)


@dataclass
class _Stranger:
    """Somebody who has connected: the nonce it was sent, what it has answered, and whether it knows the token."""

    nonce: bytes
    answer: bytes = b""
    is_admitted: bool = False


class TcpSender(WeightSender):
    """Sends weights to receivers on any host that have the address's token: see `WeightSender`.

    Args:
        address: from `new_address(host)`.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.

    Raises:
        WeightSyncError: the address is taken, or none of this machine.
    """

    def __init__(self, address: str, plan: BucketPlan, *, deadline_s: float = 300.0, name: str = "trainer-0") -> None:
        place = TcpAddress.parse(address)
        if place is None:
            raise WeightSyncError(f"a TcpSender listens at an address from new_address(host): got {address}")
        self._listener, self._place = listen_tcp(place)
        super().__init__(self._place.with_token(), plan, deadline_s=deadline_s, name=name)
        self._strangers: dict[Connection, _Stranger] = {}
        self._early: list[tuple[Connection, Join]] = []
        self._lanes: dict[str, dict[int, Connection]] = {}
        self._tickets: dict[Connection, str] = {}

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        for stranger in list(self._strangers):
            self._send_away(stranger)
        for peer, join in self._early:
            self._tickets[peer] = join.ticket
            self._part(peer)
        self._early.clear()
        for ticket in list(self._lanes):
            self._hang_up(ticket)

    def _round(self, joined: dict[Connection, Join], plan: BucketPlan, kept: str) -> Round:
        lanes = [self._lanes[join.ticket] for join in joined.values()]
        return TcpRound(list(joined), plan, [[each[index] for index in sorted(each)] for each in lanes], kept)

    def _accept(self, deadline: Deadline, missing: str) -> tuple[Connection, Join] | None:
        self._part_from_who_gave_up()
        for each in self._early:
            peer, join = each
            lanes = self._lanes.get(join.ticket, {})
            if len(lanes) == join.num_lanes:
                self._early.remove(each)
                self._tickets[peer] = join.ticket
                for connection in (peer, *lanes.values()):
                    connection.deadline = deadline
                for lane in lanes.values():
                    lane.join(peer, join.name)
                return each
        self._await_news(deadline, missing)
        return None

    def _part_from_who_gave_up(self) -> None:
        """Receivers that have gone while they waited for a sync, or before all their lanes were there."""
        for each in list(self._early):
            peer, join = each
            try:
                peer.raise_if_spoken()
            except WeightSyncError:
                self._early.remove(each)
                self._tickets[peer] = join.ticket
                self._part(peer)

    def _await_news(self, deadline: Deadline, missing: str) -> None:
        """Wait a moment for somebody to connect, or to say who it is. A stranger who falls silent holds nobody up."""
        if not deadline.left_s():
            raise deadline.missed(missing)  # also while strangers keep coming
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for each in self._strangers:
                selector.register(each, selectors.EVENT_READ, each)
            ready = selector.select(min(deadline.left_s(), LOOK_UP_S))
        for key, _ in ready:
            if isinstance(key.data, Connection):
                self._admit(key.data, min(_GREETING_S, deadline.left_s()))
            else:
                self._greet()

    def _greet(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, "a receiver", Deadline("greeting of a receiver", _GREETING_S))
        if len(self._strangers) == _MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._strangers[connection] = _Stranger(b"")
        try:
            self._strangers[connection] = _Stranger(greet(connection))
        except (WeightSyncError, DeadlineError):
            self._send_away(connection)

    def _admit(self, connection: Connection, seconds: float) -> None:
        """Hear what it says now, let it in if it knows the token, and note what it is."""
        stranger = self._strangers[connection]
        connection.deadline = Deadline("greeting of a receiver", seconds)
        try:
            if stranger.is_admitted:
                self._note(connection, connection.receive_any("its request"))
                del self._strangers[connection]
                return
            stranger.answer += connection.receive_some(ANSWER_BYTES - len(stranger.answer))
            if len(stranger.answer) < ANSWER_BYTES:
                return
            stranger.is_admitted = admit(connection, stranger.nonce, stranger.answer, self._place.token.encode())
            if stranger.is_admitted:
                return
        except (WeightSyncError, DeadlineError):
            pass  # nobody: it left, or stood still, before it had said who it was
        self._send_away(connection)

    def _send_away(self, stranger: Connection) -> None:
        del self._strangers[stranger]
        stranger.close()

    def _note(self, connection: Connection, said: object) -> None:
        if isinstance(said, Join):
            self._early.append((connection, said))
        elif isinstance(said, JoinLane):
            self._lanes.setdefault(said.ticket, {})[said.index] = connection
        else:
            raise WeightSyncError(f"{type(said).__name__} came where Join or JoinLane was due")

    def _part(self, peer: Connection) -> None:
        peer.close()
        self._hang_up(self._tickets.pop(peer))

    def _hang_up(self, ticket: str) -> None:
        for lane in self._lanes.pop(ticket, {}).values():
            lane.close()
