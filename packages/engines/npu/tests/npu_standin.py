"""A stand-in for an NPU: a device of torch's own, on the PrivateUse1 key, under the name that the real one has.

`install` gives this process `torch.npu` with the functions of torch_npu that this package calls (held to the recorded
interface by test_npu_contract.py), and the backend "hccl", which is gloo on the same memory.
"""

import importlib.util
import sys
from collections import Counter
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from offbeat_npu import REFERENCE, Operators, _runtime

SOURCE = Path(__file__).parent / "standin" / "standin.cpp"
TOTAL_BYTES = 1 << 30


def build(folder):
    """Compile the stand-in, about 15 s of one core; the path of the module."""
    from torch.utils.cpp_extension import load

    load("standin", [str(SOURCE)], extra_cflags=["-O0", "-w"], build_directory=str(folder), is_python_module=True)
    return folder / "standin.so"


class Stream:
    """Everything has happened by the time it returns, so streams have nothing to order."""

    def __init__(self, *_, **__):
        self.device = torch.device("npu", 0)

    def wait_stream(self, _):
        """Nothing to wait for."""

    def wait_event(self, _):
        """Nothing to wait for."""

    def record_event(self, event=None):
        return event or Stream()

    def record(self, *_):
        """Nothing to mark."""

    def synchronize(self):
        """Nothing to wait for."""

    def wait(self, *_):
        """Nothing to wait for."""

    def query(self):
        return True


def runtime(native):
    """The functions and classes of torch.npu, over the native module."""

    def index(device=None):
        if device is None:
            return native.current_device()
        if isinstance(device, int):
            return device
        number = torch.device(device).index
        return native.current_device() if number is None else number

    @contextmanager
    def stream(stream):
        yield stream

    return {
        "Event": Stream,
        "Stream": Stream,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: native.current_device(),
        "current_stream": lambda device=None: Stream(),
        "device_count": lambda: native.num_devices(),
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device="npu": native.rng_state(index(device)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed_all": lambda seed: [native.seed(each, seed) for each in range(native.num_devices())],
        "max_memory_allocated": lambda device=None: native.peak_bytes(index(device)),
        "mem_get_info": lambda device=None: (TOTAL_BYTES - native.held_bytes(index(device)), TOTAL_BYTES),
        "memory_allocated": lambda device=None: native.held_bytes(index(device)),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index(device)),
        "set_device": lambda device: native.set_device(index(device)),
        "set_rng_state": lambda new_state, device="npu": native.set_rng_state(index(device), new_state),
        "stream": stream,
        "synchronize": lambda device=None: None,
    }


class Profile:
    """torch_npu's profiler by torch's own, which shows the device's operators as the CPU dispatches them."""

    def __init__(self, *, activities=None):
        assert list(activities) == ["CPU", "NPU"]
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self):
        self._profile.start()

    def stop(self):
        self._profile.stop()

    def export_chrome_trace(self, output_path):
        self._profile.export_chrome_trace(output_path)


def operators():
    """A module torch_npu with the operators that the device puts into models, each counted in `calls`."""
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)  # transformers asks whether there is one
    module.calls = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            module.calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in Operators.__dataclass_fields__:
        setattr(module, name, counted(name, getattr(REFERENCE, name)))
    module.profiler = SimpleNamespace(ProfilerActivity=SimpleNamespace(CPU="CPU", NPU="NPU"), profile=Profile)
    return module


def write_plugin(folder, library):
    """A package torch_npu for processes that have `folder` on their path: a plugin of torch, as the real one is.

    Args:
        folder: of packages; made.
        library: what `build` gave.
    """
    folder.mkdir()
    (folder / "torch_npu.py").write_text(f"import npu_standin\n\nnpu_standin.install({str(library)!r})\n")
    installed = folder / "torch_npu-2.13.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:calls.copy\n")


def install(library):
    """Make the device known to torch in this process; once.

    Args:
        library: what `build` gave.
    """
    if hasattr(torch, "npu"):
        return
    torch.utils.rename_privateuse1_backend("npu")
    spec = importlib.util.spec_from_file_location("standin", library)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch._register_device_module("npu", SimpleNamespace(**runtime(native)))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    sys.modules["torch_npu"] = operators()
    _runtime._import_runtime.cache_clear()  # another test may have looked for it in vain

    def collectives(store, rank, size, timeout):
        return native.collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend("hccl", collectives, devices=["npu"])
