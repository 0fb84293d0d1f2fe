"""The device seam: what every kind of device answers, and how one is opened by name.

A kind of device is a class registered under the entry point `offbeat.device`; its name is the part before the colon
in "cuda:0". No other module of offbeat compares such names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from offbeat_types import ConfigError, installed_backends, load_backend

if TYPE_CHECKING:
    from offbeat_mesh._mesh import Mesh

DEVICE_GROUP = "offbeat.device"


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device as this process sees it.

    Args:
        allocated_bytes: held by this process now.
        peak_bytes: most held since the start or the last `reset_peak_memory`.
        total_bytes: what the device has.
    """

    allocated_bytes: int
    peak_bytes: int
    total_bytes: int


class Profiler(Protocol):
    """Records what this process and one of its devices do: torch's own, or one with its methods."""

    def start(self) -> None:
        """Record from here on."""
        ...

    def stop(self) -> None:
        """Record no further; in the thread that started it."""
        ...

    def export_chrome_trace(self, path: str) -> None:
        """Write what was recorded as JSON in Chrome's format; in any thread."""
        ...


class Device(Protocol):
    """One device of this process.

    Attributes:
        kind: the name it is registered under.
        preference: "auto" takes the available kind with the highest.
        visible_variable: environment variable that lists the devices a process is shown, each then known to it by its
            place in the list; "" for a kind that nothing hides.
        torch_device: where tensors go.
        collective_backend: torch.distributed's name of the backend that serves it.
        autocast_dtypes: formats that torch.autocast computes in on it.
        packed_attention: the kernel family that suits packed sequences here: "split" (flash calls joined by their
            log-sum-exps), "varlen" (variable-length flash attention), or "rows" (padded rows with a mask).
    """

    kind: ClassVar[str]
    preference: ClassVar[int]
    visible_variable: ClassVar[str]
    torch_device: torch.device
    collective_backend: str
    autocast_dtypes: tuple[torch.dtype, ...]
    packed_attention: str

    @classmethod
    def count(cls) -> int:
        """How many of this kind are here: 0 means not available. Never raises."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        ...

    def memory(self) -> DeviceMemory:
        """Memory now and at its peak."""
        ...

    def reset_peak_memory(self) -> None:
        """Start the peak anew, where the platform can."""
        ...

    def release_unused(self) -> None:
        """Give memory that is free, and only held to be used again, to whoever else wants it."""
        ...

    def rng_state(self) -> torch.Tensor:
        """State of its default random generator: [n] uint8 on the CPU."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set what `rng_state` gave."""
        ...

    def profiler(self) -> Profiler:
        """A new profiler of this device and, where the platform can, of all threads of this process."""
        ...

    def adapt(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Put the platform's own kernels in place of layers of a transformers model; what was replaced."""
        ...

    def prepare(self, library: str, settings: Mapping[str, Any]) -> None:
        """Make a library fit for this kind of device, before it is imported.

        Args:
            library: such as "megatron".
            settings: what it is going to be used with, in its own words.
        """
        ...


def available_devices() -> dict[str, int]:
    """Kinds of device that are here and how many of each, the one that "auto" takes first."""
    kinds = [load_backend(DEVICE_GROUP, name) for name in installed_backends(DEVICE_GROUP)]
    kinds.sort(key=lambda kind: -kind.preference)
    return {kind.kind: kind.count() for kind in kinds if kind.count()}


def open_device(name: str = "auto", mesh: "Mesh | None" = None) -> Device:
    """Open a device by name.

    Args:
        name: "auto", a kind such as "cpu", or a kind with an index such as "cuda:0"; a kind alone means index 0.
        mesh: of which this process is a rank: it has its device already, and the name may say of which kind.

    Raises:
        ConfigError: the kind is unknown, or it or the index is not here; the text names the devices that are. Or the
            mesh computes on another kind.
    """
    if mesh is not None:
        if name.partition(":")[0] not in ("auto", mesh.device.kind):
            raise ConfigError(f"the mesh computes on {mesh.device.kind}, the device is set to {name}; use auto")
        return mesh.device
    here = available_devices()
    kind, _, index_text = name.partition(":")
    if kind == "auto" and not index_text:
        kind = next(iter(here), "")
    index = int(index_text or 0) if not index_text or index_text.isdecimal() else -1
    if kind not in here or not 0 <= index < here[kind] or name.endswith(":"):
        listed = ", ".join(f"{each}:{i}" if n > 1 else each for each, n in here.items() for i in range(n))
        raise ConfigError(f"device {name!r} is not here: this machine has {listed or 'none'}; use one of them, or auto")
    device: Device = load_backend(DEVICE_GROUP, kind)(index)
    return device


def rank_device(name: str, rank: int, num_ranks: int, *, setting: str = "device") -> str:
    """The device of one of several ranks on this machine: accelerators are given out one by one, the CPU is shared.

    Args:
        name: what all ranks were given, as for `open_device`.
        rank: in [0, num_ranks).
        num_ranks: how many train together.
        setting: what the user calls the device, for errors.

    Raises:
        ConfigError: the device is not here, is one for several ranks, or there are fewer than ranks.
    """
    device = open_device(name)
    if ":" in name and num_ranks > 1:
        raise ConfigError(
            f"{setting} = {name} is one device for {num_ranks} ranks: name the kind alone ({device.kind}), so that "
            "each rank takes one of its own"
        )
    if num_ranks == 1 or device.torch_device.index is None:  # a device without a number is there for everybody
        return name
    num_devices = available_devices()[device.kind]
    if num_devices < num_ranks:
        raise ConfigError(
            f"{setting} = {name}: {num_ranks} ranks need as many devices of {device.kind}, and this machine has "
            f"{num_devices}; use {num_devices} ranks, or the device cpu"
        )
    return f"{device.kind}:{rank}"
