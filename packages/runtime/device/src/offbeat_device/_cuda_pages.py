"""Addresses of a GPU that outlive the memory behind them, by the driver's management of virtual memory.

Source: CUDA driver API, "Virtual Memory Management", and cuda.h of CUDA 12.9 for signatures, structures and numbers.
torch (c10/cuda/CUDACachingAllocator.cpp, `ExpandableSegment`) and vLLM (csrc/cumem_allocator.cpp) call the driver in
the same order.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final

import torch

from offbeat_core import OffbeatError
from offbeat_device._device import Device

LIBRARY: Final = "libcuda.so.1"
PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM_GRANULARITY: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY
HAS_VIRTUAL_MEMORY: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED

mapped_bytes: Final = Counter[int]()
"""Bytes of each GPU, by its index, that lie behind such addresses now: torch's allocator does not know of them."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """`allocFlags` of CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_: ClassVar = [("location", Location), ("flags", ctypes.c_int)]


_address, _handle, _flags = ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_ulonglong
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemAddressFree": (_address, ctypes.c_size_t),
    "cuMemAddressReserve": (ctypes.POINTER(_address), ctypes.c_size_t, ctypes.c_size_t, _address, _flags),
    "cuMemCreate": (ctypes.POINTER(_handle), ctypes.c_size_t, ctypes.POINTER(AllocationProperties), _flags),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(AllocationProperties),
        ctypes.c_int,
    ),
    "cuMemMap": (_address, ctypes.c_size_t, ctypes.c_size_t, _handle, _flags),
    "cuMemRelease": (_handle,),
    "cuMemSetAccess": (_address, ctypes.c_size_t, ctypes.POINTER(Access), ctypes.c_size_t),
    "cuMemUnmap": (_address, ctypes.c_size_t),
}
"""Arguments of the functions that are called, all of which return a CUresult, an int."""


class CudaDriver:
    """The functions of libcuda that are used here.

    Args:
        library: to load.

    Raises:
        OSError: it is not here.
        AttributeError: it is of a CUDA without virtual memory, before 10.2.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def try_call(self, function: str, *arguments: Any) -> int:
        """Return the CUresult: 0 for success."""
        result: int = getattr(self._library, function)(*arguments)
        return result

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            OffbeatError: it failed; with its name, and that and the number of the error.
        """
        if result := self.try_call(function, *arguments):
            raise OffbeatError(f"{function} failed with {self.name_of(result)} ({result}); see the CUDA driver API")

    def name_of(self, result: int) -> str:
        """Return the name of a CUresult, such as CUDA_ERROR_OUT_OF_MEMORY."""
        name = ctypes.c_char_p()
        failed = self.try_call("cuGetErrorName", result, ctypes.byref(name))
        return "an unknown error" if failed or name.value is None else name.value.decode()

    def has_virtual_memory(self, index: int) -> bool:
        """Return whether a GPU can be given addresses without memory."""
        found = ctypes.c_int()
        failed = self.try_call("cuDeviceGetAttribute", ctypes.byref(found), HAS_VIRTUAL_MEMORY, index)
        return not failed and bool(found.value)


class CudaPages:
    """See `StableMemory`. Its addresses are given back with this object.

    Args:
        driver: of the GPU.
        device: the GPU.
        num_bytes: at least 1.

    Raises:
        OffbeatError: the driver refuses.
    """

    def __init__(self, driver: CudaDriver, device: Device, num_bytes: int) -> None:
        self._driver, self._device, self._index = driver, device, device.torch_device.index or 0
        self._address, self._is_held = 0, False
        self._properties = AllocationProperties(type=PINNED, location=Location(ON_DEVICE, self._index))
        granularity = ctypes.c_size_t()
        driver.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            MINIMUM_GRANULARITY,
        )
        self._num_bytes = -(-num_bytes // granularity.value) * granularity.value
        address = ctypes.c_ulonglong()
        driver.call("cuMemAddressReserve", ctypes.byref(address), self._num_bytes, 0, 0, 0)
        self._address = address.value
        # torch's public ways ask the driver for the device of an address, which has none without memory.
        storage: Any = torch._C._construct_storage_from_data_pointer(self._address, device.torch_device, num_bytes)
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(storage)

    def __del__(self) -> None:
        # Not by `weakref.finalize`: addresses go after the memory behind them. Errors are those of a driver that has
        # ended before this process.
        if self._is_held:
            with suppress(RuntimeError):
                self._device.synchronize()
            self._unmap(self._driver.try_call)
        if self._address:
            self._driver.try_call("cuMemAddressFree", self._address, self._num_bytes)

    def restore(self) -> None:
        if self._is_held:
            return
        handle = self._create()
        try:
            self._driver.call("cuMemMap", self._address, self._num_bytes, 0, handle, 0)
        finally:  # what is mapped lives until it is unmapped
            self._driver.call("cuMemRelease", handle)
        self._is_held = True
        mapped_bytes[self._index] += self._num_bytes
        access = Access(Location(ON_DEVICE, self._index), READ_AND_WRITE)
        self._driver.call("cuMemSetAccess", self._address, self._num_bytes, ctypes.byref(access), 1)
        self.tensor.zero_()

    def release(self) -> None:
        if self._is_held:
            self._device.synchronize()
            self._unmap(self._driver.call)

    def _unmap(self, call: Callable[..., Any]) -> None:
        self._is_held = False
        mapped_bytes[self._index] -= self._num_bytes
        call("cuMemUnmap", self._address, self._num_bytes)

    def _create(self) -> int:
        """Return a handle of memory without addresses."""
        handle = ctypes.c_ulonglong()
        arguments = (ctypes.byref(handle), self._num_bytes, ctypes.byref(self._properties), 0)
        result = self._driver.try_call("cuMemCreate", *arguments)
        if result == OUT_OF_MEMORY:  # torch's allocator may keep what would do
            self._device.release_unused()
            result = self._driver.try_call("cuMemCreate", *arguments)
        if result:
            raise OffbeatError(
                f"cuMemCreate of {self._num_bytes / 2**30:.2f} GiB failed with {self._driver.name_of(result)} "
                f"({result}), and device {self._index} has {self._device.memory().free_bytes / 2**30:.2f} GiB free; "
                "let other processes hold less of it, or this one need less"
            )
        return handle.value
