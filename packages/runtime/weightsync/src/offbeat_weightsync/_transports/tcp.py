"""TCP: to engines on any machine, straight from the trainer's tensors into the engine's where those are on the host."""

import socket

from offbeat_core import WeightSyncError
from offbeat_weightsync._addresses import TcpAddress, greet
from offbeat_weightsync._connection import Connection, Offer
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan, Piece
from offbeat_weightsync._sender import PendingConnection, WeightSender
from offbeat_weightsync._stream import Room, Runs, read_runs
from offbeat_weightsync._tensors import RUN_BYTES, PlannedTensors
from offbeat_weightsync._transport import Route, Transport
from offbeat_weightsync._weight_group import WeightGroup


class TcpTransport(Transport):
    """Weights over a connection to each engine, which has shown that it knows the address's token."""

    reach = "network"

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return "by TCP"."""
        return "by TCP"

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen at an address of this machine."""
        return TcpSender(address, plan, name=name)

    @classmethod
    def open_stream(
        cls, connection: Connection, plan: BucketPlan, version: int, offer: Offer, group: WeightGroup | None
    ) -> PeerStream:
        """Take the weights over the connection itself."""
        return TcpStream(connection, plan, version)


class TcpSender(WeightSender):
    """Sends weights to receivers on any host that have the address's token.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.

    Raises:
        WeightSyncError: the address is in use, or none of this machine.
    """

    transport = "tcp"

    def __init__(self, address: str, plan: BucketPlan, *, deadline_s: float = 300.0, name: str = "trainer-0") -> None:
        if TcpAddress.parse(address) is None:
            raise WeightSyncError(f"a TcpSender listens at an address from new_address(host): got {address}")
        super().__init__(address, plan, deadline_s=deadline_s, name=name)

    def _greet(self, sock: socket.socket, connection: Connection) -> PendingConnection | None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return PendingConnection(greet(connection))

    def _offer(self, peer: Connection, offer: Offer) -> None:
        peer.send(offer)

    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        """The bytes go from the trainer's tensors into the kernel, with no copy of ours between."""
        for bucket in plan.buckets:
            for _, data in source.runs(bucket):
                for peer in peers:
                    peer.raise_if_spoken()  # the kernel would take the bytes all the same
                    peer.send_data(data)


class TcpStream(PeerStream):
    """A `WeightStream` over TCP. Made by `receive`."""

    def _arrive(self, room: Room) -> Runs:
        """Straight into the engine's tensors, where they are contiguous in host memory."""

        def read(_: Piece, bucket: int, target: memoryview) -> None:
            self._connection.receive_data(target, self._bucket(bucket))

        return read_runs(self.plan, RUN_BYTES, read, room)
