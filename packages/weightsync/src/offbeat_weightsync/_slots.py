"""Slots for windows, in memory that processes share and that no file system knows."""

import copy
import mmap
import os
import tempfile
from typing import Final, Protocol

import torch
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync._cuda_ipc import CudaHandle, CudaSlots
from offbeat_weightsync._plan import ALIGNMENT, BucketPlan
from offbeat_weightsync._windows import WINDOW_BYTES

NUM_BUCKETS: Final = 2
"""In flight. In windows of less than a bucket there are more slots, but no more memory: what one core has just read is
written again late, for writing what another core still has in its cache can take five times as long."""

_PAGE_BYTES: Final = mmap.PAGESIZE


class SharedSlots(Protocol):
    """Slots as the sender has them, in host or device memory."""

    slot_bytes: int
    num_slots: int
    descriptor: int

    def slot(self, index: int) -> Tensor:
        """[slot_bytes] uint8."""
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
        slot_bytes: size of each, in whole pages.
        num_slots: how many.

    Raises:
        WeightSyncError: there is not enough memory.
    """

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self.descriptor = create_memory(num_slots * slot_bytes)
        self._opened = OpenedSlots(self.descriptor, slot_bytes, num_slots, writable=True)

    def slot(self, index: int) -> Tensor:
        """See `SharedSlots`."""
        return self._opened.slot(index)

    def divided(self, num_slots: int, most_bytes: int) -> "HostSlots | None":
        """The same memory as another number of slots, of so many bytes each at most; None: it is too short for that."""
        slot_bytes = min(most_bytes, self.num_slots * self.slot_bytes // num_slots // _PAGE_BYTES * _PAGE_BYTES)
        if not slot_bytes:
            return None
        divided = copy.copy(self)  # with the same mapping, whose pages are there already
        divided.slot_bytes, divided.num_slots = slot_bytes, num_slots
        divided._opened = self._opened.divided(slot_bytes, num_slots)
        return divided

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
        num_slots: how many.
        writable: for the sender. What a receiver writes by mistake stays with it: it spoils its own proof, and no
            other engine's weights.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int, *, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        memory = mmap.mmap(fd, num_slots * slot_bytes, access=access)
        # The tensors hold the mapping; it is unmapped when the last of them is gone, never under a reader's feet.
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = _split(self._whole, slot_bytes, num_slots)

    def divided(self, slot_bytes: int, num_slots: int) -> "OpenedSlots":
        """The same memory as other slots."""
        divided = copy.copy(self)
        divided._slots = _split(self._whole, slot_bytes, num_slots)
        return divided

    def slot(self, index: int) -> Tensor:
        """[slot_bytes] uint8."""
        return self._slots[index]

    def flush(self) -> None:
        """What is copied out of host memory is copied when the call returns."""


def _split(whole: Tensor, slot_bytes: int, num_slots: int) -> list[Tensor]:
    return [whole[index * slot_bytes : (index + 1) * slot_bytes] for index in range(num_slots)]


def open_slots(device: str | None, plan: BucketPlan) -> SharedSlots:
    """The sender's slots for a plan, or for one of some of its tensors: in host memory, or on a CUDA device."""
    if device is None:
        longest = _longest_bucket_bytes(plan)
        slot_bytes = min(longest, WINDOW_BYTES)
        return HostSlots(slot_bytes, NUM_BUCKETS * (longest // slot_bytes))
    return CudaSlots(torch.device(device), _longest_bucket_bytes(plan), NUM_BUCKETS)


def _longest_bucket_bytes(plan: BucketPlan) -> int:
    """No bucket of the plan is longer, nor of a plan of some of its tensors. In whole pages."""
    all_bytes = sum(-(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in plan.specs)
    return -(-min(plan.bucket_bytes, all_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def create_memory(num_bytes: int) -> int:
    """Make an anonymous file with its memory reserved, and return its descriptor.

    Raises:
        WeightSyncError: there is not enough memory.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("offbeat-weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, num_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)  # otherwise a full machine kills whoever writes first
    except OSError as error:
        os.close(fd)
        raise WeightSyncError(
            f"weight sync needs {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror}"
        ) from error
    return fd
