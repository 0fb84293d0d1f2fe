"""The trainer's tensors into windows of buckets: checked, converted, copied, and hashed while they are in the cache."""

from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync._plan import BucketPlan, Piece, TensorSpec
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes, torch_dtype
from offbeat_weightsync._windows import Window

CHUNK_BYTES: Final = 1 << 20
"""Copied, then hashed: short enough to be still in the cache of its core."""


class PlannedTensors:
    """Takes tensors one by one from the trainer, checks them against the plan, and copies them into windows.

    Args:
        plan: names, order, shapes, and the dtypes in which they travel.
        tensors: (name, tensor) as planned; floating-point ones are converted on the way.
    """

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._plan, self._specs = plan, plan.specs
        self._tensors = iter(tensors)
        self._hasher = xxhash.xxh3_64()
        self._checksums: list[str] = []
        self._held: list[tuple[Tensor, Bytes | None]] | None = None
        self._index = -1
        self._flat: Tensor | None = None
        self._bytes: Bytes | None = None

    def fill(self, window: Window, memory: Tensor) -> None:
        """Copy the pieces of a window into memory, and hash what lies there then.

        Args:
            window: its layout; windows are filled in order.
            memory: [bytes] uint8 on any device, at least `window.num_bytes` long.

        Raises:
            WeightSyncError: the tensor that is due is missing, or another came.
        """
        room = memory.numpy() if memory.is_cpu else None
        for piece in window.pieces:
            self._require(piece)
            for done in range(0, piece.num_bytes, CHUNK_BYTES):
                start, end = piece.bucket_offset + done, piece.bucket_offset + min(piece.num_bytes, done + CHUNK_BYTES)
                offset = piece.tensor_offset + done
                if room is not None and self._bytes is not None:  # nothing to convert, and no tensors made on the way
                    np.copyto(room[start:end], self._bytes[offset : offset + end - start])
                else:
                    self._convert(offset, memory[start:end])
                # What has arrived is hashed, not what was sent off.
                self._hasher.update(room[start:end].data if room is not None else tensor_bytes(memory[start:end]).data)
        self._end(window)

    def _end(self, window: Window) -> None:
        if window.is_last:
            self._checksums.append(self._hasher.hexdigest())
            self._hasher.reset()

    def _require(self, piece: Piece) -> None:
        """Make its tensor the present one."""
        if piece.tensor != self._index:
            self._take(piece.tensor)

    def _convert(self, offset: int, target: Tensor) -> None:
        """Copy so many bytes of the present tensor, in the dtype planned for it."""
        assert self._flat is not None
        elements = target.view(torch_dtype(self._specs[self._index].dtype))
        first = offset // elements.element_size()
        elements.copy_(self._flat[first : first + elements.numel()])

    def finish(self) -> tuple[str, ...]:
        """The checksum of each bucket that was filled; WeightSyncError if there are more tensors than planned."""
        self._flat = self._bytes = None
        for name, _ in self._tensors:
            raise WeightSyncError(f"{name}: {_describe_surplus(name, self._specs)}")
        return tuple(self._checksums)

    def spread(self, num_lanes: int) -> list["PlannedTensors"]:
        """Take all tensors now, and give fillers that share them: each may fill windows of any bucket."""
        held = []
        for index in range(len(self._specs)):
            self._take(index)
            assert self._flat is not None
            held.append((self._flat, self._bytes))
        self.finish()
        lanes = [PlannedTensors(self._plan, ()) for _ in range(num_lanes)]
        for lane in lanes:
            lane._held = held
        return lanes

    def _take(self, index: int) -> None:
        if self._held is not None:
            self._index, (self._flat, self._bytes) = index, self._held[index]
            return
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
