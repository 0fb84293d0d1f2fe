"""The trainer's tensors into windows of buckets: checked, converted, copied, and hashed while they are in the cache."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch
import xxhash
from torch import Tensor

from offbeat_types import TensorSpec, WeightSyncError
from offbeat_weightsync._plan import BucketPlan, Piece
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes, torch_dtype
from offbeat_weightsync._windows import Window

CHUNK_BYTES: Final = 512 << 10
"""Copied, then hashed: short enough for what was read and what was written to be in the cache of the core (L2). Without
a hash, too, runs of 512 KiB are copied faster than longer ones."""


Copies = list[tuple[Bytes, Bytes]]
"""(target, source) of runs that are copied one after the other."""


def cut_copies(target: Bytes, target_offset: int, source: Bytes, source_offset: int, num_bytes: int) -> Copies:
    """A copy of so many bytes, cut into runs that fit into the cache."""
    target = target[target_offset : target_offset + num_bytes]
    source = source[source_offset : source_offset + num_bytes]
    starts = range(0, num_bytes, CHUNK_BYTES)
    return [(target[start : start + CHUNK_BYTES], source[start : start + CHUNK_BYTES]) for start in starts]


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
        self._held: list[tuple[Tensor | None, Bytes | None]] | None = None
        self._index = -1
        self._scratch: Tensor | None = None
        self._flat: Tensor | None = None
        self._bytes: Bytes | None = None

    def plan_copies(self, window: Window, memory: Tensor) -> Copies | None:
        """What `fill` has to copy into that memory, from tensors that are all held; None: that shows when it fills.

        Made before the first byte moves: once the caches are full of weights, Python's steps are many times dearer.
        """
        if self._held is None or not memory.is_cpu:
            return None
        room, copies = memory.numpy(), Copies()
        for piece in window.pieces:
            held = self._held[piece.tensor][1]
            if held is None:
                return None
            copies += cut_copies(room, piece.bucket_offset, held, piece.tensor_offset, piece.num_bytes)
        return copies

    def fill(self, window: Window, memory: Tensor, copies: Copies | None = None) -> None:
        """Copy the pieces of a window into memory, and hash what lies there then.

        Args:
            window: its layout; windows are filled in order.
            memory: [bytes] uint8 on any device, at least `window.num_bytes` long.
            copies: from `plan_copies` for this window and memory.

        Raises:
            WeightSyncError: the tensor that is due is missing, or another came.
        """
        if copies is not None:
            update = self._hasher.update
            for place, run in copies:
                np.copyto(place, run)
                update(place.data)
            self._end(window)
            return
        room = memory.numpy() if memory.is_cpu else None
        for piece in window.pieces:
            source = self._require(piece)
            for offset in range(0, piece.num_bytes, CHUNK_BYTES):
                end = min(offset + CHUNK_BYTES, piece.num_bytes)
                first, last = piece.bucket_offset + offset, piece.bucket_offset + end
                if room is not None and source is not None:  # nothing to convert, and no tensors made on the way
                    target = room[first:last]
                    np.copyto(target, source[piece.tensor_offset + offset : piece.tensor_offset + end])
                else:
                    self._convert(piece.tensor_offset + offset, memory[first:last])
                    target = room[first:last] if room is not None else tensor_bytes(memory[first:last])
                self._hasher.update(target.data)  # what has arrived, not what was sent off
        self._end(window)

    def read(self, window: Window) -> Iterator[memoryview]:
        """Hash the pieces of a window, and give their bytes in runs; each is valid until the next is asked for.

        Args:
            window: its layout; windows are read in order.

        Raises:
            WeightSyncError: the tensor that is due is missing, or another came.
        """
        for piece in window.pieces:
            source = self._require(piece)
            for offset in range(piece.tensor_offset, piece.tensor_offset + piece.num_bytes, CHUNK_BYTES):
                end = min(offset + CHUNK_BYTES, piece.tensor_offset + piece.num_bytes)
                run = source[offset:end].data if source is not None else self._converted(offset, end - offset)
                self._hasher.update(run)
                yield run
        self._end(window)

    def _end(self, window: Window) -> None:
        if window.is_last:
            self._checksums.append(self._hasher.hexdigest())
            self._hasher.reset()

    def _require(self, piece: Piece) -> Bytes | None:
        """Make its tensor the present one, and give its bytes, if they are what travels."""
        if piece.tensor != self._index:
            self._take(piece.tensor)
        return self._bytes

    def _convert(self, offset: int, target: Tensor) -> None:
        """Copy so many bytes of the present tensor, in the dtype planned for it."""
        if self._bytes is not None:  # into memory of a device
            target.copy_(torch.from_numpy(self._bytes[offset : offset + len(target)]))
            return
        assert self._flat is not None
        elements = target.view(torch_dtype(self._specs[self._index].dtype))
        first = offset // elements.element_size()
        elements.copy_(self._flat[first : first + elements.numel()])

    def _converted(self, offset: int, num_bytes: int) -> memoryview:
        """The same, in memory of our own."""
        if self._scratch is None:
            self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        target = self._scratch[:num_bytes]
        self._convert(offset, target)
        return target.numpy().data

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
        self._index = index
        if tensor.is_cpu and tensor.dtype is torch_dtype(spec.dtype):
            self._bytes = tensor_bytes(tensor)
        else:
            self._flat = tensor.detach().reshape(-1)


def _describe_surplus(name: str, sent: Iterable[TensorSpec]) -> str:
    if any(spec.name == name for spec in sent):
        return "it was sent already: the name comes twice"
    return "names and order must be those of the plan"
