"""Shared memory on one machine: of the host, or of the CUDA device that trainer and engines are on."""

import os
import socket
from pathlib import Path

import msgspec
from torch import Tensor

from offbeat_core import WeightSyncError
from offbeat_device import open_device
from offbeat_weightsync._addresses import is_same_user, remove_socket
from offbeat_weightsync._connection import Connection, Filled, Loaded, Offer
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._sender import PendingConnection, WeightSender, await_loaded
from offbeat_weightsync._stream import MAX_RUN_BYTES, Room, Runs
from offbeat_weightsync._tensors import PlannedTensors
from offbeat_weightsync._transport import Endpoint, Route, Transport
from offbeat_weightsync._transports.slots import NUM_SLOTS, SharedSlots, open_device_slots, open_slots, synchronize
from offbeat_weightsync._weight_group import WeightGroup


class SharedMemoryTransport(Transport):
    """Weights in memory of the host that both sides map: no copy but the engine's own."""

    reach = "machine"

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return "by shared memory"."""
        return "by shared memory"

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen at a path of this machine."""
        return SharedMemorySender(address, plan, name=name)

    @classmethod
    def open_stream(
        cls, connection: Connection, plan: BucketPlan, version: int, offer: Offer, group: WeightGroup | None
    ) -> PeerStream:
        """Map the memory of the sender."""
        return SharedMemoryStream(connection, plan, version, _open_slots(connection, offer))


class CudaIpcTransport(SharedMemoryTransport):
    """Weights in memory of CUDA devices that the engines there open by CUDA IPC: they never leave a device.

    Every rank of the trainer gathers whole tensors, so each sends to the engines on its own device.
    """

    @classmethod
    def complaint(cls, route: Route) -> str:
        """Refuse an engine on a device without a trainer rank, and one that cannot take weights from several ranks."""
        if (lonely := next((each for each in route.receivers if _rank_beside(each, route) is None), None)) is not None:
            far = "" if lonely.node in {each.node for each in route.senders} else super().complaint(route)
            where = lonely.node if lonely.index is None else f"{lonely.node}, device {lonely.index},"
            return far or (
                f"needs a rank of the trainer on the CUDA device of each engine, and the one on {where} has none: set "
                'engine.device and rollout.device to one and the same CUDA device, or weight_transport = "auto"'
            )
        for engine in route.engines:
            if len({each.node for each in engine}) > 1:
                return 'reaches engines that are on one machine each, and one is on several: set it to "auto"'
            if len({_rank_beside(each, route) for each in engine}) > 1 and not route.loads_on_device:
                return (
                    "reaches the devices of several trainer ranks, and an engine that is split over them takes weights "
                    'in one process: set it to "auto"'
                )
        return ""

    @classmethod
    def assign(cls, route: Route) -> list[int]:
        """Return for each receiver the rank of the trainer on its device."""
        ranks = [_rank_beside(each, route) for each in route.receivers]
        return [rank for rank in ranks if rank is not None]

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return "by CUDA IPC", and from which ranks."""
        if len(set(cls.assign(route))) > 1:
            return "by CUDA IPC, from each rank of the trainer to the engines on its device"
        return "by CUDA IPC"

    @property
    def on_device(self) -> bool:
        """See `Transport.on_device`."""
        return True

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen at a path of this machine, with slots on the trainer's device."""
        return SharedMemorySender(address, plan, name=name, device=str(open_device(self._device).torch_device))


class SharedMemorySender(WeightSender):
    """Sends weights to any number of receivers on this machine.

    Args:
        socket_path: where to listen; see `new_socket_path`. What is not named here: see `WeightSender`.
        device: a CUDA device to hold what is on its way, such as "cuda:0", which the receivers open by CUDA
            IPC; None: it lies in host memory.

    Raises:
        WeightSyncError: there is no such device, the address is in use or too long, or there is not enough memory.
    """

    transport = "shared-memory"

    def __init__(
        self,
        socket_path: str | Path,
        plan: BucketPlan,
        *,
        deadline_s: float = 300.0,
        name: str = "trainer-0",
        device: str | None = None,
    ) -> None:
        self._slots: SharedSlots | None = None
        super().__init__(socket_path, plan, deadline_s=deadline_s, name=name)
        self.socket_path = self.address
        self._checksum = "xxh3" if device is None else "words"
        try:
            self._slots = SharedSlots(plan, device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and let go of the memory."""
        if self._listener.fileno() < 0:
            return
        super().close()
        remove_socket(self.socket_path)
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _greet(self, sock: socket.socket, connection: Connection) -> PendingConnection | None:
        return PendingConnection(is_admitted=True) if is_same_user(sock) else None

    def _offer(self, peer: Connection, offer: Offer) -> None:
        assert self._slots is not None
        cuda = self._slots.device_handle()
        peer.send(msgspec.structs.replace(offer, slot_bytes=self._slots.slot_bytes, cuda=cuda))
        if cuda is None:
            peer.send_descriptor(self._slots.descriptor)

    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        """A receiver loads a bucket while it is still being filled, and the one before."""
        assert self._slots is not None
        for index, bucket in enumerate(plan.buckets):
            if index >= NUM_SLOTS:
                await_loaded(peers, plan, index - NUM_SLOTS)
            said = 0
            for num_bytes in source.fill(bucket, self._slots.slot(index)):
                if num_bytes - said >= MAX_RUN_BYTES or num_bytes == bucket.num_bytes:
                    self._slots.synchronize()
                    for peer in peers:
                        peer.send(Filled(index, num_bytes))
                    said = num_bytes
        for index in range(max(0, len(plan.buckets) - NUM_SLOTS), len(plan.buckets)):
            await_loaded(peers, plan, index)


class SharedMemoryStream(PeerStream):
    """A `WeightStream` through slots of shared memory. Made by `receive`."""

    def __init__(self, connection: Connection, plan: BucketPlan, version: int, slots: list[Tensor]) -> None:
        super().__init__(connection, plan, version)
        self._slots = slots

    def close(self) -> None:
        """Let go of the slots now, not when the next version is awaited."""
        self._slots = []

    def _arrive(self, room: Room) -> Runs:
        for index, bucket in enumerate(self.plan.buckets):
            slot, num_filled = self._slots[index % NUM_SLOTS], 0
            for piece in bucket.pieces:
                for run in piece.cut(MAX_RUN_BYTES):
                    while num_filled < run.bucket_offset + run.num_bytes:
                        num_filled = self._await_filled(index)
                    yield run, slot[run.bucket_offset : run.bucket_offset + run.num_bytes]
            synchronize(slot)
            self._connection.send(Loaded(index))

    def _await_filled(self, index: int) -> int:
        filled = self._connection.receive(Filled, self._bucket(index))
        if filled.bucket != index:
            raise WeightSyncError(
                f"{self._connection.peer} sent bucket {filled.bucket} where {index} was due, in {self._bucket(index)}"
            )
        return filled.num_bytes


def _rank_beside(receiver: Endpoint, route: Route) -> int | None:
    """Return the rank of the trainer on a receiver's CUDA device; None where there is none, or it is not known."""
    for rank, sender in enumerate(route.senders):
        is_named = sender.index is not None or (sender.device == receiver.device and sender.device.startswith("cuda"))
        if is_named and (sender.node, sender.index) == (receiver.node, receiver.index):
            return rank
    return None


def _open_slots(connection: Connection, offer: Offer) -> list[Tensor]:
    if offer.cuda is not None:
        return open_device_slots(offer.cuda, offer.slot_bytes)
    fd = connection.receive_descriptor()
    try:
        return open_slots(fd, offer.slot_bytes, writable=False)
    finally:
        os.close(fd)
