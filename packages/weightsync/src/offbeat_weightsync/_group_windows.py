"""The bytes of a broadcast in windows, by the group's own broadcast: gloo, or nccl and its kind on devices.

A thread of its own makes the group's calls, so that three things go on at once: the trainer gathers a window, the
one before travels, and the one before that is loaded. A sender that fails says so in the last bytes of the next
window; a receiver that fails lets the next few windows pass and says so at the next exchange of all ranks. So a failure
ends the sync for all at the same window, and the group stays usable.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from offbeat_mesh import Device
from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._arrivals import ArrivingStream
from offbeat_weightsync._courier import NUM_BUFFERS, Courier, Handover
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._group_talk import GroupTalk, Terms, apart, device_of, one_line
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import proof_from_data, proof_to_data
from offbeat_weightsync._windows import Window, cut_windows

FLAG_BYTES: Final = 64
"""Travel behind each window: the first says whether the sender has failed."""

WINDOWS_PER_ROUND: Final = 8
"""After so many windows all ranks say whether they are well."""


def send_by_windows(
    talk: GroupTalk, terms: Terms, tensors: Iterable[tuple[str, Tensor]], device: Device | None
) -> list[WeightProof]:
    """Send to all receivers, and return what each has proved, by group rank; raises as `broadcast_weights`."""
    plan, windows = terms.plan, cut_windows(terms.plan, terms.window_bytes)
    handover = Handover(_make_buffers(talk, windows, device), talk.deadline)
    with Courier(_Sending(talk, plan, windows, handover, device), handover) as courier:
        source = PlannedTensors(plan, tensors)
        for window in windows:
            buffer = handover.take_empty("the transfer of the window before last")
            source.fill(window, buffer)
            handover.give_full(buffer)
        checksums = source.finish()
        handover.give_full(WeightProof(version=talk.version, num_tensors=len(plan.specs), checksums=checksums))
        return courier.result()


@contextmanager
def receive_by_windows(talk: GroupTalk, terms: Terms, device: Device | None) -> Iterator["BroadcastStream"]:
    """A receiver; raises as `receive_broadcast`."""
    windows = cut_windows(terms.plan, terms.window_bytes)
    handover = Handover(_make_buffers(talk, windows, device), talk.deadline)
    with Courier(_Receiving(talk, terms.plan, windows, handover, device), handover) as courier:
        stream = BroadcastStream(terms.plan, talk.version, windows, handover, courier)
        yield stream
        stream.check_confirmed(f"rank {talk.group.ranks[talk.group.rank]}")


class BroadcastStream(ArrivingStream):
    """A `WeightStream` from another rank, in windows. Made by `receive_broadcast`."""

    def __init__(
        self, plan: BucketPlan, version: int, windows: Sequence[Window], handover: Handover, courier: Courier
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

    def check_confirmed(self, name: str) -> None:
        """Raise WeightSyncError unless `confirm` has been called and has returned."""
        if not self._confirmed:
            raise WeightSyncError(f"{name} took the weights of version {self.version} but did not confirm them")

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

    def __init__(
        self,
        talk: GroupTalk,
        plan: BucketPlan,
        windows: Sequence[Window],
        handover: Handover,
        device: Device | None,
    ) -> None:
        self._talk, self._plan, self._windows = talk, plan, windows
        self._handover, self._device = handover, device

    def _broadcast(self, buffer: Tensor, num_bytes: int, failure: BaseException | None = None) -> None:
        """Move a window, or the news that there will be none, which raises on all ranks."""
        group, source = self._talk.group, self._talk.source
        memory = buffer[: num_bytes + FLAG_BYTES]
        memory[num_bytes:].fill_(failure is not None)
        group.broadcast(memory, source, deadline_s=self._talk.left_s())
        if not memory.is_cpu:
            device_of(self._device).synchronize()  # the call returned when it was queued
        if memory[num_bytes]:
            text = group.broadcast_data(failure and one_line(failure), source, deadline_s=self._talk.left_s())
            raise failure or WeightSyncError(f"rank {group.ranks[source]} gave up: {text}")


class _Sending(_Party):
    def __call__(self) -> list[WeightProof]:
        for index, window in enumerate(self._windows):
            what = f"the trainer to fill bucket {window.bucket} of {len(self._plan.buckets)}"
            buffer, failure = self._handover.wait_full(what)
            self._broadcast(self._handover.buffers[0] if failure else buffer, window.num_bytes, failure)
            self._handover.give_empty(buffer)
            if index % WINDOWS_PER_ROUND == WINDOWS_PER_ROUND - 1:
                self._talk.agree_to_go_on(None)
        sent, failure = self._handover.wait_full("the trainer's last tensor")
        self._talk.agree_to_go_on(failure)
        self._talk.group.broadcast_data(proof_to_data(sent), self._talk.source, deadline_s=self._talk.left_s())
        return self._talk.settle(self._plan, sent, None)


class _Receiving(_Party):
    def __call__(self) -> list[WeightProof]:
        talk, failure = self._talk, None
        for index, window in enumerate(self._windows):
            if failure is None:
                what = f"the engine to load bucket {self._windows[max(0, index - NUM_BUFFERS)].bucket}"
                buffer, failure = self._handover.wait_empty(what)
            # After a failure nobody loads any more: the windows up to the next round pass through one buffer.
            self._broadcast(self._handover.buffers[0] if failure else buffer, window.num_bytes)
            if failure is None:
                self._handover.give_full(buffer)
            if index % WINDOWS_PER_ROUND == WINDOWS_PER_ROUND - 1:
                talk.agree_to_go_on(failure)
        talk.agree_to_go_on(failure)
        sent = proof_from_data(talk.group.broadcast_data(None, talk.source, deadline_s=talk.left_s()))
        self._handover.give_full(sent)
        held, failure = self._handover.wait_empty("the engine to prove what it holds", skip=Tensor)
        return talk.settle(self._plan, sent, proof_to_data(held) if failure is None else one_line(failure))


def _make_buffers(talk: GroupTalk, windows: Sequence[Window], device: Device | None) -> list[Tensor]:
    """Buffers on every rank, or, where one has no memory for them, an error on every rank."""
    buffers: list[Tensor] = []
    failure: BaseException | None = None
    try:
        place = device_of(device).torch_device
        size = max(window.num_bytes for window in windows) + FLAG_BYTES
        num = min(NUM_BUFFERS, len(windows))
        buffers = [torch.empty(size, dtype=torch.uint8, device=place) for _ in range(num)]
    except BaseException as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    apart(lambda: talk.agree_to_go_on(failure))
    return buffers
