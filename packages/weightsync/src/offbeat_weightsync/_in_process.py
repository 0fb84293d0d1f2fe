"""Weights for a receiver in the same process."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from offbeat_types import WeightProof
from offbeat_weightsync._places import find_target
from offbeat_weightsync._plan import DEFAULT_BUCKET_BYTES, BucketPlan
from offbeat_weightsync._proofs import compare_proofs, prove_tensors
from offbeat_weightsync._tensors import describe_tensors, torch_dtype


class InProcessStream:
    """A `WeightStream` over tensors at hand.

    Args:
        named_tensors: (name, tensor); names unique. The stream keeps the tensors, not copies of them.
        version: policy version.
        dtype: format handed out and proved for floating-point tensors, such as "bfloat16"; None keeps each one's own.
        bucket_bytes: the proof has one checksum per bucket.

    Raises:
        WeightSyncError: see `BucketPlan.build`.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        dtype: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        pairs = list(named_tensors)
        self.version = version
        self.plan = BucketPlan.build(describe_tensors(pairs, dtype), bucket_bytes)
        self._tensors = dict(pairs)
        self._specs = {spec.name: spec for spec in self.plan.specs}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in order."""
        for spec in self.plan.specs:
            yield spec.name, self._read(spec.name, torch_dtype(spec.dtype))

    def load(self, target: Callable[[str], Tensor]) -> None:
        """Write every tensor straight into the engine's own; see `ArrivingStream.load`."""
        for name, tensor in self:
            place = find_target(target, self._specs[name])
            place.copy_(tensor.reshape(place.shape))

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back and compare it with what was handed out.

        Raises:
            WeightSyncError: a tensor is missing or differs.
        """
        dtypes = {spec.name: torch_dtype(spec.dtype) for spec in self.plan.specs}
        sent = prove_tensors(self.plan, self.version, lambda name: self._read(name, dtypes[name]), "the trainer")
        held = prove_tensors(self.plan, self.version, read)
        compare_proofs(self.plan, sent, held, "the engine")
        return held

    def _read(self, name: str, dtype: Any) -> Tensor:
        return self._tensors[name].detach().to(dtype)
