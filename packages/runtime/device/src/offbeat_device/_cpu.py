"""The CPU as a device."""

import ctypes
import mmap
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from offbeat_device._device import AttendedTokens, DeviceMemory, profile_threads

CLEAR_PEAK = "5"  # proc(5), /proc/pid/clear_refs: reset the peak resident set size


class CpuDevice:
    """All CPU cores given to this process, as one device."""

    kind: ClassVar[str] = "cpu"
    preference: ClassVar[int] = 0
    visible_variable: ClassVar[str] = ""
    collective_backend = "gloo"
    packed_attention = "split"
    shapes_masks = False
    wide_products = False
    autocast_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device(self.kind)

    @classmethod
    def count(cls) -> int:
        return 1

    @classmethod
    def memory_of_smallest(cls) -> int:
        """Return 0: what a process may take of main memory depends on the others."""
        return 0

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def memory(self) -> DeviceMemory:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        status = _proc_status()
        peak = status.get("VmHWM", _peak_since_start())
        return DeviceMemory(
            allocated_bytes=status.get("VmRSS", peak),
            peak_bytes=peak,
            total_bytes=total,
            free_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        )

    def reset_peak_memory(self) -> None:
        """Start the peak anew on Linux; elsewhere the peak stays that of the whole process."""
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            clear.write_text(CLEAR_PEAK)

    def release_unused(self) -> None:
        """Let the C library give free memory back to the system, where it is one that can be asked (glibc).

        It maps large blocks one by one and unmaps them when they are freed, but what it calls large grows up to 32 MiB
        with the blocks that are freed, so that much of a model may lie in its heap.

        Source: mallopt(3), M_MMAP_THRESHOLD; malloc_trim(3).
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> "HostPages | None":
        return HostPages(num_bytes) if sys.platform == "linux" else None  # elsewhere MADV_DONTNEED is a hint

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copied = tensor.clone()
        return lambda: copied

    def copy_lane(self) -> "HostLane":
        return HostLane()

    def work_graphs(self) -> None:
        """A CPU is done with each operator when it returns: nothing is gained by repeating them."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def profiler(self) -> torch.profiler.profile:
        return profile_threads(torch.profiler.ProfilerActivity.CPU)

    def adapt(self, model: torch.nn.Module) -> tuple[str, ...]:
        return ()

    def compiler_lacks(self) -> str:
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
        found = any(map(shutil.which, compilers))
        return "" if found else f"it needs a C++ compiler, and there is no {' or '.join(compilers)} in PATH"

    def masked_attention(self, tokens: AttendedTokens) -> None:
        """Return None: engines lay tokens out for torch's own kernels, which know causal sequences without a mask."""

    def prepare(self, library: str, settings: Mapping[str, Any]) -> None:
        """Nothing to patch."""


class HostLane:
    """Copies within main memory, each done at once."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        to.copy_(source)
        return lambda: None


class HostPages:
    """See `StableMemory`: pages without a file, which the system makes, zeroed, when they are first touched.

    Source: madvise(2), MADV_DONTNEED: after it a private anonymous mapping reads as zeros.

    Args:
        num_bytes: at least 1.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def restore(self) -> None:
        """Nothing: pages come when they are touched."""

    def release(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


def _proc_status() -> dict[str, int]:
    """Memory lines of /proc/self/status in bytes; empty where there is none."""
    path = Path("/proc/self/status")
    if not path.exists():
        return {}
    pairs = (line.split(":", 1) for line in path.read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if key in ("VmHWM", "VmRSS")}


def _peak_since_start() -> int:
    """Peak resident memory in bytes; ru_maxrss counts KiB, but bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
