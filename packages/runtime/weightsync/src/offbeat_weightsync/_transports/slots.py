"""Slots for buckets, in memory that processes share and that no file system knows: of the host, or of a CUDA device.

torch hands CUDA memory over by pickling; here the eight plain values that it would pickle travel as a message.
Source: torch/multiprocessing/reductions.py (reduce_tensor, rebuild_cuda_tensor) of torch 2.13: the order and meaning of
what `UntypedStorage._share_cuda_` returns and `UntypedStorage._new_shared_cuda` takes. A contract test holds us to it.
"""

import mmap
import os
import tempfile
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from offbeat_core import WeightSyncError
from offbeat_weightsync._connection import CudaHandle
from offbeat_weightsync._plan import ALIGNMENT, BucketPlan

NUM_SLOTS: Final = 2
"""One bucket is loaded while the other is filled."""


class SharedSlots:
    """The sender's slots, each for any bucket of the plan, or of a plan of some of its tensors.

    Host memory (`device` is None) is in the open file `descriptor`, and goes when the last process that has it mapped
    goes, however it goes.
    """

    def __init__(self, plan: BucketPlan, device: str | None) -> None:
        self.slot_bytes, self.descriptor = _longest_bucket_bytes(plan), -1
        if device is None:
            self.descriptor = _reserve_memory(NUM_SLOTS * self.slot_bytes)
            self._slots = open_slots(self.descriptor, self.slot_bytes, writable=True)
        else:
            self._slots = _device_slots(device, self.slot_bytes)

    def slot(self, index: int) -> Tensor:
        """[slot_bytes] uint8: where a bucket is filled."""
        return self._slots[index % NUM_SLOTS]

    def synchronize(self) -> None:
        """Return when what was copied in can be seen by other processes."""
        synchronize(self._slots[0])

    def device_handle(self) -> CudaHandle | None:
        """Return how one receiver opens device memory (torch counts the users of each handle).

        None: it is the host's.
        """
        if self._slots[0].is_cpu:
            return None
        storage: Any = self._slots[0].untyped_storage()
        values: list[Any] = [*storage._share_cuda_(), _uuid(self._slots[0].device.index)]
        return CudaHandle(*values)

    def close(self) -> None:
        self._slots = []
        if self.descriptor >= 0:
            os.close(self.descriptor)


def open_slots(fd: int, slot_bytes: int, *, writable: bool) -> list[Tensor]:
    """Map the slots in an open file, which may be closed afterwards.

    Only the sender writes them. What a receiver writes by mistake stays with it: it spoils its own proof, and no other
    engine's weights.
    """
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
    memory = mmap.mmap(fd, NUM_SLOTS * slot_bytes, access=access)
    # The tensors hold the mapping; it is unmapped when the last of them is gone, never under a reader's feet.
    return list(torch.frombuffer(memory, dtype=torch.uint8).view(NUM_SLOTS, slot_bytes))


def open_device_slots(handle: CudaHandle, slot_bytes: int) -> list[Tensor]:
    _require_cuda()
    here = {_uuid(index): index for index in range(torch.cuda.device_count())}
    if handle.uuid not in here:
        raise WeightSyncError(f"the weights lie on the GPU {handle.uuid}, which this process does not see")
    values = msgspec.structs.astuple(handle)[1:-1]
    storage: Any = torch.UntypedStorage._new_shared_cuda(here[handle.uuid], *values)
    return list(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(NUM_SLOTS, slot_bytes))


def synchronize(slot: Tensor) -> None:
    """Return when what was copied into a slot or out of it is there: other processes do not wait for our stream."""
    if not slot.is_cpu:
        torch.cuda.current_stream(slot.device).synchronize()


def _device_slots(device: str, slot_bytes: int) -> list[Tensor]:
    _require_cuda()
    try:
        return list(torch.empty(NUM_SLOTS, slot_bytes, dtype=torch.uint8, device=device))
    except RuntimeError as error:
        raise WeightSyncError(f"weight sync needs {NUM_SLOTS * slot_bytes} bytes on {device}: {error}") from error


def _longest_bucket_bytes(plan: BucketPlan) -> int:
    """No bucket of the plan is longer, nor of a plan of some of its tensors. In whole pages."""
    all_bytes = sum(-(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in plan.specs)
    return -(-min(plan.bucket_bytes, all_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve_memory(num_bytes: int) -> int:
    """Make an anonymous file with its memory reserved, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("offbeat-weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, num_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)  # otherwise a full machine kills the process that writes first
    except OSError as error:
        os.close(fd)
        raise WeightSyncError(
            f"weight sync needs {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror}"
        ) from error
    return fd


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise WeightSyncError("CUDA IPC needs a CUDA device, and there is none here; leave out `device`")
    initialize: Any = torch.cuda.init
    initialize()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
