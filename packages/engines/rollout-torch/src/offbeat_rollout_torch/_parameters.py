"""Places of tensors: those of a model by name, and those of one piece of memory one behind the other."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor, empty

ALIGNMENT_BYTES: Final = 512
"""Between tensors of one piece of memory: as torch's allocator for CUDA has it (c10/cuda/CUDACachingAllocator.cpp,
kMinBlockSize), as kernels read whole lines."""


@dataclass(frozen=True)
class Parameter:
    """One Hugging Face tensor inside fused storage.

    Args:
        storage: returns the plain storage it lies in.
        rows: which rows of it.
        shape: under Hugging Face.
        rotary: head_dim when its rows are heads in pair order, else 0.
    """

    storage: Callable[[], Tensor]
    rows: slice
    shape: tuple[int, ...]
    rotary: int = 0

    def view(self) -> Tensor:
        """View of the storage whose elements run in Hugging Face order: [heads, 2, head_dim / 2, ...] or `shape`."""
        rows = self.storage()[self.rows]
        if not self.rotary:
            return rows
        return rows.view(-1, self.rotary // 2, 2, *self.shape[1:]).transpose(1, 2)


class Arena:
    """Hands out one piece of memory as tensors, one behind the other.

    Args:
        like: dtype and device.
        memory: [bytes] uint8; None: tensors have none, and are only counted.
    """

    def __init__(self, like: Tensor, memory: Tensor | None = None) -> None:
        self.dtype, self.num_bytes, self._memory = like.dtype, 0, memory

    def new_empty(self, *shape: int) -> Tensor:
        """Return the next tensor, with any values."""
        start, size = self.num_bytes, math.prod(shape) * self.dtype.itemsize
        self.num_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._memory is None:
            return empty(shape, dtype=self.dtype, device="meta")
        return self._memory[start : start + size].view(self.dtype).view(shape)
