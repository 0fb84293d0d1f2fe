"""One sync through slots of memory that sender and receivers share."""

import socket

from offbeat_types import WeightSyncError
from offbeat_weightsync._connections import Connection
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._lanes import ANY_CPU, LANE_WINDOW_BYTES, SLOTS_PER_LANE, choose_cpus
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Lane, Round, collect
from offbeat_weightsync._slots import HostSlots, SharedSlots
from offbeat_weightsync._windows import Window


class SharedMemoryRound(Round):
    """See `Round`.

    Args:
        peers: the receivers, at least one.
        plan: what is sent to them.
        slots: memory that they will map.
        kept: digest of what is not sent because they hold it; "" when all is sent.
    """

    def __init__(self, peers: list[Connection], plan: BucketPlan, slots: SharedSlots, kept: str = "") -> None:
        super().__init__(peers, plan, kept)
        self._slots, self._slots_per_lane = slots, slots.num_slots

    @property
    def _window_bytes(self) -> int:
        return self._slots.slot_bytes

    def _open_lanes(self, many: bool) -> list[Lane]:
        """Several, where there are cores, buckets and memory for that."""
        cpus = choose_cpus(len(self._plan.buckets)) if many else []
        if cpus and isinstance(self._slots, HostSlots):
            divided = self._slots.divided(SLOTS_PER_LANE * len(cpus), LANE_WINDOW_BYTES)
            if divided is not None:
                self._slots, self._slots_per_lane = divided, SLOTS_PER_LANE
                return [Lane(index, cpu) for index, cpu in enumerate(cpus)]
        return [Lane(0, ANY_CPU)]

    def _introduce(self, lanes: list[Lane]) -> None:
        hello = self._hello(self._slots.num_slots, lanes)
        for peer in self._peers:
            hello.cuda = self._slots.device_handle()
            peer.send(hello)
            if hello.cuda is None:
                peer.send_descriptor(self._slots.descriptor)
            for lane in lanes:
                ours, theirs = socket.socketpair()
                lane.peers.append(Connection(ours, peer.peer, peer.deadline, peer))
                with theirs:
                    peer.send_descriptor(theirs.fileno())

    def _send_lane(self, lane: Lane, filler: PlannedTensors, windows: list[tuple[int, Window]]) -> None:
        first, num_slots = lane.index * self._slots_per_lane, self._slots_per_lane
        slots = [self._slots.slot(first + turn % num_slots) for turn in range(len(windows))]
        copies = [filler.plan_copies(window, slot) for (_, window), slot in zip(windows, slots, strict=True)]
        for turn, (index, window) in enumerate(windows):
            if turn >= num_slots:
                self._await_loaded(lane, *windows[turn - num_slots])
            filler.fill(window, slots[turn], copies[turn])
            self._slots.flush()
            for peer in lane.peers:
                peer.signal(index)
        for each in windows[-num_slots:]:
            self._await_loaded(lane, *each)

    def _await_loaded(self, lane: Lane, index: int, window: Window) -> None:
        bucket = f"bucket {window.bucket} of {len(self._plan.buckets)}"
        for peer, loaded in collect(lane.peers, lambda peer: peer.receive_signal(bucket), f"to load {bucket}").items():
            if loaded != index:
                raise WeightSyncError(f"{peer.peer} loaded window {loaded} where {index} was due, in {bucket}")
