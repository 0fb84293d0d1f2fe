"""The rollout engine's side of a transport between processes: what comes over a connection, and out of a kept copy."""

import numpy as np

from offbeat_core import WeightProof, WeightSyncError
from offbeat_weightsync._changes import WeightCopy, apply_bucket
from offbeat_weightsync._connection import Accepted, Changes, Connection, End, Proof
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._stream import ArrivingStream, Room, Runs


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
            changes = self._connection.receive(Changes, self._bucket(index))
            if not 0 <= changes.num_bytes <= bucket.num_bytes:
                raise WeightSyncError(f"{changes.num_bytes} bytes of changes came for {self._bucket(index)}")
            data = np.empty(changes.num_bytes, np.uint8)
            self._connection.receive_data(data.data, f"the changes in {self._bucket(index)}")
            apply_bucket(bucket, changes.runs, data, copy)
        return self._end()

    def take_all(self, copy: WeightCopy) -> WeightProof:
        """Fill the copy, and return what it should be now."""
        self.load(copy.tensor)
        assert self._sent is not None
        return self._sent

    def _end(self) -> WeightProof:
        return self._connection.receive(End, "the end of the weights").sent

    def _notify(self, proof: WeightProof) -> None:
        self._connection.send(Proof(proof))
        self._connection.receive(Accepted, "the sender's answer to the proof")

    def _bucket(self, index: int) -> str:
        return f"bucket {index} of {len(self.plan.buckets)}"


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

    def _notify(self, proof: WeightProof) -> None:
        self._incoming.confirm(proof)
        self._copy.finish(proof)
