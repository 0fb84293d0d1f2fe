"""Weights over torch.distributed: one rank sends, the other ranks of a group receive, by the group's own broadcast.

The group agrees on version and plan at the start, and at the end on what became of the sync. All its calls are made in
one thread, so that three things go on at once: the trainer gathers a bucket, the one before travels, and the one before
that is loaded. A sender that fails says so in the last bytes of the next bucket; a receiver that fails lets the next
few buckets pass and says so at the next exchange of all ranks. So a failure ends the sync for all at the same bucket,
and the group stays usable.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from offbeat_mesh import Device, Group, current_world
from offbeat_types import MismatchError, TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._connection import Deadline, reason_of
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._stream import MAX_RUN_BYTES, ArrivingStream, Room, Runs
from offbeat_weightsync._tensors import PlannedTensors, compare_proofs

T = TypeVar("T")

NUM_BUFFERS: Final = 2
"""One travels while the other is filled or loaded."""

FLAG_BYTES: Final = 64
"""Travel behind each bucket: the first says whether the sender has failed."""

EXCHANGE_EVERY: Final = 8
"""After so many buckets all ranks say whether they are well."""

MAX_BUCKET_BYTES: Final = 8 << 20
"""Longer buckets are cut for the group: its calls take as long, and a failure is heard earlier."""


def broadcast_weights(
    group: Group,
    plan: BucketPlan,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    deadline_s: float = 300.0,
    device: Device | None = None,
) -> list[WeightProof]:
    """Send one version to all other ranks of the group, and return what each has proved to hold, by group rank.

    All the others call `receive_broadcast` meanwhile. A trainer of several ranks lets one of them send; the others
    iterate the same tensors, where gathering them is a call of all.

    Args:
        group: used by nobody else while this goes on, and by no other thread: `mesh.group(..., channel="weights")`.
        plan: the tensors, in the order in which they come, and the dtypes in which they travel.
        tensors: (name, tensor) as planned; converted on the way.
        version: policy version; the receivers must ask for the same.
        deadline_s: time allowed, from here to the last proof.
        device: where buckets lie; the world's by default.

    Raises:
        WeightSyncError: tensors differ from the plan; a receiver failed, wants another version, or holds other bytes.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come, load or prove in time.
    """
    plan = BucketPlan.build(plan.specs, min(plan.bucket_bytes, MAX_BUCKET_BYTES))
    deadline = Deadline(f"weight sync of version {version}", deadline_s)
    with _GroupSync(group, group.rank, version, deadline) as sync:
        sync.start(partial(sync.offer, plan)).result()
        sync.make_buffers(plan, device)
        checksums = _send_buckets(sync, plan, PlannedTensors(plan, tensors))
        sync.sent = WeightProof(version=version, num_tensors=len(plan.specs), checksums=checksums)
        return sync.start(sync.settle).result()


def _send_buckets(sync: "_GroupSync", plan: BucketPlan, source: PlannedTensors) -> tuple[str, ...]:
    """Fill and send, and return the checksum of each bucket; an error is told to all ranks before it is raised."""
    moving: list[Future[None]] = []
    for index, bucket in enumerate(plan.buckets):
        if index >= NUM_BUFFERS:
            moving[index - NUM_BUFFERS].result()
        failure: BaseException | None = None
        try:
            for _ in source.fill(bucket, sync.buffers[index % NUM_BUFFERS]):
                pass
        except BaseException as error:  # noqa: BLE001 - raised on all ranks
            failure = error
        moving.append(sync.start(partial(sync.move, index, failure)))
        if failure is not None:
            moving[-1].result()
    for each in moving[-NUM_BUFFERS:]:
        each.result()
    checksums: tuple[str, ...] = ()
    failure = None
    try:
        checksums = source.finish()
    except BaseException as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    sync.start(partial(sync.agree_to_go_on, failure)).result()
    return checksums


@contextmanager
def receive_broadcast(
    group: Group, version: int, *, source: int = 0, deadline_s: float = 300.0, device: Device | None = None
) -> Iterator["BroadcastStream"]:
    """Receive what the group's `source` sends with `broadcast_weights`, and yield the stream. Blocking: use a thread.

        with receive_broadcast(group, version) as stream:
            proof = engine.update_weights(stream, version)   # loads, then calls stream.prove
            stream.confirm(proof)

    Leaving the block with an error, or without `confirm`, makes all ranks fail with that reason.

    Args:
        group: used by nobody else while this goes on, and by no other thread.
        version: policy version wanted.
        source: group-relative rank of the sender.
        deadline_s: time allowed, from here to the end of the block.
        device: where buckets lie; the world's by default.

    Raises:
        WeightSyncError: the sender or another receiver failed, another version is sent, or the bytes differ.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come in time.
    """
    name = f"rank {group.ranks[group.rank]}"
    deadline = Deadline(f"weight sync of version {version} at {name}", deadline_s)
    with _GroupSync(group, source, version, deadline) as sync:
        plan = sync.start(sync.learn).result()
        sync.make_buffers(plan, device)
        stream = BroadcastStream(plan, version, sync)
        try:
            yield stream
            stream.check_confirmed(name)
        except BaseException as error:
            stream.give_up(error)
            raise


class BroadcastStream(ArrivingStream):
    """A `WeightStream` from another rank. Made by `receive_broadcast`."""

    def __init__(self, plan: BucketPlan, version: int, sync: "_GroupSync") -> None:
        super().__init__(plan, version)
        self._sync = sync
        self._moving: list[Future[None]] = []
        self._failure: BaseException | None = None

    def give_up(self, error: BaseException) -> None:
        """Say so when it is this rank's turn to speak; until then buckets pass by."""
        if self._confirmed:
            return
        self._failure = error
        while len(self._moving) < len(self.plan.buckets):
            self._start_next()
        if self._sent is None:
            self._sync.start(partial(self._sync.hear_proof, error))
        self._sync.start(partial(self._sync.settle, error=error))

    def _arrive(self, room: Room) -> Runs:
        for index, bucket in enumerate(self.plan.buckets):
            while len(self._moving) < min(index + NUM_BUFFERS, len(self.plan.buckets)):
                self._start_next()
            self._moving[index].result()
            buffer = self._sync.buffers[index % NUM_BUFFERS]
            for piece in bucket.pieces:
                for run in piece.cut(MAX_RUN_BYTES):
                    yield run, buffer[run.bucket_offset : run.bucket_offset + run.num_bytes]

    def _start_next(self) -> None:
        index = len(self._moving)
        self._moving.append(self._sync.start(lambda: self._sync.move(index, self._failure)))

    def _end(self) -> WeightProof:
        return self._sync.start(lambda: self._sync.hear_proof(self._failure)).result()

    def _tell(self, proof: WeightProof) -> None:
        self._sync.start(partial(self._sync.settle, proof)).result()


class _GroupSync:
    """One rank's part of a sync, and the thread that makes its calls of the group."""

    def __init__(self, group: Group, source: int, version: int, deadline: Deadline) -> None:
        self._group, self._source, self._version, self._deadline = group, source, version, deadline
        self._is_source = group.rank == source
        self._thread = ThreadPoolExecutor(1, "offbeat-weight-broadcast")
        self._ended_by: BaseException | None = None
        self.plan: BucketPlan
        self.sent: WeightProof
        self.buffers: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Make calls of the group after those that were started before; none once one of them has raised."""

        def run() -> T:
            if self._ended_by is not None:
                raise self._ended_by
            try:
                return call()
            except BaseException as error:
                self._ended_by = error
                raise

        return self._thread.submit(run)

    def make_buffers(self, plan: BucketPlan, device: Device | None) -> None:
        """Buffers on every rank, or, where one has no memory for them, an error on every rank."""
        self.plan, self._device = plan, device or _device_of_world()
        failure: BaseException | None = None
        try:
            size = plan.longest_bucket_bytes + FLAG_BYTES
            place = self._device.torch_device
            num = min(NUM_BUFFERS, len(plan.buckets))
            self.buffers = [torch.empty(size, dtype=torch.uint8, device=place) for _ in range(num)]
        except BaseException as error:  # noqa: BLE001 - raised on all ranks
            failure = error
        self.start(partial(self.agree_to_go_on, failure)).result()

    def offer(self, plan: BucketPlan) -> None:
        """The sender says what will come; raises on all ranks if they want different things."""
        self._broadcast_data({"specs": msgspec.to_builtins(plan.specs), "bucket_bytes": plan.bucket_bytes})
        self._agree_on(plan.digest)

    def learn(self) -> BucketPlan:
        """The receivers hear what will come; raises on all ranks if they want different things."""
        header: Any = self._broadcast_data(None)
        specs = msgspec.convert(header["specs"], tuple[TensorSpec, ...])
        try:
            plan = BucketPlan.build(specs, header["bucket_bytes"])
        except WeightSyncError as error:
            self._agree_on(str(error))  # differs, so it raises on all ranks
            raise
        self._agree_on(plan.digest)
        return plan

    def move(self, index: int, failure: BaseException | None) -> None:
        """Move a bucket, or the sender's news that there will be none; raises on all ranks when one has failed."""
        num_bytes = self.plan.buckets[index].num_bytes
        memory = self.buffers[index % NUM_BUFFERS][: num_bytes + FLAG_BYTES]
        if self._is_source:
            memory[num_bytes:].fill_(failure is not None)
        self._group.broadcast(memory, self._source, deadline_s=self._left_s())
        if not memory.is_cpu:
            self._device.synchronize()  # the call returned when it was queued
        if memory[num_bytes]:
            text = self._broadcast_data(failure and reason_of(failure))
            raise failure if failure and self._is_source else self._given_up(self._source, text)
        if index % EXCHANGE_EVERY == EXCHANGE_EVERY - 1:
            self.agree_to_go_on(failure)

    def agree_to_go_on(self, failure: BaseException | None) -> None:
        """Go on if all ranks are well; otherwise raise on all of them."""
        for member, said in enumerate(self._gather(None if failure is None else reason_of(failure))):
            if said is not None:
                raise failure or self._given_up(member, said)

    def hear_proof(self, failure: BaseException | None) -> WeightProof:
        """A receiver hears what was sent, once all has come."""
        self.agree_to_go_on(failure)
        self.sent = msgspec.convert(self._broadcast_data(None), WeightProof)
        return self.sent

    def settle(self, held: WeightProof | None = None, error: BaseException | None = None) -> list[WeightProof]:
        """Exchange what the receivers hold or what became of them; every rank comes to the same verdict."""
        if self._is_source:
            self._broadcast_data(msgspec.to_builtins(self.sent))
        proofs: list[WeightProof] = []
        for member, said in enumerate(self._gather(reason_of(error) if error else msgspec.to_builtins(held))):
            if isinstance(said, str):
                raise self._given_up(member, said)
            if member != self._source:
                proofs.append(msgspec.convert(said, WeightProof))
                compare_proofs(self.plan, self.sent, proofs[-1], f"rank {self._group.ranks[member]}")
        return proofs

    def _given_up(self, member: int, text: Any) -> WeightSyncError:
        return WeightSyncError(f"rank {self._group.ranks[member]} gave up: {text}")

    def _broadcast_data(self, value: Any) -> Any:
        return self._group.broadcast_data(value, self._source, deadline_s=self._left_s())

    def _gather(self, value: Any) -> list[Any]:
        return list(self._group.all_gather_data(value, deadline_s=self._left_s()))

    def _left_s(self) -> float:
        return max(0.001, self._deadline.left_s())

    def _agree_on(self, digest: str) -> None:
        try:
            value = {"version": self._version, "plan": digest}
            self._group.check_equal(value, what="policy version and bucket plan", deadline_s=self._left_s())
        except MismatchError as error:
            raise WeightSyncError(str(error)) from error


def _device_of_world() -> Device:
    world = current_world()
    if world is None:
        raise WeightSyncError("a broadcast of weights needs a world: call join_world() on all ranks first")
    return world.device
