"""Memory that this process and the engine's workers share, and that no file system knows.

Workers of vLLM may be child processes of a child process, started by vLLM, so a descriptor cannot be handed down to
them. They open it through /proc, where the memory is gone when the last process that has it mapped is gone, however it
went. In one process it is the same memory.
"""

import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Final

from offbeat_types import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 64
PROC: Final = "/proc"


class Arena:
    """Bytes that both sides see. Made by `create` in this process, and by `attach` in a worker.

    Args:
        descriptor: an open file that holds the memory.
        num_bytes: its size.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> "Arena":
        """Take memory, zeroed.

        Raises:
            WeightSyncError: there is not enough.
        """
        try:
            descriptor = _anonymous_file()
            os.truncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            raise WeightSyncError(f"no {num_bytes} bytes of shared memory for a weight update ({error})") from error

    @property
    def address(self) -> str:
        """Where another process of this user opens it."""
        return f"{PROC}/{os.getpid()}/fd/{self.descriptor}"

    @classmethod
    def attach(cls, address: str, num_bytes: int) -> "Arena":
        """Open what another process has made."""
        return cls(os.open(address, os.O_RDWR), num_bytes)

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> "Tensor":
        """A view of the memory at `offset`, of a dtype named as torch names it."""
        import torch

        number_format: torch.dtype = getattr(torch, dtype)
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=number_format)
        return torch.frombuffer(self._map, dtype=number_format, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Give the memory back, when the last view of it has gone."""
        os.close(self.descriptor)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat-rollout-vllm")
    descriptor, path = tempfile.mkstemp(prefix="offbeat-rollout-vllm-")
    os.unlink(path)
    return descriptor


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
