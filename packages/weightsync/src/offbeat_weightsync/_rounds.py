"""One sync as the sender lives it, once its receivers are there."""

import selectors
import socket
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial

from torch import Tensor

from offbeat_types import DeadlineError, WeightProof, WeightSyncError
from offbeat_weightsync._connections import Connection, LaneLostError, M
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._lanes import LANE_SLOT_BYTES, SLOTS_PER_LANE, assign_slots, choose_cpus, run_lanes
from offbeat_weightsync._messages import Accepted, End, Filled, Hello, Loaded, Proof, Ready
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs
from offbeat_weightsync._slots import HostSlots, SharedSlots
from offbeat_weightsync._windows import Window, cut_windows


class Round:
    """Sends one version to receivers that have joined.

    Args:
        peers: the receivers, at least one.
        plan: what is sent to them.
        slots: memory that they will map.
        kept: digest of what is not sent because they hold it; "" when all is sent.
    """

    def __init__(self, peers: list[Connection], plan: BucketPlan, slots: SharedSlots, kept: str = "") -> None:
        self._peers, self._plan, self._slots, self._kept = peers, plan, slots, kept
        self._cpus: list[int] = []

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> list[WeightProof]:
        """Send all, and return what each receiver has proved to hold.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes.
            DeadlineError: somebody did not map, load or prove in time.
        """
        source = PlannedTensors(self._plan, tensors)
        if _stay(tensors):
            self._divide()
        lanes = [_Lane(index) for index in range(len(self._cpus))]
        try:
            fillers = source.spread(len(lanes)) if lanes else [source]
            self._introduce(lanes)
            checksums = self._send_windows(lanes, fillers)
        except LaneLostError as error:
            raise error.principal.last_words() from error
        finally:
            for lane in lanes:
                lane.close()
        return self._settle(WeightProof(version=version, num_tensors=len(self._plan.specs), checksums=checksums))

    def _divide(self) -> None:
        """Go in lanes, where there are cores, buckets and memory for that."""
        cpus = choose_cpus(len(self._plan.buckets))
        if cpus and isinstance(self._slots, HostSlots):
            divided = self._slots.divided(SLOTS_PER_LANE * len(cpus), LANE_SLOT_BYTES)
            if divided is not None:
                self._slots, self._cpus = divided, cpus

    def _introduce(self, lanes: list["_Lane"]) -> None:
        plan = self._plan
        specs = [(spec.name, spec.dtype, spec.shape) for spec in plan.specs]
        for peer in self._peers:
            handle = self._slots.device_handle()
            peer.send(
                Hello(
                    specs=specs,
                    bucket_bytes=plan.bucket_bytes,
                    slot_bytes=self._slots.slot_bytes,
                    num_slots=self._slots.num_slots,
                    digest=plan.digest,
                    kept=self._kept,
                    cuda=handle,
                    lanes=self._cpus,
                )
            )
            if handle is None:
                peer.send_descriptor(self._slots.descriptor)
            for lane in lanes:
                lane.connect(peer)
        for answer in _collect(self._peers, Ready, "to map the memory").values():
            if answer.digest != plan.digest:
                raise WeightSyncError(f"the plans differ: {plan.digest} here, {answer.digest} at a receiver")

    def _send_windows(self, lanes: list["_Lane"], fillers: list[PlannedTensors]) -> tuple[str, ...]:
        """Fill and announce window after window, and return the checksum of each bucket."""
        windows = cut_windows(self._plan, self._slots.slot_bytes)
        places = assign_slots(windows, len(fillers), self._slots.num_slots)
        if not lanes:
            self._send_lane(self._peers, fillers[0], list(enumerate(windows)), places)
            return fillers[0].finish()
        bodies = []
        for lane, filler in zip(lanes, fillers, strict=True):
            own = [(index, window) for index, window in enumerate(windows) if places[index][0] == lane.index]
            bodies.append(partial(self._send_lane, lane.peers, filler, own, places))
        run_lanes(bodies, self._cpus, lambda: _break_off(lanes))
        checksums = [filler.finish() for filler in fillers]
        return tuple(checksums[bucket % len(lanes)][bucket // len(lanes)] for bucket in range(len(self._plan.buckets)))

    def _send_lane(
        self,
        peers: list[Connection],
        filler: PlannedTensors,
        windows: list[tuple[int, Window]],
        places: list[tuple[int, int]],
    ) -> None:
        """Send the windows of one lane, in order, to all receivers."""
        in_slots: deque[tuple[int, Window]] = deque()
        for index, window in windows:
            _, slot = places[index]
            if in_slots and slot == places[in_slots[0][0]][1]:
                self._collect_loaded(peers, *in_slots.popleft())
            filler.fill(window, self._slots.slot(slot))
            self._slots.flush()
            for peer in peers:
                peer.send(Filled(index))
            in_slots.append((index, window))
        for each in in_slots:
            self._collect_loaded(peers, *each)

    def _settle(self, sent: WeightProof) -> list[WeightProof]:
        for peer in self._peers:
            peer.send(End(sent))
        proofs = _collect(self._peers, Proof, "to prove what it holds")
        for peer in self._peers:
            compare_proofs(self._plan, sent, proofs[peer].held, peer.peer)
        for peer in self._peers:
            peer.send(Accepted())
        return [proofs[peer].held for peer in self._peers]

    def _collect_loaded(self, peers: list[Connection], index: int, window: Window) -> None:
        what = f"to load bucket {window.bucket} of {len(self._plan.buckets)}"
        for peer, loaded in _collect(peers, Loaded, what).items():
            if loaded.window != index:
                raise WeightSyncError(f"{peer.peer} loaded window {loaded.window} where {index} was due, {what}")


class _Lane:
    """The sender's end of a lane.

    Args:
        index: of the lane.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.peers: list[Connection] = []

    def connect(self, principal: Connection) -> None:
        """Give a receiver its end."""
        ours, theirs = socket.socketpair()
        self.peers.append(Connection(ours, principal.peer, principal.deadline, principal))
        with theirs:
            principal.send_descriptor(theirs.fileno())

    def break_off(self) -> None:
        """End all waits."""
        for peer in self.peers:
            peer.break_off()

    def close(self) -> None:
        """Hang up."""
        for peer in self.peers:
            peer.close()


def _stay(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether all tensors can be held at once at no cost: a collection keeps them anyway, and none must be copied."""
    return isinstance(tensors, Collection) and all(tensor.is_contiguous() for _, tensor in tensors)


def _break_off(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.break_off()


def _collect(peers: list[Connection], kind: type[M], what: str) -> dict[Connection, M]:
    """Take one message from every receiver, in whatever order they come."""
    if len(peers) == 1:  # the common case, at a third of the cost
        try:
            return {peers[0]: peers[0].receive(kind, what.removeprefix("to "))}
        except DeadlineError:
            raise peers[0].deadline.missed(f"{peers[0].peer} {what}") from None
    messages: dict[Connection, M] = {}
    deadline = peers[0].deadline
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
        while len(messages) < len(peers):
            missing = ", ".join(peer.peer for peer in peers if peer not in messages)
            with deadline.declared(missing):
                ready = selector.select(deadline.left_s())
            if not ready:
                raise deadline.missed(f"{missing} {what}")
            for key, _ in ready:
                selector.unregister(key.fileobj)
                messages[key.data] = key.data.receive(kind, what.removeprefix("to "))
    return messages
