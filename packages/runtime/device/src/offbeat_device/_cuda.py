"""An NVIDIA GPU as a device; a ROCm build of torch answers to the same name."""

import ctypes
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import torch

from offbeat_device._cuda_pages import CudaDriver, CudaPages, mapped_bytes
from offbeat_device._device import AttendedTokens, DeviceMemory, profile_threads

_RECORDING: Final = threading.Lock()
"""torch records one graph of a process at a time."""


class CudaDevice:
    """One GPU, by its index among those visible to this process."""

    kind: ClassVar[str] = "cuda"
    preference: ClassVar[int] = 10
    # Source: Ray 2.60, ray/_private/accelerators/nvidia_gpu.py and amd_gpu.py.
    visible_variable: ClassVar[str] = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    collective_backend = "nccl"
    shapes_masks = False
    wide_products = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device(self.kind, index)
        ampere = torch.cuda.get_device_capability(index) >= (8, 0)  # has bfloat16 and flash attention
        self.autocast_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16) if ampere else (torch.float16,)
        self.packed_attention = "varlen" if ampere else "rows"

    @classmethod
    def count(cls) -> int:
        """Visible GPUs; 0 for a build of torch without CUDA."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def memory_of_smallest(cls) -> int:
        """Ask the driver's management library, as torch itself would make a context on each GPU."""
        try:
            return min(_memory_of_all(ctypes.CDLL("libnvidia-ml.so.1")), default=0)
        except OSError:
            return 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> DeviceMemory:
        """Return what tensors hold; of other users of the GPU only what they leave free.

        At the peak of torch's allocator as much stable memory is taken to be held as now.
        """
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        allocated_bytes = torch.cuda.memory_allocated(self.torch_device)
        stable_bytes = mapped_bytes[self.torch_device.index]
        return DeviceMemory(
            allocated_bytes=allocated_bytes + stable_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self.torch_device) + stable_bytes,
            total_bytes=torch.cuda.get_device_properties(self.torch_device).total_memory,
            free_bytes=free_bytes + torch.cuda.memory_reserved(self.torch_device) - allocated_bytes,
        )

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        """Register memory of its own: torch's pinned allocator rounds up to powers of two, and keeps what is freed."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.torch_device):
            error = runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) == 0:  # else it serves all the same, and slowly
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def reserve(self, num_bytes: int) -> CudaPages | None:
        """Return None for ROCm, whose driver has other names, and where driver or GPU know no virtual memory."""
        try:
            driver = None if torch.version.hip else CudaDriver()
        except (OSError, AttributeError):
            return None
        if driver is None or not driver.has_virtual_memory(self.torch_device.index):
            return None
        return CudaPages(driver, self, num_bytes)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        with torch.cuda.device(self.torch_device):
            copied = tensor.to("cpu", non_blocking=True, copy=True)  # torch pins what it copies to in this way
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> torch.Tensor:
            done.synchronize()
            return copied

        return wait

    def copy_lane(self) -> "StreamLane":
        return StreamLane(torch.cuda, self.torch_device)

    def work_graphs(self) -> "CudaGraphs":
        return CudaGraphs(self.torch_device)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def profiler(self) -> torch.profiler.profile:
        return profile_threads(torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    def adapt(self, model: torch.nn.Module) -> tuple[str, ...]:
        return ()

    def compiler_lacks(self) -> str:
        if find_spec("triton") is None:
            return "triton is not installed"
        compilers = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
        if not any(map(shutil.which, compilers)):
            return f"triton needs a C compiler, and there is no {' or '.join(compilers)} in PATH"
        return ""

    def masked_attention(self, tokens: AttendedTokens) -> None:
        """Return None: engines lay tokens out for torch's own kernels, which know causal sequences without a mask."""

    def prepare(self, library: str, settings: Mapping[str, Any]) -> None:
        """Nothing to patch."""


class _NvmlMemory(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _memory_of_all(nvml: Any) -> list[int]:
    """Bytes of memory of each GPU of this machine; none where the library does not answer, or one is cut into parts.

    Source: NVML API reference, nvmlDeviceGetMemoryInfo, nvmlDeviceGetMigMode; struct nvmlMemory_t.
    """
    if nvml.nvmlInit_v2():
        return []
    try:
        count, found = ctypes.c_uint(), list[int]()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _NvmlMemory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                return []
            is_cut, after_reset = ctypes.c_uint(), ctypes.c_uint()
            unknown = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(is_cut), ctypes.byref(after_reset))
            if not unknown and is_cut.value:  # processes see a part of it (MIG), whose size is not told here
                return []
            if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                return []
            found.append(int(memory.total))
        return found
    finally:
        nvml.nvmlShutdown()


class StreamLane:
    """A stream of its own for copies.

    Args:
        runtime: with streams and events: `torch.cuda`, or a plugin's module with the same names.
        device: with an index.
    """

    def __init__(self, runtime: Any, device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._stream = runtime.Stream(device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        runtime, device = self._runtime, self._device
        self._stream.wait_stream(runtime.current_stream(device))
        with runtime.stream(self._stream):
            to.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        return lambda: runtime.current_stream(device).wait_event(done)


class CudaGraphs:
    """CUDA graphs, recorded and run in the caller's thread.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `WorkGraphs`. Other threads of this process may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _RECORDING, torch.cuda.device(self._device), recording:
            work()

        def run() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return run


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of main memory to a device, after what is queued there and without waiting for it.

    A copy out of memory that is not page-locked waits on a GPU. torch keeps page-locked memory for the next time.

    Args:
        tensor: not to be written to afterwards; returned as it is where the device is the CPU.
        device: of this process.
    """
    if tensor.device == device:
        return tensor
    is_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    pinned = tensor.pin_memory() if is_cuda else tensor
    return pinned.to(device, non_blocking=True)
