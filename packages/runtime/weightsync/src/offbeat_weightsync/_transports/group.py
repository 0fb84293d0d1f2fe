"""Broadcasts of a group: gloo from CPU to CPUs, nccl from a CUDA device to others."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from offbeat_core import WeightSyncError
from offbeat_device import open_device
from offbeat_mesh import open_store
from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._changes import WeightCopy
from offbeat_weightsync._connection import Connection, GroupAddress, GroupMember, Join, Loaded, Offer
from offbeat_weightsync._peer_stream import KeptStream, PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._receiver import receive
from offbeat_weightsync._sender import WeightSender, await_loaded, raise_if_spoken
from offbeat_weightsync._stream import MAX_RUN_BYTES, Room, Runs
from offbeat_weightsync._tensors import PlannedTensors
from offbeat_weightsync._transport import Route, Transport
from offbeat_weightsync._transports.slots import synchronize
from offbeat_weightsync._transports.tcp import TcpSender
from offbeat_weightsync._weight_group import NUM_BUFFERS, WeightGroup, place_of


class GroupTransport(Transport):
    """Weights broadcast to all engines at once. Each side keeps its place in the group from sync to sync."""

    reach = "network"

    def __init__(self, device: str = "cpu", folder: str = "") -> None:
        super().__init__(device, folder)
        self._group: WeightGroup | None = None

    @classmethod
    def complaint(cls, route: Route) -> str:
        """Refuse devices of two kinds, and devices with two members: nccl has neither."""
        devices = [route.sender.device, *(each.device for each in route.receivers)]
        kinds = {device.partition(":")[0] for device in devices} - {"auto"}
        if len(kinds) > 1:
            return (
                f"needs trainer and engines on one kind of device: engine.device is {devices[0]}, rollout.device "
                f'{devices[-1]}; set weight_transport = "auto"'
            )
        members = (route.sender, *route.receivers)
        places = [(each.node, each.index) for each in members if each.index is not None]
        if route.shares_devices or len(set(places)) < len(places):
            return (
                "needs a device for the trainer and one for each engine, and some share theirs: set it to "
                '"cuda-ipc" or "auto"'
            )
        return ""

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return "by broadcasts of one group"."""
        return "by broadcasts of one group, from the trainer to all engines"

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen at an address of this machine; the group is made with the first sync."""
        return GroupSender(address, plan, device=self._device, name=name)

    def get_ready(self) -> None:
        """Find out how this device takes part in a group."""
        self._group = WeightGroup(self._device)

    @property
    def on_device(self) -> bool:
        """See `Transport.on_device`. Opens no context on the device, where workers will receive in its place."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and open_device(self._device).torch_device.type == accelerator.type

    def receive(
        self,
        address: str,
        version: int,
        deadline_s: float,
        *,
        name: str,
        copy: WeightCopy | None = None,
        worker: tuple[int, Sequence[int]] | None = None,
    ) -> AbstractContextManager[PeerStream | KeptStream]:
        """Take what is broadcast: see `Transport.receive`."""
        assert self._group is not None, "get_ready() comes first"
        return receive(address, version, deadline_s, name=name, copy=copy, group=self._group, worker=worker)

    @classmethod
    def open_stream(
        cls, connection: Connection, plan: BucketPlan, version: int, offer: Offer, group: WeightGroup | None
    ) -> PeerStream:
        """Meet the other members, unless all are in the group already."""
        assert offer.place is not None
        assert group is not None, "the sender has checked that this side brought one"
        group.join(offer.place, connection.own_host, connection.deadline)
        group.await_members(connection.raise_if_spoken, connection.deadline)
        return GroupStream(connection, plan, version, group)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.leave()


class GroupSender(TcpSender):
    """Sends weights by broadcasts of a group: gloo from CPU to CPUs, nccl from a CUDA device to others.

    The group is made with the first sync and again where other receivers come than the last time, such as one that was
    started again, or after a failure. Receivers bring a `WeightGroup` of their own.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.
        device: of the trainer, by name.

    Raises:
        WeightSyncError: the address is in use, or none of this machine.
        ConfigError: there is no such device, or no group of its kind.
    """

    transport = "nccl"

    def __init__(
        self,
        address: str,
        plan: BucketPlan,
        *,
        device: str = "cpu",
        deadline_s: float = 300.0,
        name: str = "trainer-0",
    ) -> None:
        self._group = WeightGroup(device)
        self._store: Store | None = None
        self._places: dict[Connection, GroupAddress] = {}
        super().__init__(address, plan, deadline_s=deadline_s, name=name)
        self._checksum = self._group.checksum

    def close(self) -> None:
        """Stop listening and leave the group."""
        super().close()
        self._part()

    def _meet(self, joined: Mapping[Connection, Join]) -> None:
        members = {peer: self._checked_member(join) for peer, join in joined.items()}
        used = [self._group.member.device, *(member.device for member in members.values())]
        if self._group.member.device and len(set(used)) < len(used):
            raise WeightSyncError("two members of the group compute on one device, which nccl refuses: use cuda-ipc")
        place = self._group.place
        if place is None or {(member.group, member.rank) for member in members.values()} != _others(place):
            place = self._make_group(1 + len(members), next(iter(joined)))
            self._places = {peer: place_of(place, rank) for rank, peer in enumerate(members, 1)}
        else:
            self._places = {peer: place_of(place, member.rank) for peer, member in members.items()}

    def _checked_member(self, join: Join) -> GroupMember:
        kind = self._group.member.kind
        if join.member is None:
            raise WeightSyncError(f"{join.name} brought no group: give receive(..., group=WeightGroup(device))")
        if join.member.kind != kind:
            raise WeightSyncError(
                f"a group needs one kind of device: {join.name} has {join.member.kind}, {self._name} {kind}; use tcp"
            )
        return join.member

    def _make_group(self, size: int, peer: Connection) -> GroupAddress:
        self._part()
        address = TcpAddress.parse(self.address)
        assert address is not None
        self._store = store = open_store(address.host, deadline_s=peer.deadline.left_s())
        place = GroupAddress(secrets.token_hex(8), 0, size, address.host, store.port)
        self._group.join(place, peer.own_host, peer.deadline, store)
        return place

    def _part(self) -> None:
        self._group.leave()
        self._store = None

    def _offer(self, peer: Connection, offer: Offer) -> None:
        peer.send(msgspec.structs.replace(offer, place=self._places[peer]))

    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        """Receivers load a bucket while the next is filled. That a bucket has gone is known when all have loaded it."""
        deadline = peers[0].deadline
        self._group.await_members(partial(raise_if_spoken, peers), deadline)
        buffers = self._group.buffers(plan)
        for index, bucket in enumerate(plan.buckets):
            if index >= NUM_BUFFERS:
                await_loaded(peers, plan, index - NUM_BUFFERS)
            memory = buffers[index % NUM_BUFFERS][: bucket.num_bytes]
            for _ in source.fill(bucket, memory):
                pass
            self._group.start(memory, deadline)
        for index in range(max(0, len(plan.buckets) - NUM_BUFFERS), len(plan.buckets)):
            await_loaded(peers, plan, index)
        self._group.synchronize()


def _others(place: GroupAddress) -> set[tuple[str, int]]:
    """Group and rank of all members but the sender."""
    return {(place.group, rank) for rank in range(1, place.size)}


class GroupStream(PeerStream):
    """A `WeightStream` from the broadcasts of a group. Made by `receive`."""

    def __init__(self, connection: Connection, plan: BucketPlan, version: int, group: WeightGroup) -> None:
        super().__init__(connection, plan, version)
        self._group, self._buffers = group, group.buffers(plan)

    def close(self) -> None:
        """Let go of the buffers now, not when the next version is awaited."""
        self._buffers = []

    def _arrive(self, room: Room) -> Runs:
        connection, moving = self._connection, list[Work]()
        for index, bucket in enumerate(self.plan.buckets):
            for coming in range(len(moving), min(index + NUM_BUFFERS, len(self.plan.buckets))):
                memory = self._buffers[coming % NUM_BUFFERS][: self.plan.buckets[coming].num_bytes]
                moving.append(self._group.start(memory, connection.deadline))
            self._group.finish(moving[index], connection.raise_if_spoken, connection.deadline, self._bucket(index))
            buffer = self._buffers[index % NUM_BUFFERS]
            for piece in bucket.pieces:
                for run in piece.cut(MAX_RUN_BYTES):
                    yield run, buffer[run.bucket_offset : run.bucket_offset + run.num_bytes]
            synchronize(buffer)
            connection.send(Loaded(index))
