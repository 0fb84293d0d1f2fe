"""The trainer's tensors into buckets: checked, converted, copied, and hashed while they are in the cache."""

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import xxhash
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync._plan import Bucket, BucketPlan, TensorSpec
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes, torch_dtype

CHUNK_BYTES: Final = 1 << 20
"""Copied, then hashed: short enough to be still in the cache of its core."""


HANDOVER_BYTES: Final = 4 << 20
"""A bucket is announced in parts of this size, so that loading it begins before it is full."""


class PlannedTensors:
    """Takes tensors one by one from the trainer, checks them against the plan, and copies them into buckets.

    Args:
        plan: names, order, shapes, and the dtypes in which they travel.
        tensors: (name, tensor) as planned; floating-point ones are converted on the way.
    """

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._specs = plan.specs
        self._tensors = iter(tensors)
        self._index = -1
        self._flat: Tensor | None = None
        self._bytes: Bytes | None = None

    def fill(self, bucket: Bucket, memory: Tensor, announce: Callable[[int], None] | None = None) -> str:
        """Copy the pieces of a bucket into memory, and return the checksum of what lies there then.

        Args:
            bucket: its layout; buckets are filled in the plan's order.
            memory: [bytes] uint8 on any device, at least `bucket.num_bytes` long.
            announce: told now and then, and at the end, how many bytes from the bucket's start are there.

        Raises:
            WeightSyncError: the tensor that is due is missing, or another came.
        """
        hasher = xxhash.xxh3_64()
        room = memory.numpy() if memory.is_cpu else None
        announced = 0
        for piece in bucket.pieces:
            if piece.tensor != self._index:
                self._take(piece.tensor)
            for done in range(0, piece.num_bytes, CHUNK_BYTES):
                start, end = piece.bucket_offset + done, piece.bucket_offset + min(piece.num_bytes, done + CHUNK_BYTES)
                offset = piece.tensor_offset + done
                if room is not None and self._bytes is not None:  # nothing to convert, and no tensors made on the way
                    np.copyto(room[start:end], self._bytes[offset : offset + end - start])
                else:
                    self._convert(offset, memory[start:end])
                # What has arrived is hashed, not what was sent off.
                hasher.update(room[start:end].data if room is not None else tensor_bytes(memory[start:end]).data)
                if announce is not None and (end - announced >= HANDOVER_BYTES or end == bucket.num_bytes):
                    announce(end)
                    announced = end
        return hasher.hexdigest()

    def _convert(self, offset: int, target: Tensor) -> None:
        """Copy so many bytes of the present tensor, in the dtype planned for it."""
        assert self._flat is not None
        elements = target.view(torch_dtype(self._specs[self._index].dtype))
        first = offset // elements.element_size()
        elements.copy_(self._flat[first : first + elements.numel()])

    def finish(self) -> None:
        """Raise WeightSyncError if there are more tensors than planned."""
        self._flat = self._bytes = None
        for name, _ in self._tensors:
            raise WeightSyncError(f"{name}: {_describe_surplus(name, self._specs)}")

    def _take(self, index: int) -> None:
        spec = self._specs[index]
        self._flat = self._bytes = None  # let a tensor made for us go before the next one is made
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"{spec.name}: planned, but the trainer's tensors ended before it")
        if name != spec.name:
            surplus = _describe_surplus(name, self._specs[:index])
            raise WeightSyncError(f"{name}: came where {spec.name} was planned; {surplus}")
        check_tensor(tensor, spec, "the trainer", dtype=False)
        self._index, self._flat = index, tensor.detach().reshape(-1)
        if tensor.is_cpu and tensor.dtype == torch_dtype(spec.dtype):
            self._bytes = tensor_bytes(self._flat)


def _describe_surplus(name: str, sent: Iterable[TensorSpec]) -> str:
    if any(spec.name == name for spec in sent):
        return "it was sent already: the name comes twice"
    return "names and order must be those of the plan"
