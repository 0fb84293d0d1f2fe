"""Memory that is given back while its addresses stay: on the CPU, and a GPU's by calls to a driver that is made here.

The driver is a library of the same functions over the CPU's pages, compiled from the declarations of cuda.h, so that
arguments and structures pass through ctypes as they do to NVIDIA's.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat_core import OffbeatError
from offbeat_device import StableMemory, _cuda_pages, open_device
from offbeat_device._cpu import CpuDevice
from offbeat_device._cuda import CudaDevice
from offbeat_device._cuda_pages import SIGNATURES, CudaDriver, CudaPages

MIB = 2**20
PAGE = 4096
STATM = Path("/proc/self/statm")
on_linux = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")

# Source: cuda.h of nvidia-cuda-runtime-cu12 12.9.79: structures and functions as they are declared there.
DECLARATIONS = """
typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef enum { CU_MEM_ALLOCATION_TYPE_PINNED = 0x1, CU_MEM_ALLOCATION_TYPE_MAX = 0x7FFFFFFF } CUmemAllocationType;
typedef enum { CU_MEM_HANDLE_TYPE_NONE = 0x0, CU_MEM_HANDLE_TYPE_MAX = 0x7FFFFFFF } CUmemAllocationHandleType;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 0x1, CU_MEM_LOCATION_TYPE_MAX = 0x7FFFFFFF } CUmemLocationType;
typedef enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 0x3, CU_MEM_ACCESS_FLAGS_PROT_MAX = 0x7FFFFFFF } CUmemAccess_flags;
typedef enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0x0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 0x1 }
    CUmemAllocationGranularity_flags;
typedef struct CUmemLocation_st { CUmemLocationType type; int id; } CUmemLocation;
typedef struct CUmemAllocationProp_st {
    CUmemAllocationType type;
    CUmemAllocationHandleType requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
         unsigned char compressionType;
         unsigned char gpuDirectRDMACapable;
         unsigned short usage;
         unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc_st { CUmemLocation location; CUmemAccess_flags flags; } CUmemAccessDesc;
CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev);
CUresult cuGetErrorName(CUresult error, const char **pStr);
CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size);
CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags);
CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option);
CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count);
CUresult cuMemUnmap(CUdeviceptr ptr, size_t size);
"""  # noqa: E501 - as they are there

WIDE = ("size_t", "CUdeviceptr", "CUmemGenericAllocationHandle", "long")

# A handle is a file without a name, of the size that was asked for; `room` bytes are left, and each call is counted.
DRIVER = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
%s
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, GRANULARITY = 65536 };
size_t room = (size_t)1 << 40, reserved = 0;
int num_files = 0, sizes[2] = {sizeof(CUmemAllocationProp), sizeof(CUmemAccessDesc)};

CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    *pi = attrib == 102 && dev == 0;
    return 0;
}
CUresult cuGetErrorName(CUresult error, const char **pStr) {
    if (error != OUT_OF_MEMORY) return INVALID_VALUE;
    *pStr = "CUDA_ERROR_OUT_OF_MEMORY";
    return 0;
}
static int is_right(const CUmemAllocationProp *prop) {
    CUmemAllocationProp wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return !memcmp(prop, &wanted, sizeof wanted);
}
CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    *granularity = GRANULARITY;
    return is_right(prop) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? 0 : INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
    void *at = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (size %% GRANULARITY || alignment || addr || flags || at == MAP_FAILED) return INVALID_VALUE;
    *ptr = (CUdeviceptr)at;
    reserved += size;
    return 0;
}
CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    reserved -= size;
    return munmap((void *)ptr, size) ? INVALID_VALUE : 0;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    if (size > room) return OUT_OF_MEMORY;
    if (size %% GRANULARITY || !is_right(prop) || flags) return INVALID_VALUE;
    int file = memfd_create("pages", 0);
    if (file < 0 || ftruncate(file, size)) return INVALID_VALUE;
    num_files++;
    *handle = file;
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    num_files--;
    return close(handle) ? INVALID_VALUE : 0;
}
CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct stat found;
    if (offset || flags || fstat(handle, &found) || (size_t)found.st_size != size) return INVALID_VALUE;
    return mmap((void *)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0) == MAP_FAILED;
}
CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id) return INVALID_VALUE;
    if (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return INVALID_VALUE;
    if (mprotect((void *)ptr, size, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    memset((void *)ptr, 0xff, size);  /* what others have left */
    return 0;
}
CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    return mmap((void *)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED;
}
"""  # noqa: E501 - the declarations, as they are there


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not STATM.exists() or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER % DECLARATIONS)
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libcuda.so", folder / "driver.c"]
    subprocess.run(command, check=True)
    return str(folder / "libcuda.so")


class Gpu(CpuDevice):
    """A device whose memory the driver of this module hands out; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.released = 0

    def synchronize(self) -> None:
        self.waits += 1

    def release_unused(self) -> None:
        self.released += 1


@pytest.fixture(params=["cpu", "driver"])
def memory(request: pytest.FixtureRequest) -> Iterator[StableMemory]:
    if request.param == "driver":
        yield CudaPages(CudaDriver(request.getfixturevalue("library")), Gpu(), 64 * MIB)
    else:
        reserved = open_device("cpu").reserve(64 * MIB)
        assert reserved is not None
        yield reserved


def resident_bytes() -> int:
    return PAGE * int(STATM.read_text().split()[1])


@on_linux
def test_memory_goes_and_comes_while_its_addresses_stay(memory: StableMemory) -> None:
    tensor = memory.tensor
    numbers = tensor[MIB : 9 * MIB].view(torch.float32).view(-1, 4)
    address, start = numbers.data_ptr(), resident_bytes()
    for _ in range(2):
        for _ in range(2):  # the second time does nothing
            memory.restore()
        assert len(tensor) == 64 * MIB
        assert not tensor.any(), "zeros, whatever was there"
        tensor.fill_(7)
        numbers[3, 1] = 5.0
        held = resident_bytes()
        assert held - start > 60 * MIB
        for _ in range(2):
            memory.release()
        assert held - resident_bytes() > 60 * MIB
        assert (numbers.data_ptr(), memory.tensor.data_ptr()) == (address, tensor.data_ptr())


def test_the_driver_is_called_with_what_cuda_declares(library: str) -> None:
    """As many arguments of the same sizes, and structures of the same sizes."""
    declared = dict(
        line.removeprefix("CUresult ").removesuffix(");").split("(")
        for line in DECLARATIONS.splitlines()
        if line.startswith("CUresult ")
    )
    assert declared.keys() == SIGNATURES.keys()
    for name, arguments in declared.items():
        found = [("*" in each, each.split()[-2]) for each in arguments.split(", ")]
        sizes = [8 if is_pointer or kind in WIDE else 4 for is_pointer, kind in found]
        assert [ctypes.sizeof(each) for each in SIGNATURES[name]] == sizes, name
    sizes = (ctypes.c_int * 2).in_dll(ctypes.CDLL(library), "sizes")
    assert list(sizes) == [ctypes.sizeof(_cuda_pages.AllocationProperties), ctypes.sizeof(_cuda_pages.Access)]


def test_memory_that_is_let_go_is_given_back_with_its_addresses(library: str) -> None:
    counted, device = ctypes.CDLL(library), Gpu()
    reserved, num_files = ctypes.c_size_t.in_dll(counted, "reserved"), ctypes.c_int.in_dll(counted, "num_files")
    before, mapped = reserved.value, _cuda_pages.mapped_bytes[0]
    memory = CudaPages(CudaDriver(library), device, 100_000)
    assert len(memory.tensor) == 100_000
    assert reserved.value - before == 131_072, "in whole units of the driver"
    assert _cuda_pages.mapped_bytes[0] == mapped
    memory.restore()
    assert _cuda_pages.mapped_bytes[0] - mapped == 131_072
    assert num_files.value == 0, "what is mapped needs no handle"
    waits = device.waits
    memory.release()
    assert device.waits > waits, "work on it was only queued"
    memory.restore()
    del memory
    assert (reserved.value, _cuda_pages.mapped_bytes[0]) == (before, mapped)


def test_too_little_memory_is_an_error_with_what_is_asked_and_free(library: str) -> None:
    device = Gpu()
    memory = CudaPages(CudaDriver(library), device, 64 * MIB)
    room = ctypes.c_size_t.in_dll(ctypes.CDLL(library), "room")
    before, room.value = room.value, 32 * MIB
    try:
        with pytest.raises(
            OffbeatError,
            match=r"of 0\.06 GiB failed with CUDA_ERROR_OUT_OF_MEMORY \(2\), and device 0 has \d+\.\d+ GiB",
        ):
            memory.restore()
        assert device.released == 1, "torch's allocator may keep what would do"
    finally:
        room.value = before
    memory.restore()
    assert not memory.tensor.any()


def test_a_call_that_fails_is_named_with_its_error(library: str) -> None:
    driver = CudaDriver(library)
    with pytest.raises(OffbeatError, match=r"cuMemMap failed with an unknown error \(1\)"):
        driver.call("cuMemMap", 0, 1, 1, 0, 0)
    assert driver.has_virtual_memory(0)
    assert not driver.has_virtual_memory(1)


def test_a_machine_without_the_driver_has_no_stable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda_pages.ctypes, "CDLL", absent)
    assert CudaDevice.reserve(object.__new__(CudaDevice), 10) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_graph_that_was_recorded_before_works_when_the_memory_is_back() -> None:
    device = open_device("cuda:0")
    memory, graphs = device.reserve(64 * MIB), device.work_graphs()
    assert memory is not None
    assert graphs is not None
    memory.restore()
    numbers = memory.tensor.view(torch.float32)
    numbers.add_(1)
    run = graphs.record(lambda: numbers.add_(1))
    free_bytes = device.memory().free_bytes
    memory.release()
    assert device.memory().free_bytes - free_bytes >= 64 * MIB
    memory.restore()
    run()
    assert float(numbers.sum()) == numbers.numel()
