"""Two bucket slots in memory that processes share and that no file system knows."""

import mmap
import os
import tempfile
from typing import Final, Protocol

import torch
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync._cuda_ipc import CudaHandle, CudaSlots
from offbeat_weightsync._plan import ALIGNMENT, BucketPlan

NUM_SLOTS: Final = 2
_PAGE_BYTES: Final = mmap.PAGESIZE


class SharedSlots(Protocol):
    """Slots as the sender has them, in host or device memory."""

    slot_bytes: int
    descriptor: int

    def of_bucket(self, bucket: int) -> Tensor:
        """The slot in which a bucket travels, as [slot_bytes] uint8."""
        ...

    def flush(self) -> None:
        """Return when what was copied into it can be seen by other processes."""
        ...

    def device_handle(self) -> CudaHandle | None:
        """How a receiver opens device memory; None: it gets the descriptor of host memory instead."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class HostSlots:
    """The sender's slots in an anonymous file of its own.

    Args:
        slot_bytes: size of each.

    Raises:
        WeightSyncError: there is not enough memory.
    """

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.descriptor = create_memory(slot_bytes)
        self._opened = OpenedSlots(self.descriptor, slot_bytes, writable=True)

    def of_bucket(self, bucket: int) -> Tensor:
        """See `SharedSlots`."""
        return self._opened.of_bucket(bucket)

    def flush(self) -> None:
        """Memory of the host is seen at once."""

    def device_handle(self) -> None:
        """There is none."""

    def close(self) -> None:
        """See `SharedSlots`."""
        os.close(self.descriptor)
        del self._opened


class OpenedSlots:
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

    def flush(self) -> None:
        """What is copied out of host memory is copied when the call returns."""


def open_slots(device: str | None, slot_bytes: int) -> SharedSlots:
    """The sender's slots: in host memory, or on a CUDA device."""
    return HostSlots(slot_bytes) if device is None else CudaSlots(torch.device(device), slot_bytes, NUM_SLOTS)


def slot_size(plan: BucketPlan) -> int:
    """Bytes of a slot, in whole pages: enough for every bucket of the plan, and of a plan of some of its tensors."""
    all_bytes = sum(-(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in plan.specs)
    return -(-min(plan.bucket_bytes, all_bytes) // _PAGE_BYTES) * _PAGE_BYTES


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
