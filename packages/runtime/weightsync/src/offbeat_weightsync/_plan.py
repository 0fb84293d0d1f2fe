"""The bucket plan: which bytes of which tensor travel in which bucket. Pure; equal wherever it is computed."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from offbeat_core import TENSOR_DTYPES, TensorSpec, WeightSyncError

ALIGNMENT: Final = 64
"""Every piece starts at a multiple of this, so that any dtype can be viewed in place."""

DEFAULT_BUCKET_BYTES: Final = 32 << 20
"""Short enough for the cache between the copy in and the copy out, long enough that both sides seldom wait."""


class Piece(NamedTuple):
    """A run of bytes of one tensor within one bucket.

    Args:
        tensor: index of the tensor in `BucketPlan.specs`.
        tensor_offset: first byte within the tensor.
        bucket_offset: first byte within the bucket, a multiple of 64.
        num_bytes: length.
    """

    tensor: int
    tensor_offset: int
    bucket_offset: int
    num_bytes: int

    def cut(self, run_bytes: int) -> "Iterator[Piece]":
        """Return the same bytes in runs of at most so many."""
        for start in range(0, self.num_bytes, run_bytes):
            length = min(run_bytes, self.num_bytes - start)
            yield Piece(self.tensor, self.tensor_offset + start, self.bucket_offset + start, length)


class Bucket(NamedTuple):
    """Tensors and parts of tensors that travel together. `num_bytes` counts the gaps between pieces too."""

    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Tensors laid out in buckets, in order. Make one with `build`.

    Args:
        specs: the tensors, in the order in which they are sent.
        bucket_bytes: no bucket is longer.
        buckets: every byte of every tensor, once.
        digest: 16 hex digits; equal for equal plans, so two processes can check that they agree.
    """

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    digest: str

    @classmethod
    def build(cls, specs: Iterable[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> "BucketPlan":
        """Lay tensors out, first come first placed.

        A tensor that fits into a bucket lies in one bucket whole. A longer one starts a bucket, and is split.

        Args:
            specs: names unique, at least one element each.
            bucket_bytes: a multiple of 64, at least 64.

        Raises:
            WeightSyncError: no tensor, an empty one, a name that comes twice, an unknown dtype, a bad bucket size.
        """
        specs = tuple(specs)
        _check(specs, bucket_bytes)
        return cls(specs, bucket_bytes, _lay_out(specs, bucket_bytes), _digest(specs, bucket_bytes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together, without gaps."""
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def longest_bucket_bytes(self) -> int:
        """Memory that a transport needs per bucket in flight."""
        return max(bucket.num_bytes for bucket in self.buckets)


def _lay_out(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Place tensors, each aligned, first come first placed; one that does not fit is split."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def flush() -> None:
        nonlocal used
        if pieces:
            buckets.append(Bucket(tuple(pieces), pieces[-1].bucket_offset + pieces[-1].num_bytes))
        pieces.clear()
        used = 0

    for index, spec in enumerate(specs):
        if used + spec.num_bytes > bucket_bytes:
            flush()
        done = 0
        while done < spec.num_bytes:
            if used == bucket_bytes:
                flush()
            length = min(spec.num_bytes - done, bucket_bytes - used)
            pieces.append(Piece(index, done, used, length))
            done += length
            used += -(-length // ALIGNMENT) * ALIGNMENT
    flush()
    return tuple(buckets)


@lru_cache(maxsize=4)
def agreed_plan(specs: tuple[TensorSpec, ...], bucket_bytes: int, digest: str, sender: str) -> BucketPlan:
    """Return the plan of what a sender announces; the same comes with version after version."""
    plan = BucketPlan.build(specs, bucket_bytes)
    if plan.digest != digest:
        raise WeightSyncError(f"the plans differ: {digest} at {sender}, {plan.digest} here; same version?")
    return plan


def _check(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise WeightSyncError(f"bucket_bytes must be a multiple of {ALIGNMENT} above 0: got {bucket_bytes}")
    if not specs:
        raise WeightSyncError("a weight sync needs at least one tensor: the trainer named none")
    seen: set[str] = set()
    for spec in specs:
        if spec.dtype not in TENSOR_DTYPES:
            raise WeightSyncError(f"{spec.name}: dtype must be one of {', '.join(TENSOR_DTYPES)}: got {spec.dtype!r}")
        if any(size < 1 for size in spec.shape):
            raise WeightSyncError(f"{spec.name}: a tensor needs at least one element: got shape {spec.shape}")
        if spec.name in seen:
            raise WeightSyncError(f"{spec.name}: the name comes twice; send a tied tensor under each name once")
        seen.add(spec.name)


def _digest(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> str:
    text = json.dumps([bucket_bytes, ALIGNMENT, [[spec.name, spec.dtype, spec.shape] for spec in specs]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
