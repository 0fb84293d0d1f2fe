"""The rollout engine's side of the transports between processes: join a sender, and take what it sends."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._addresses import TcpAddress, connect
from offbeat_weightsync._connection import (
    Accepted,
    Connection,
    Deadline,
    End,
    Filled,
    Join,
    Loaded,
    Offer,
    Proof,
    Ready,
    Welcome,
)
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
) -> Iterator["PeerStream"]:
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

    Raises:
        WeightSyncError: the sender is not there, refuses the token, failed or died, sends another version, or the
            bytes differ.
        DeadlineError: it did not come in time.
    """
    connection = connect(address, Deadline(f"weight sync of version {version} at {name}", deadline_s))
    try:
        connection.send(Join(name, version, None if held is None else dict(held)))
        stream = _open_stream(connection, version, held, over_tcp=TcpAddress.parse(str(address)) is not None)
        try:
            yield stream
        finally:
            stream.close()
        stream.check_confirmed(name)
    except BaseException as error:
        connection.fail(error)
        raise
    finally:
        connection.close()


def _open_stream(
    connection: Connection, version: int, held: Mapping[str, str] | None, *, over_tcp: bool
) -> "PeerStream":
    connection.peer = connection.receive(Welcome, "its plan").name
    offer = connection.receive(Offer, "its plan")
    plan = agreed_plan(offer.specs, offer.bucket_bytes, offer.digest, connection.peer)
    if offer.kept and (held is None or kept_digest(held, {spec.name for spec in plan.specs}) != offer.kept):
        raise WeightSyncError(
            f"{connection.peer} sends changes to other weights than are held here; ask for everything"
        )
    if over_tcp:
        stream: PeerStream = TcpStream(connection, plan, version)
    else:
        stream = SharedMemoryStream(connection, plan, version, _open_slots(connection, offer))
    connection.send(Ready(plan.digest))
    return stream


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
