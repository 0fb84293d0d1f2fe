"""One sync as the sender lives it, once its receivers are there."""

import selectors
from collections.abc import Iterable, Iterator

from torch import Tensor

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._connections import Connection, M
from offbeat_weightsync._filling import PlannedTensors
from offbeat_weightsync._messages import Accepted, End, Filled, Hello, Loaded, Proof, Ready
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs
from offbeat_weightsync._slots import NUM_SLOTS, SharedSlots


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

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> list[WeightProof]:
        """Send all, and return what each receiver has proved to hold.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes.
            DeadlineError: somebody did not map, load or prove in time.
        """
        self._introduce()
        checksums = tuple(self._send_buckets(tensors))
        return self._settle(WeightProof(version=version, num_tensors=len(self._plan.specs), checksums=checksums))

    def _introduce(self) -> None:
        plan = self._plan
        specs = [(spec.name, spec.dtype, spec.shape) for spec in plan.specs]
        for peer in self._peers:
            handle = self._slots.device_handle()
            peer.send(Hello(specs, plan.bucket_bytes, self._slots.slot_bytes, plan.digest, self._kept, handle))
            if handle is None:
                peer.send_descriptor(self._slots.descriptor)
        for answer in self._collect(Ready, "to map the memory").values():
            if answer.digest != plan.digest:
                raise WeightSyncError(f"the plans differ: {plan.digest} here, {answer.digest} at a receiver")

    def _send_buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Fill and announce bucket after bucket, and yield the checksum of each."""
        source = PlannedTensors(self._plan, tensors)
        num_buckets = len(self._plan.buckets)
        for index, bucket in enumerate(self._plan.buckets):
            if index >= NUM_SLOTS:
                self._collect_loaded(index - NUM_SLOTS)

            def announce(num_bytes: int, index: int = index) -> None:
                self._slots.flush()
                for peer in self._peers:
                    peer.send(Filled(index, num_bytes))

            yield source.fill(bucket, self._slots.of_bucket(index), announce)
        source.finish()
        for index in range(max(0, num_buckets - NUM_SLOTS), num_buckets):
            self._collect_loaded(index)

    def _settle(self, sent: WeightProof) -> list[WeightProof]:
        for peer in self._peers:
            peer.send(End(sent))
        proofs = self._collect(Proof, "to prove what it holds")
        for peer in self._peers:
            compare_proofs(self._plan, sent, proofs[peer].held, peer.peer)
        for peer in self._peers:
            peer.send(Accepted())
        return [proofs[peer].held for peer in self._peers]

    def _collect_loaded(self, bucket: int) -> None:
        what = f"to load bucket {bucket} of {len(self._plan.buckets)}"
        for peer, loaded in self._collect(Loaded, what).items():
            if loaded.bucket != bucket:
                raise WeightSyncError(f"{peer.peer} loaded bucket {loaded.bucket} where {bucket} was due")

    def _collect(self, kind: type[M], what: str) -> dict[Connection, M]:
        """Take one message from every receiver, in whatever order they come."""
        messages: dict[Connection, M] = {}
        peers, deadline = self._peers, self._peers[0].deadline
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
