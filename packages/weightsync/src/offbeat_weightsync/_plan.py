"""The bucket plan: which bytes of which tensor travel in which bucket. Pure; equal wherever it is computed."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from offbeat_types import TENSOR_DTYPES, TensorSpec, WeightSyncError

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


class Bucket(NamedTuple):
    """What travels together. `num_bytes` counts the gaps between pieces too."""

    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Tensors laid out in buckets, in order. Make one with `build`.

    Args:
        specs: the tensors, in the order in which they are sent.
        bucket_bytes: no bucket is longer.
        buckets: every byte of every tensor, once.
        digest: 16 hex digits; equal for equal plans, so two processes can tell that they agree.
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
        buckets = tuple(lay_out(((index, 0, spec.num_bytes) for index, spec in enumerate(specs)), bucket_bytes))
        return cls(specs, bucket_bytes, buckets, _digest(specs, bucket_bytes))

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


def lay_out(runs: Iterable[tuple[int, int, int]], room_bytes: int) -> list[Bucket]:
    """Place runs of bytes, each aligned, first come first placed; one that does not fit is split.

    Args:
        runs: (tensor, first byte within it, length).
        room_bytes: of a bucket, a multiple of 64.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def flush() -> None:
        nonlocal used
        if pieces:
            buckets.append(Bucket(tuple(pieces), pieces[-1].bucket_offset + pieces[-1].num_bytes))
        pieces.clear()
        used = 0

    for tensor, start, num_bytes in runs:
        if used + num_bytes > room_bytes:
            flush()
        done = 0
        while done < num_bytes:
            if used == room_bytes:
                flush()
            length = min(num_bytes - done, room_bytes - used)
            pieces.append(Piece(tensor, start + done, used, length))
            done += length
            used += -(-length // ALIGNMENT) * ALIGNMENT
    flush()
    return buckets


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
