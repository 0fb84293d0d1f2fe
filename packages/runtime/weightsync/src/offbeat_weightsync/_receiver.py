"""The rollout engine's side of the transports between processes: join a sender, and take what it sends."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor
from torch.distributed import Work

from offbeat_core import DeadlineError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import TcpAddress, connect
from offbeat_weightsync._changes import WeightCopy, apply_bucket
from offbeat_weightsync._connection import (
    Accepted,
    Changes,
    Connection,
    Deadline,
    End,
    FilesWritten,
    Filled,
    Join,
    Loaded,
    Offer,
    Proof,
    Ready,
    Welcome,
)
from offbeat_weightsync._disk import await_path, open_version
from offbeat_weightsync._group import NUM_BUFFERS, WeightGroup
from offbeat_weightsync._plan import BucketPlan, Piece, agreed_plan
from offbeat_weightsync._shared_memory import NUM_SLOTS, open_device_slots, open_slots, synchronize
from offbeat_weightsync._stream import MAX_RUN_BYTES, ArrivingStream, Room, Runs, read_runs
from offbeat_weightsync._tensors import RUN_BYTES, kept_digest


@contextmanager
def receive(
    address: str | Path,
    version: int,
    deadline_s: float,
    *,
    name: str = "rollout-0",
    held: Mapping[str, str] | None = None,
    copy: WeightCopy | None = None,
    group: WeightGroup | None = None,
) -> Iterator["PeerStream | KeptStream"]:
    """Connect to a `WeightSender` and yield the stream of one version. Blocking: use a thread.

        with receive(address, version, deadline_s=60, name="rollout-1") as stream:
            proof = engine.update_weights(stream, version)   # iterates, then calls stream.prove
            stream.confirm(proof)

    Leaving the block with an error, or without `confirm`, makes the sender fail with that reason.

    Args:
        address: where the sender listens: its `address`.
        version: policy version wanted.
        deadline_s: time allowed from here to the end of `confirm`.
        name: this side, for the sender's errors.
        held: checksum of each tensor the engine holds, from `tensor_checksums`, to be sent changes alone; the stream's
            plan then has only those. None: everything.
        copy: of what came last, to be sent changed elements alone where the sender has kept the same. The stream gives
            all tensors, whole, in any case.
        group: kept from version to version, where a `GroupSender` sends.

    Raises:
        WeightSyncError: the sender is not there, refuses the token, failed or died, sends another version, or the
            bytes differ.
        DeadlineError: it did not come in time.
    """
    connection = connect(address, Deadline(f"weight sync of version {version} at {name}", deadline_s))
    try:
        member = None if group is None else group.member
        join = Join(name, version, None if held is None else dict(held), "" if copy is None else copy.digest, member)
        connection.send(join)
        over_tcp = TcpAddress.parse(str(address)) is not None
        stream = _open_stream(connection, version, held, copy, group, over_tcp=over_tcp)
        try:
            yield stream
        finally:
            stream.close()
        stream.check_confirmed(name)
    except BaseException as error:
        connection.fail(error)
        if group is not None:
            group.leave()
        raise
    finally:
        connection.close()


def _open_stream(
    connection: Connection,
    version: int,
    held: Mapping[str, str] | None,
    copy: WeightCopy | None,
    group: WeightGroup | None,
    *,
    over_tcp: bool,
) -> "PeerStream | KeptStream":
    connection.peer = connection.receive(Welcome, "its plan").name
    offer = connection.receive(Offer, "its plan")
    plan = agreed_plan(offer.specs, offer.bucket_bytes, offer.digest, connection.peer)
    if offer.kept and (held is None or kept_digest(held, {spec.name for spec in plan.specs}) != offer.kept):
        raise WeightSyncError(
            f"{connection.peer} sends changes to other weights than are held here; ask for everything"
        )
    stream: PeerStream
    if offer.place is not None and group is not None:
        group.join(offer.place, connection.own_host, connection.deadline)
        group.await_members(connection.raise_if_spoken, connection.deadline)
        stream = GroupStream(connection, plan, version, group)
    elif offer.folder:
        _check_seen(Path(offer.folder), connection)
        stream = FolderStream(connection, plan, version, Path(offer.folder))
    elif over_tcp:
        stream = TcpStream(connection, plan, version)
    else:
        stream = SharedMemoryStream(connection, plan, version, _open_slots(connection, offer))
    stream.checksum = offer.checksum
    connection.send(Ready(plan.digest))
    return stream if copy is None else KeptStream(stream, copy, changes=offer.changes)


def _open_slots(connection: Connection, offer: Offer) -> list[Tensor]:
    if offer.cuda is not None:
        return open_device_slots(offer.cuda, offer.slot_bytes)
    fd = connection.receive_descriptor()
    try:
        return open_slots(fd, offer.slot_bytes, writable=False)
    finally:
        os.close(fd)


class PeerStream(ArrivingStream):
    """A `WeightStream` from another process. Made by `receive`."""

    def __init__(self, connection: Connection, plan: BucketPlan, version: int) -> None:
        super().__init__(plan, version)
        self._connection = connection

    def close(self) -> None:
        """Let go of memory that is shared with the sender."""

    def take_changes(self, copy: WeightCopy) -> WeightProof:
        """Write what has changed into the copy, and return what the copy should be now."""
        for index, bucket in enumerate(self.plan.buckets):
            told = self._connection.receive(Changes, self._bucket(index))
            if not 0 <= told.num_bytes <= bucket.num_bytes:
                raise WeightSyncError(f"{told.num_bytes} bytes of changes came for {self._bucket(index)}")
            data = np.empty(told.num_bytes, np.uint8)
            self._connection.receive_data(data.data, f"the changes in {self._bucket(index)}")
            apply_bucket(bucket, told.runs, data, copy)
        return self._end()

    def take_all(self, copy: WeightCopy) -> WeightProof:
        """Fill the copy, and return what it should be now."""
        self.load(copy.tensor)
        assert self._sent is not None
        return self._sent

    def _end(self) -> WeightProof:
        return self._connection.receive(End, "the end of the weights").sent

    def _tell(self, proof: WeightProof) -> None:
        self._connection.send(Proof(proof))
        self._connection.receive(Accepted, "the sender's answer to the proof")

    def _bucket(self, index: int) -> str:
        return f"bucket {index} of {len(self.plan.buckets)}"


class TcpStream(PeerStream):
    """A `WeightStream` over TCP. Made by `receive`."""

    def _arrive(self, room: Room) -> Runs:
        """Straight into the engine's tensors, where they are contiguous in host memory."""

        def read(_: Piece, bucket: int, target: memoryview) -> None:
            self._connection.receive_data(target, self._bucket(bucket))

        return read_runs(self.plan, RUN_BYTES, read, room)


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


class FolderStream(PeerStream):
    """A `WeightStream` from a folder that the sender writes. Made by `receive`."""

    def __init__(self, connection: Connection, plan: BucketPlan, version: int, folder: Path) -> None:
        super().__init__(connection, plan, version)
        self._folder = folder

    def _arrive(self, room: Room) -> Runs:
        connection = self._connection
        connection.receive(FilesWritten, f"version {self.version} in {self._folder}")
        plan, _, opened = open_version(self._folder, self.version, connection.deadline)
        with opened as files:
            if plan.digest != self.plan.digest:
                raise WeightSyncError(f"{self._folder} holds other tensors than {connection.peer} has announced")
            yield from read_runs(self.plan, MAX_RUN_BYTES, files.read, room)
        connection.send(Loaded(len(self.plan.buckets) - 1))


SEEN_S: Final = 10.0
"""For a folder of the sender to be seen here."""


def _check_seen(folder: Path, connection: Connection) -> None:
    """Raise WeightSyncError if a folder is not one that both sides see."""
    root = folder.parent if folder.name.startswith("plan-") else folder  # the other is made with the version
    try:
        await_path(root, str(root), Deadline("weight sync's folder", min(SEEN_S, connection.deadline.left_s())))
    except DeadlineError:
        raise WeightSyncError(
            f"{folder} of {connection.peer} is not on {socket.gethostname()}: give it under a path that both see"
        ) from None


class KeptStream(ArrivingStream):
    """A `WeightStream` out of a copy that is kept from version to version. Made by `receive`.

    What has changed is written into the copy, and all tensors come out of it: an engine needs no case for changes, and
    proves all that it holds.
    """

    def __init__(self, incoming: PeerStream, copy: WeightCopy, *, changes: bool) -> None:
        super().__init__(incoming.plan, incoming.version)
        self._incoming, self._copy, self.brings_changes = incoming, copy, changes
        self.checksum = incoming.checksum
        copy.begin(incoming.plan, changes=changes)

    def close(self) -> None:
        """See `PeerStream.close`; the copy stays."""
        self._incoming.close()

    def _arrive(self, room: Room) -> Runs:
        take = self._incoming.take_changes if self.brings_changes else self._incoming.take_all
        self._expected = take(self._copy)
        for bucket in self.plan.buckets:
            for piece in bucket.pieces:
                yield piece, self._copy.run(piece)

    def _end(self) -> WeightProof:
        return self._expected

    def _tell(self, proof: WeightProof) -> None:
        self._incoming.confirm(proof)
        self._copy.finish(proof)
