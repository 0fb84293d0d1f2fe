"""A stream from another process: in lanes, each with its connection, and proved to the sender."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import Tensor

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._arrivals import ArrivingStream
from offbeat_weightsync._connections import Connection, LaneLostError
from offbeat_weightsync._lanes import assign_lanes, run_lanes
from offbeat_weightsync._messages import Accepted, End, Hello, Proof
from offbeat_weightsync._places import Place, find_target
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._windows import cut_windows


class PeerStream(ArrivingStream):
    """A `WeightStream` from another process. Made by `receive`.

    Args:
        connection: to the sender.
        plan: what will come.
        version: policy version.
        hello: how it will come.
        lanes: their connections.
    """

    def __init__(
        self, connection: Connection, plan: BucketPlan, version: int, hello: Hello, lanes: list[Connection]
    ) -> None:
        super().__init__(plan, version, cut_windows(plan, hello.slot_bytes))
        self._connection, self._lanes, self._cpus = connection, lanes, hello.lanes
        homes = assign_lanes(plan, len(lanes))
        self._homes = [homes[window.bucket] for window in self._windows]
        self._confirmed = False

    def load(self, target: Callable[[str], Tensor]) -> None:
        """See `ArrivingStream.load`; the lanes load at once."""
        places = [Place(find_target(target, spec)) for spec in self.plan.specs]
        if not all(place.is_in_a_row for place in places):
            super().load(target)
            return
        self._begin()
        self._places = places
        own: list[list[int]] = [[] for _ in self._lanes]
        for index, lane in enumerate(self._homes):
            own[lane].append(index)
        bodies = [partial(self._load_lane, lane, indices, places) for lane, indices in enumerate(own)]
        try:
            run_lanes(bodies, self._cpus, self._break_off)
        except LaneLostError as error:
            raise error.reason() from error
        self._sent = self._end()

    def confirm(self, proof: WeightProof) -> None:
        """Send the engine's proof to the sender, and return when every receiver has proved the same.

        Raises:
            WeightSyncError: the sender refuses the proof, or another receiver failed.
            DeadlineError: no answer in time.
        """
        self._connection.send(Proof(proof))
        self._connection.receive(Accepted, "the sender's answer to the proof")
        self._confirmed = True

    def check_confirmed(self, name: str) -> None:
        """Raise WeightSyncError unless `confirm` has been called and has returned."""
        if not self._confirmed:
            raise WeightSyncError(f"{name} took the weights of version {self.version} but did not confirm them")

    def close(self) -> None:
        """Hang up, and hold on to nothing of the engine's: it may want to let go of its memory."""
        self._places = []
        for lane in self._lanes:
            lane.close()

    @abstractmethod
    def _arrive(self, lane: int, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """(number, memory) of these windows of a lane; whoever asks for the next has loaded the one before."""

    @abstractmethod
    def _load_lane(self, lane: int, indices: list[int], places: list[Place]) -> None:
        """Write these windows of a lane to where they belong."""

    def _write(self, index: int, memory: Tensor, places: list[Place]) -> None:
        for piece in self._windows[index].pieces:
            part = memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            places[piece.tensor].write(piece.tensor_offset, part)

    def _arrivals(self) -> Iterator[Tensor]:
        lanes = [self._arrive(lane, self._of(lane)) for lane in range(len(self._lanes))]
        try:
            for lane in self._homes:
                yield next(lanes[lane])[1]
            for each in lanes:
                next(each, None)  # what was loaded last has been loaded, too
        except LaneLostError as error:
            raise error.reason() from error

    def _of(self, lane: int) -> list[int]:
        return [index for index, home in enumerate(self._homes) if home == lane]

    def _end(self) -> WeightProof:
        return self._connection.receive(End, "the end of the weights").sent

    def _break_off(self) -> None:
        for lane in self._lanes:
            lane.break_off()

    def _bucket(self, index: int) -> str:
        """For errors: where a window belongs."""
        return f"bucket {self._windows[index].bucket} of {len(self.plan.buckets)}"
