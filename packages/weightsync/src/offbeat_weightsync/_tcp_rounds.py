"""One sync over TCP: the bytes go from the trainer's tensors to the engine's, with no copy of ours between."""

from offbeat_weightsync._connections import Connection
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._lanes import ANY_CPU, LANE_WINDOW_BYTES
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Lane, Round
from offbeat_weightsync._windows import Window


class TcpRound(Round):
    """See `Round`.

    Args:
        peers: the receivers, at least one.
        plan: what is sent to them.
        lanes: to each receiver, the connections it has opened for its lanes.
        kept: digest of what is not sent because they hold it; "" when all is sent.
    """

    def __init__(
        self, peers: list[Connection], plan: BucketPlan, lanes: list[list[Connection]], kept: str = ""
    ) -> None:
        super().__init__(peers, plan, kept)
        self._connections = lanes

    @property
    def _window_bytes(self) -> int:
        return min(LANE_WINDOW_BYTES, self._plan.bucket_bytes)

    def _open_lanes(self, many: bool) -> list[Lane]:
        """As many as every receiver has opened, where the plan has buckets for them."""
        num_lanes = min(len(self._plan.buckets), *map(len, self._connections)) if many else 1
        return [Lane(index, ANY_CPU, [each[index] for each in self._connections]) for index in range(num_lanes)]

    def _introduce(self, lanes: list[Lane]) -> None:
        hello = self._hello(0, lanes)
        for peer in self._peers:
            peer.send(hello)

    def _send_lane(self, lane: Lane, filler: PlannedTensors, windows: list[tuple[int, Window]]) -> None:
        for _, window in windows:
            for principal in self._peers:
                principal.raise_if_spoken()  # the kernel would take the bytes all the same
            for run in filler.read(window):
                for peer in lane.peers:
                    peer.send_bytes(run)
