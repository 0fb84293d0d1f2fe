"""One sync as the sender lives it, once its receivers are there. Transports say how the windows go."""

import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from offbeat_types import DeadlineError, WeightProof, WeightSyncError
from offbeat_weightsync._connections import LOOK_UP_S, Connection, LaneLostError
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._lanes import assign_lanes, run_lanes
from offbeat_weightsync._messages import Accepted, End, Hello, Proof, Ready
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs
from offbeat_weightsync._windows import Window, cut_windows

T = TypeVar("T")


@dataclass
class Lane:
    """The sender's end of a lane.

    Args:
        index: of the lane.
        cpu: core it runs on, or ANY_CPU.
        peers: to each receiver, its connection of this lane.
    """

    index: int
    cpu: int
    peers: list[Connection] = field(default_factory=list)

    def break_off(self) -> None:
        """End all waits."""
        for peer in self.peers:
            peer.break_off()

    def close(self) -> None:
        """Hang up."""
        for peer in self.peers:
            peer.close()


class Round(ABC):
    """Sends one version to receivers that have joined.

    Args:
        peers: the receivers, at least one.
        plan: what is sent to them.
        kept: digest of what is not sent because they hold it; "" when all is sent.
    """

    def __init__(self, peers: list[Connection], plan: BucketPlan, kept: str = "") -> None:
        self._peers, self._plan, self._kept = peers, plan, kept

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> list[WeightProof]:
        """Send all, and return what each receiver has proved to hold.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes.
            DeadlineError: somebody did not come, load or prove in time.
        """
        source = PlannedTensors(self._plan, tensors)
        lanes = self._open_lanes(_stay(tensors))
        try:
            self._introduce(lanes)
            fillers = source.spread(len(lanes)) if len(lanes) > 1 else [source]  # while the receivers get ready
            self._await_ready()
            checksums = self._send_windows(lanes, fillers)
        except LaneLostError as error:
            raise error.reason() from error
        finally:
            for lane in lanes:
                lane.close()
        return self._settle(WeightProof(version=version, num_tensors=len(self._plan.specs), checksums=checksums))

    @abstractmethod
    def _open_lanes(self, many: bool) -> list[Lane]:
        """The lanes of this round; one, unless several buckets may be filled at once."""

    @abstractmethod
    def _introduce(self, lanes: list[Lane]) -> None:
        """Say to every receiver what will come, and how."""

    @abstractmethod
    def _send_lane(self, lane: Lane, filler: PlannedTensors, windows: list[tuple[int, Window]]) -> None:
        """Send the windows of one lane, (number, window) in order, to all receivers."""

    @property
    @abstractmethod
    def _window_bytes(self) -> int:
        """No window is longer."""

    def _hello(self, num_slots: int, lanes: list[Lane]) -> Hello:
        plan = self._plan
        return Hello(
            specs=[(spec.name, spec.dtype, spec.shape) for spec in plan.specs],
            bucket_bytes=plan.bucket_bytes,
            slot_bytes=self._window_bytes,
            num_slots=num_slots,
            digest=plan.digest,
            kept=self._kept,
            lanes=[lane.cpu for lane in lanes],
        )

    def _await_ready(self) -> None:
        ready = collect(self._peers, lambda peer: peer.receive(Ready, "its answer to the plan"), "to get ready")
        for peer, answer in ready.items():
            if answer.digest != self._plan.digest:
                raise WeightSyncError(f"the plans differ: {self._plan.digest} here, {answer.digest} at {peer.peer}")

    def _send_windows(self, lanes: list[Lane], fillers: list[PlannedTensors]) -> tuple[str, ...]:
        """Send window after window, and return the checksum of each bucket."""
        homes = assign_lanes(self._plan, len(lanes))
        own: list[list[tuple[int, Window]]] = [[] for _ in lanes]
        for index, window in enumerate(cut_windows(self._plan, self._window_bytes)):
            own[homes[window.bucket]].append((index, window))
        bodies = [partial(self._send_lane, *each) for each in zip(lanes, fillers, own, strict=True)]
        if len(bodies) == 1:
            bodies[0]()  # in this thread: the trainer's generator is its own
        else:
            run_lanes(bodies, [lane.cpu for lane in lanes], partial(_break_off, lanes))
        checksums = [iter(filler.finish()) for filler in fillers]
        return tuple(next(checksums[home]) for home in homes)

    def _settle(self, sent: WeightProof) -> list[WeightProof]:
        for peer in self._peers:
            peer.send(End(sent))
        proofs = collect(self._peers, lambda peer: peer.receive(Proof, "its proof"), "to prove what it holds")
        for peer in self._peers:
            compare_proofs(self._plan, sent, proofs[peer].held, peer.peer)
        for peer in self._peers:
            peer.send(Accepted())
        return [proofs[peer].held for peer in self._peers]


def collect(peers: list[Connection], take: Callable[[Connection], T], what: str) -> dict[Connection, T]:
    """Take what comes from every receiver, in whatever order they come."""
    if len(peers) == 1:  # the common case, at a third of the cost
        try:
            return {peers[0]: take(peers[0])}
        except DeadlineError:
            raise peers[0].deadline.missed(f"{peers[0].peer} {what}") from None
    taken: dict[Connection, T] = {}
    deadline = peers[0].deadline
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
        while len(taken) < len(peers):
            missing = ", ".join(peer.peer for peer in peers if peer not in taken)
            with deadline.declared(missing):
                ready = selector.select(min(deadline.left_s(), LOOK_UP_S))
            if not ready:
                deadline.look_up(missing)
                if not deadline.left_s():
                    raise deadline.missed(f"{missing} {what}")
            for key, _ in ready:
                selector.unregister(key.fileobj)
                taken[key.data] = take(key.data)
    return taken


def _break_off(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.break_off()


def _stay(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether all tensors can be held at once at no cost: a collection keeps them anyway, and none must be copied."""
    return isinstance(tensors, Collection) and all(tensor.is_contiguous() for _, tensor in tensors)
