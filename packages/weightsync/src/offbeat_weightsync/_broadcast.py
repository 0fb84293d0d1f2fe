"""Weights over torch.distributed: one rank sends, the other ranks of a group receive.

A thread of its own makes the group's calls, so that three things go on at once: the trainer gathers a window, the
one before travels, and the one before that is loaded. A sender that fails says so in the last bytes of the next
window; a receiver that fails lets the next few windows pass and says so at the next exchange of all ranks. So a failure
ends the sync for all at the same window, and the group stays usable.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_dist import Device, Group, current_world
from offbeat_types import MismatchError, OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._arrivals import ArrivingStream
from offbeat_weightsync._connections import Deadline
from offbeat_weightsync._courier import NUM_BUFFERS, Courier, Handover
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._plan import BucketPlan, TensorSpec
from offbeat_weightsync._proofs import compare_proofs, proof_from_data, proof_to_data
from offbeat_weightsync._windows import WINDOW_BYTES, Window, cut_windows

FLAG_BYTES: Final = 64
"""Travel behind each window: the first says whether the sender has failed."""

WINDOWS_PER_ROUND: Final = 8
"""After so many windows all ranks say whether they are well."""


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
        device: where the windows lie; the world's by default.

    Raises:
        WeightSyncError: tensors differ from the plan; a receiver failed, wants another version, or holds other bytes.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come, load or prove in time.
    """
    deadline = Deadline(f"weight sync of version {version}", deadline_s)
    window_bytes = WINDOW_BYTES if _device_of(device).torch_device.type == "cpu" else plan.bucket_bytes
    windows = cut_windows(plan, window_bytes)
    handover = Handover(_buffers(windows, device), deadline)
    with Courier(_Sending(group, plan, windows, window_bytes, version, handover, device), handover) as courier:
        source = PlannedTensors(plan, tensors)
        for window in windows:
            buffer = handover.take_empty("the transfer of the window before last")
            source.fill(window, buffer)
            handover.give_full(buffer)
        checksums = source.finish()
        handover.give_full(WeightProof(version=version, num_tensors=len(plan.specs), checksums=checksums))
        return courier.result()


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
        deadline_s: time allowed, from here to the end of `confirm`.
        device: where the windows lie; the world's by default.

    Raises:
        WeightSyncError: the sender or another receiver failed, another version is sent, or the bytes differ.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come in time.
    """
    deadline = Deadline(f"weight sync of version {version} at rank {group.ranks[group.rank]}", deadline_s)
    handover = Handover([], deadline)
    with Courier(_Receiving(group, source, version, handover, device), handover) as courier:
        plan, windows = handover.take_full("the plan")
        stream = BroadcastStream(plan, version, windows, handover, courier)
        yield stream
        stream.check_confirmed()


class BroadcastStream(ArrivingStream):
    """A `WeightStream` from another rank. Made by `receive_broadcast`."""

    def __init__(
        self, plan: BucketPlan, version: int, windows: list[Window], handover: Handover, courier: Courier
    ) -> None:
        super().__init__(plan, version, windows)
        self._handover, self._courier = handover, courier
        self._confirmed = False

    def confirm(self, proof: WeightProof) -> None:
        """Send the engine's proof to all ranks, and return when every receiver has proved the same.

        Raises:
            WeightSyncError: the proof is wrong, or another receiver's is, or it failed.
            DeadlineError: a rank did not prove in time.
        """
        self._handover.give_empty(proof)
        self._courier.result()
        self._confirmed = True

    def check_confirmed(self) -> None:
        """Raise WeightSyncError unless `confirm` has been called and has returned."""
        if not self._confirmed:
            raise WeightSyncError(f"the weights of version {self.version} were taken but not confirmed")

    def _arrivals(self) -> Iterator[Tensor]:
        for window in self._windows:
            buffer = self._handover.take_full(f"bucket {window.bucket} of {len(self.plan.buckets)}")
            yield buffer
            self._handover.give_empty(buffer)

    def _end(self) -> WeightProof:
        sent: WeightProof = self._handover.take_full("the end of the weights")
        return sent


class _Party:
    """One rank's part of the conversation; runs in the courier's thread."""

    def __init__(self, group: Group, source: int, version: int, handover: Handover, device: Device | None) -> None:
        self._group, self._source, self._version = group, source, version
        self._handover, self._device = handover, device

    def _agree_on_plan(self, digest: str) -> None:
        try:
            value = {"version": self._version, "plan": digest}
            self._group.check_equal(value, what="policy version and bucket plan", deadline_s=self._left_s())
        except MismatchError as error:
            raise WeightSyncError(str(error)) from error

    def _agree_to_go_on(self, failure: BaseException | None) -> None:
        """Go on if all ranks are well; otherwise raise on all of them."""
        text = None if failure is None else _one_line(failure)
        for rank, said in zip(self._group.ranks, self._gather(text), strict=True):
            if said is not None:
                raise failure or WeightSyncError(f"rank {rank} gave up: {said}")

    def _broadcast(self, buffer: Tensor, num_bytes: int, failure: BaseException | None = None) -> None:
        """Move a window, or the news that there will be none, which raises on all ranks."""
        memory = buffer[: num_bytes + FLAG_BYTES]
        memory[num_bytes:].fill_(failure is not None)
        self._group.broadcast(memory, self._source, deadline_s=self._left_s())
        if not memory.is_cpu:
            _device_of(self._device).synchronize()  # the call returned when it was queued
        if memory[num_bytes]:
            text = self._group.broadcast_data(failure and _one_line(failure), self._source, deadline_s=self._left_s())
            raise failure or WeightSyncError(f"rank {self._group.ranks[self._source]} gave up: {text}")

    def _settle(self, plan: BucketPlan, sent: WeightProof, report: Any) -> list[WeightProof]:
        """Exchange what the receivers hold or what became of them; every rank comes to the same verdict."""
        proofs = []
        for member, said in enumerate(self._gather(report)):
            holder = f"rank {self._group.ranks[member]}"
            if isinstance(said, str):
                raise WeightSyncError(f"{holder} gave up: {said}")
            if member != self._source:
                proofs.append(proof_from_data(said))
                compare_proofs(plan, sent, proofs[-1], holder)
        return proofs

    def _gather(self, value: Any) -> list[Any]:
        return list(self._group.all_gather_data(value, deadline_s=self._left_s()))

    def _left_s(self) -> float:
        return max(0.001, self._handover.deadline.left_s())


class _Sending(_Party):
    def __init__(
        self,
        group: Group,
        plan: BucketPlan,
        windows: list[Window],
        window_bytes: int,
        version: int,
        handover: Handover,
        device: Device | None,
    ) -> None:
        super().__init__(group, group.rank, version, handover, device)
        self._plan, self._windows, self._window_bytes = plan, windows, window_bytes

    def __call__(self) -> list[WeightProof]:
        plan = self._plan
        specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in plan.specs]
        header = {"specs": specs, "bucket_bytes": plan.bucket_bytes, "window_bytes": self._window_bytes}
        self._group.broadcast_data(header, self._source, deadline_s=self._left_s())
        self._agree_on_plan(plan.digest)
        for index, window in enumerate(self._windows):
            what = f"the trainer to fill bucket {window.bucket} of {len(plan.buckets)}"
            buffer, failure = self._handover.wait_full(what)
            self._broadcast(self._handover.buffers[0] if failure else buffer, window.num_bytes, failure)
            self._handover.give_empty(buffer)
            if index % WINDOWS_PER_ROUND == WINDOWS_PER_ROUND - 1:
                self._agree_to_go_on(None)
        sent, failure = self._handover.wait_full("the trainer's last tensor")
        self._agree_to_go_on(failure)
        self._group.broadcast_data(proof_to_data(sent), self._source, deadline_s=self._left_s())
        return self._settle(plan, sent, None)


class _Receiving(_Party):
    def __call__(self) -> list[WeightProof]:
        plan, windows = self._receive_plan()
        self._handover.add(_buffers(windows, self._device))
        self._handover.give_full((plan, windows))
        failure: BaseException | None = None
        for index, window in enumerate(windows):
            if failure is None:
                what = f"the engine to load bucket {windows[max(0, index - NUM_BUFFERS)].bucket}"
                buffer, failure = self._handover.wait_empty(what)
            # After a failure nobody loads any more: the windows up to the next round pass through one buffer.
            self._broadcast(self._handover.buffers[0] if failure else buffer, window.num_bytes)
            if failure is None:
                self._handover.give_full(buffer)
            if index % WINDOWS_PER_ROUND == WINDOWS_PER_ROUND - 1:
                self._agree_to_go_on(failure)
        self._agree_to_go_on(failure)
        sent = proof_from_data(self._group.broadcast_data(None, self._source, deadline_s=self._left_s()))
        self._handover.give_full(sent)
        held, failure = self._handover.wait_empty("the engine to prove what it holds", skip=Tensor)
        return self._settle(plan, sent, proof_to_data(held) if failure is None else _one_line(failure))

    def _receive_plan(self) -> tuple[BucketPlan, list[Window]]:
        header: Any = self._group.broadcast_data(None, self._source, deadline_s=self._left_s())
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in header["specs"]]
        try:
            plan = BucketPlan.build(specs, header["bucket_bytes"])
        except WeightSyncError as error:
            self._agree_on_plan(str(error))  # differs, so it raises on all ranks
            raise
        self._agree_on_plan(plan.digest)
        return plan, cut_windows(plan, header["window_bytes"])


def _buffers(windows: list[Window], device: Device | None) -> list[Tensor]:
    place = _device_of(device).torch_device
    size = max(window.num_bytes for window in windows) + FLAG_BYTES
    return [torch.empty(size, dtype=torch.uint8, device=place) for _ in range(min(NUM_BUFFERS, len(windows)))]


def _device_of(device: Device | None) -> Device:
    if device is not None:
        return device
    world = current_world()
    if world is None:
        raise WeightSyncError("a broadcast of weights needs a world: call join_world() on all ranks first")
    return world.device


def _one_line(error: BaseException) -> str:
    return str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
