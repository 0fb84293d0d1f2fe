"""Two slots in the memory of a CUDA device, opened by other processes of the host through CUDA IPC.

torch hands such memory over by pickling; here the eight plain values that it would pickle travel as a message.
Source: torch/multiprocessing/reductions.py (reduce_tensor, rebuild_cuda_tensor) of torch 2.13: the order and meaning of
what `UntypedStorage._share_cuda_` returns and `UntypedStorage._new_shared_cuda` takes. A contract test holds us to it.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from offbeat_types import WeightSyncError


class CudaHandle(msgspec.Struct, frozen=True):
    """CUDA memory of another process, in the order in which torch gives and takes the values.

    Args:
        device: index at the sender; `uuid` says which it is here.
        handle: of the allocation that holds the memory.
        storage_bytes: length.
        offset_bytes: within the allocation.
        ref_counter: name of the file that counts the users.
        ref_counter_offset: within it.
        event: to wait for before the first use.
        event_sync_required: whether to.
        uuid: of the device, the same in every process.
    """

    device: int
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool
    uuid: str


class CudaSlots:
    """The sender's slots on a device.

    Args:
        device: such as cuda:0.
        slot_bytes: size of each.
        num_slots: how many.

    Raises:
        WeightSyncError: there is no such device, or not enough memory.
    """

    descriptor = -1

    def __init__(self, device: torch.device, slot_bytes: int, num_slots: int) -> None:
        _require_cuda()
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        try:
            self._whole = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise WeightSyncError(f"weight sync needs {num_slots * slot_bytes} bytes on {device}: {error}") from error
        self._slots = list(self._whole.view(num_slots, slot_bytes))

    def slot(self, index: int) -> Tensor:
        """[slot_bytes] uint8."""
        slot: Tensor = self._slots[index]
        return slot

    def flush(self) -> None:
        """Return when what was copied is there: other processes do not wait for this one's stream."""
        torch.cuda.current_stream(self._whole.device).synchronize()

    def device_handle(self) -> CudaHandle:
        """For one receiver: torch counts the users of each handle."""
        storage: Any = self._whole.untyped_storage()
        values: list[Any] = [*storage._share_cuda_(), _uuid(self._whole.device.index)]
        return CudaHandle(*values)

    def close(self) -> None:
        """Let go of the memory."""
        self._slots = []


class OpenedCudaSlots:
    """The receiver's view of them.

    Args:
        handle: from the sender.
        slot_bytes: size of each.

    Raises:
        WeightSyncError: this process does not see the device.
    """

    def __init__(self, handle: CudaHandle, slot_bytes: int) -> None:
        _require_cuda()
        here = {_uuid(index): index for index in range(torch.cuda.device_count())}
        if handle.uuid not in here:
            raise WeightSyncError(f"the weights lie on the GPU {handle.uuid}, which this process does not see")
        values = msgspec.structs.astuple(handle)[1:-1]
        storage: Any = torch.UntypedStorage._new_shared_cuda(here[handle.uuid], *values)
        self._whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._slots = list(self._whole.view(-1, slot_bytes))

    def slot(self, index: int) -> Tensor:
        """[slot_bytes] uint8."""
        slot: Tensor = self._slots[index]
        return slot

    def flush(self) -> None:
        """Return when what was copied out is there: the sender does not wait for this process's stream."""
        torch.cuda.current_stream(self._whole.device).synchronize()


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise WeightSyncError("CUDA IPC needs a CUDA device, and there is none here; leave out `device`")
    initialize: Any = torch.cuda.init
    initialize()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
