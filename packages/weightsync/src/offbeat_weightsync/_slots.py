"""Two bucket slots in memory that processes share and that no file system knows."""

import mmap
import os
import tempfile
from typing import Final

import torch
from torch import Tensor

from offbeat_types import WeightSyncError

NUM_SLOTS: Final = 2
_PAGE_BYTES: Final = mmap.PAGESIZE


class Slots:
    """The slots, mapped. The memory goes when the last process that has it mapped goes, however it goes.

    Args:
        fd: open file that holds the slots; it may be closed afterwards.
        slot_bytes: size of each.
        writable: for the sender. What a receiver writes by mistake stays with it: it spoils its own proof, and no
            other engine's weights.
    """

    def __init__(self, fd: int, slot_bytes: int, *, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        memory = mmap.mmap(fd, NUM_SLOTS * slot_bytes, access=access)
        # The tensors hold the mapping; it is unmapped when the last of them is gone, never under a reader's feet.
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = [whole[index * slot_bytes : (index + 1) * slot_bytes] for index in range(NUM_SLOTS)]

    def of_bucket(self, bucket: int) -> Tensor:
        """The slot in which a bucket travels, as [slot_bytes] uint8."""
        return self._slots[bucket % NUM_SLOTS]


def slot_size(longest_bucket_bytes: int) -> int:
    """Bytes of a slot: whole pages."""
    return -(-longest_bucket_bytes // _PAGE_BYTES) * _PAGE_BYTES


def create_memory(slot_bytes: int) -> int:
    """Make an anonymous file for two slots, with its memory reserved, and return its descriptor.

    Raises:
        WeightSyncError: there is not enough memory.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("offbeat-weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, NUM_SLOTS * slot_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, NUM_SLOTS * slot_bytes)  # otherwise a full machine kills whoever writes first
    except OSError as error:
        os.close(fd)
        need = NUM_SLOTS * slot_bytes / 2**20
        raise WeightSyncError(f"weight sync needs {need:.0f} MiB of shared memory: {error.strerror}") from error
    return fd
