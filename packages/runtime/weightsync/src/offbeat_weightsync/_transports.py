"""Senders, one for each way that bytes take: shared memory, TCP, a group's broadcast, files.

All but shared memory are found over TCP, and what both sides say to each other goes there (see `_connection.py`),
wherever the bytes go.
"""

import secrets
import shutil
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from offbeat_core import WeightSyncError
from offbeat_mesh import open_store
from offbeat_weightsync._addresses import TcpAddress, greet, is_same_user, remove_socket
from offbeat_weightsync._connection import (
    Connection,
    FilesWritten,
    Filled,
    GroupAddress,
    GroupMember,
    Join,
    Loaded,
    Offer,
)
from offbeat_weightsync._disk import VersionFolder
from offbeat_weightsync._group import NUM_BUFFERS, WeightGroup, place_of
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._sender import PendingConnection, WeightSender, collect
from offbeat_weightsync._shared_memory import NUM_SLOTS, SharedSlots
from offbeat_weightsync._stream import MAX_RUN_BYTES
from offbeat_weightsync._tensors import PlannedTensors


def open_sender(
    address: str | Path,
    plan: BucketPlan,
    *,
    deadline_s: float = 300.0,
    name: str = "trainer-0",
    device: str | None = None,
) -> "WeightSender":
    """Listen at an address from `new_address`: over TCP if it names a host, otherwise by shared memory.

    Args:
        address: where to listen. Give receivers the sender's own `address`, which has the port.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.
        device: of what is on its way, on this machine: see `SharedMemorySender`.

    Raises:
        WeightSyncError: the address is taken, or no address; there is not enough memory, or no such device.
    """
    if TcpAddress.parse(str(address)) is None:
        return SharedMemorySender(address, plan, deadline_s=deadline_s, name=name, device=device)
    return TcpSender(str(address), plan, deadline_s=deadline_s, name=name)


class SharedMemorySender(WeightSender):
    """Sends weights to any number of receivers on this machine.

    Args:
        socket_path: where to listen; see `new_socket_path`. What is not named here: see `WeightSender`.
        device: a CUDA device to hold what is on its way, such as "cuda:0", which the receivers open by CUDA
            IPC; None: it lies in host memory.

    Raises:
        WeightSyncError: there is no such device, the address is taken or too long, or there is not enough memory.
    """

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
                _await_loaded(peers, plan, index - NUM_SLOTS)
            said = 0
            for num_bytes in source.fill(bucket, self._slots.slot(index)):
                if num_bytes - said >= MAX_RUN_BYTES or num_bytes == bucket.num_bytes:
                    self._slots.synchronize()
                    for peer in peers:
                        peer.send(Filled(index, num_bytes))
                    said = num_bytes
        for index in range(max(0, len(plan.buckets) - NUM_SLOTS), len(plan.buckets)):
            _await_loaded(peers, plan, index)


class TcpSender(WeightSender):
    """Sends weights to receivers on any host that have the address's token.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.

    Raises:
        WeightSyncError: the address is taken, or none of this machine.
    """

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


class GroupSender(TcpSender):
    """Sends weights by broadcasts of a group: gloo from CPU to CPUs, nccl from a CUDA device to others.

    The group is made with the first sync and again where other receivers come than the last time, such as one that was
    started again, or after a failure. Receivers bring a `WeightGroup` of their own.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.
        device: of the trainer, by name.

    Raises:
        WeightSyncError: the address is taken, or none of this machine.
        ConfigError: there is no such device, or no group of its kind.
    """

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
        self._group.await_members(partial(_raise_if_spoken, peers), deadline)
        buffers = self._group.buffers(plan)
        for index, bucket in enumerate(plan.buckets):
            if index >= NUM_BUFFERS:
                _await_loaded(peers, plan, index - NUM_BUFFERS)
            memory = buffers[index % NUM_BUFFERS][: bucket.num_bytes]
            for _ in source.fill(bucket, memory):
                pass
            self._group.start(memory, deadline)
        for index in range(max(0, len(plan.buckets) - NUM_BUFFERS), len(plan.buckets)):
            _await_loaded(peers, plan, index)
        self._group.synchronize()


def _others(place: GroupAddress) -> set[tuple[str, int]]:
    """Group and rank of all members but the sender."""
    return {(place.group, rank) for rank in range(1, place.size)}


class DiskSender(TcpSender):
    """Sends weights through a folder that all sides see: a version is there whole, as safetensors files, or not at all.

    The version sent last stays there; those before it, and what a former sender has left, are removed.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.
        folder: of versions, for this sender alone; made if it is not there.

    Raises:
        WeightSyncError: the address is taken, or none of this machine; the folder cannot be written, or another sender
            writes to it.
    """

    def __init__(
        self,
        address: str,
        plan: BucketPlan,
        folder: str | Path,
        *,
        deadline_s: float = 300.0,
        name: str = "trainer-0",
    ) -> None:
        self._folder = VersionFolder(Path(folder).absolute())
        try:
            super().__init__(address, plan, deadline_s=deadline_s, name=name)
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        """Stop listening and let others write to the folder."""
        super().close()
        self._folder.close()

    def _offer(self, peer: Connection, offer: Offer) -> None:
        peer.send(msgspec.structs.replace(offer, folder=str(self._root(offer.digest))))

    def _root(self, digest: str) -> Path:
        """Where versions of a plan lie; those of a part of the tensors by themselves."""
        return self._folder.path if digest == self.plan.digest else self._folder.path / f"plan-{digest}"

    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        root, deadline = self._root(plan.digest), peers[0].deadline

        def look_up() -> None:
            deadline.look_up("the disk")
            _raise_if_spoken(peers)

        self._folder.write(root, plan, source, version, look_up)
        for peer in peers:
            peer.send(FilesWritten())
        _await_loaded(peers, plan, len(plan.buckets) - 1)
        if root != self._folder.path:
            shutil.rmtree(root)


def _raise_if_spoken(peers: list[Connection]) -> None:
    """See `Connection.raise_if_spoken`."""
    for peer in peers:
        peer.raise_if_spoken()


def _await_loaded(peers: list[Connection], plan: BucketPlan, index: int) -> None:
    bucket = f"bucket {index} of {len(plan.buckets)}"
    loaded = collect(peers, lambda peer: peer.receive(Loaded, bucket).bucket, f"to load {bucket}")
    for peer, number in zip(peers, loaded, strict=True):
        if number != index:
            raise WeightSyncError(f"{peer.peer} loaded bucket {number} where {index} was due")
