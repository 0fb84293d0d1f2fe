"""The device seam: what every kind of device answers, and how one is opened by name.

A kind of device is a class registered under the entry point `offbeat.device`; its name is the part before the colon
in "cuda:0". No other module of offbeat compares such names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch._C._profiler import _ExperimentalConfig

from offbeat_core import ConfigError, available_devices, load_backend


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device as this process sees it.

    Args:
        allocated_bytes: held by this process now.
        peak_bytes: most held since the start or the last `reset_peak_memory`.
        total_bytes: what the device has.
        free_bytes: what this process may still take: held by no process, or kept by this one for reuse.
    """

    allocated_bytes: int
    peak_bytes: int
    total_bytes: int
    free_bytes: int


class Profiler(Protocol):
    """Records what this process and one of its devices do: torch's own, or one with its methods."""

    def start(self) -> None:
        """Record from here on."""

    def stop(self) -> None:
        """Record no further; in the thread that started it."""

    def export_chrome_trace(self, path: str) -> None:
        """Write what was recorded as JSON in Chrome's format; in any thread."""


class WorkGraphs(Protocol):
    """Recorded work of one device, which shares memory; it is given back when the last recording is let go."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` queues on the device, without doing it.

        Args:
            work: the same operators on the same memory each time, which waits for nothing that the device computes. Do
                it once before: what it calls may set itself up then.

        Returns:
            Does all of it by one call. Inputs and results lie where they lay while it was recorded.
        """


class StableMemory(Protocol):
    """Memory whose addresses stay while the device has the memory back: tensors and recorded work on it stay valid.

    Hold it as long as what uses its addresses. It begins without memory.

    Attributes:
        tensor: [num_bytes] uint8, on the device; read and written only between `restore` and `release`.
    """

    tensor: torch.Tensor

    def restore(self) -> None:
        """Have memory behind the addresses, all of it zero; nothing where it is there.

        Raises:
            OffbeatError: the device has too little.
        """

    def release(self) -> None:
        """Give the memory back, and lose what it holds, once queued work is done; nothing where it is away."""


class CopyLane(Protocol):
    """Copies between a device and main memory, one after the other, beside what the device computes."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Queue a copy behind all that the caller has queued on the device so far.

        Returns:
            Lets what the caller queues next wait for the copy. Until then neither tensor may be written to or let go.
        """


@dataclass(frozen=True, kw_only=True)
class AttendedTokens:
    """Sequences of a micro-batch, one after the other, and the queries of them that a rank holds.

    Shapes: B sequences, T tokens of all of them.

    Args:
        ids_T: int64 token ids, in main memory.
        lengths: of the B sequences, each at least 1; together T.
        queries: for each sequence the ranges [start, end) of its tokens whose queries this rank holds, in its order.
        image_ids: ids that stand for patches of images; empty for a model without vision.
    """

    ids_T: torch.Tensor
    lengths: tuple[int, ...]
    queries: tuple[tuple[tuple[int, int], ...], ...]
    image_ids: frozenset[int] = frozenset()


class MaskedAttention(Protocol):
    """Causal attention within each sequence of a micro-batch, by a kernel of the platform under the mask it takes.

    Attributes:
        mask: bool, true where a query must not look, in the shape that the kernel takes; on the device.
    """

    mask: torch.Tensor

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Return what each query found: [Q, H, D].

        Args:
            query_QHD: of the rank's ranges, in their order; H heads.
            key_TGD: of all tokens, in the order of the sequences; G key heads, which H is a multiple of.
            value_TGD: like the keys.
            mask: `mask` of this micro-batch, as the layers of the model handed it on.
            scale: factor on the scores.

        Raises:
            ShapeError: the mask is missing, or another one.
        """


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
        shapes_masks: whether `masked_attention` answers, so that a plan can show it before there are tokens.
        wide_products: whether a product of matrices in bfloat16 can have a float32 result (`torch.mm(out_dtype=)`).
    """

    kind: ClassVar[str]
    preference: ClassVar[int]
    visible_variable: ClassVar[str]
    torch_device: torch.device
    collective_backend: str
    autocast_dtypes: tuple[torch.dtype, ...]
    packed_attention: str
    shapes_masks: bool
    wide_products: bool

    @classmethod
    def count(cls) -> int:
        """Return how many of this kind are here: 0 means not available. Never raises."""

    @classmethod
    def memory_of_smallest(cls) -> int:
        """Bytes of memory of the smallest of this kind here, without opening one; 0 where that is not known."""

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""

    def memory(self) -> DeviceMemory:
        """Memory now and at its peak."""

    def reset_peak_memory(self) -> None:
        """Start the peak anew, where the platform can."""

    def release_unused(self) -> None:
        """Release memory that is free and only cached for reuse, so that other processes can use it."""

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of main memory, page-locked where the platform can: copies run at the speed of the bus.

        It takes about as long as several copies to make.
        """

    def reserve(self, num_bytes: int) -> StableMemory | None:
        """Return addresses for at least one byte; None on a platform where none can be had without memory."""

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy what a tensor holds once the work queued before is done.

        Returns:
            Waits for the copy, in main memory; what is done to the tensor later does not show in it.
        """

    def copy_lane(self) -> CopyLane:
        """Return a new lane for copies, which run beside each other only on lanes of their own."""

    def work_graphs(self) -> WorkGraphs | None:
        """Return a place for recorded work; None on a platform that cannot record any."""

    def rng_state(self) -> torch.Tensor:
        """State of its default random generator: [n] uint8 on the CPU."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set what `rng_state` gave."""

    def profiler(self) -> Profiler:
        """Return a new profiler of this device and, where the platform can, of all threads of this process."""

    def adapt(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Put the platform's own kernels in place of layers of a transformers model; what was replaced."""

    def compiler_lacks(self) -> str:
        """Return what `torch.compile` lacks to make kernels for this device, as a clause; "" for nothing."""

    def masked_attention(self, tokens: AttendedTokens) -> MaskedAttention | None:
        """Shape a micro-batch for the platform's own attention kernel; None where `shapes_masks` is false.

        Args:
            tokens: of the micro-batch, the same on ranks that share it but for the queries.
        """

    def prepare(self, library: str, settings: Mapping[str, Any]) -> None:
        """Make a library fit for this kind of device, before it is imported.

        Args:
            library: such as "megatron".
            settings: what it is going to be used with, in its own words.
        """


def open_device(name: str = "auto", own: Device | None = None) -> Device:
    """Open a device by name.

    Args:
        name: "auto", a kind such as "cpu", or a kind with an index such as "cuda:0"; a kind alone means index 0.
        own: the device of this process's mesh, where it has one: the name may then only give its kind.

    Raises:
        ConfigError: the kind is unknown, or it or the index is not here; the text names the devices that are. Or the
            mesh computes on another kind.
    """
    if own is not None:
        if name.partition(":")[0] not in ("auto", own.kind):
            raise ConfigError(f"the mesh computes on {own.kind}, the device is set to {name}; use auto")
        return own
    here = available_devices()
    kind, _, index_text = name.partition(":")
    if kind == "auto" and not index_text:
        kind = next(iter(here), "")
    index = int(index_text or 0) if not index_text or index_text.isdecimal() else -1
    if kind not in here or not 0 <= index < here[kind] or name.endswith(":"):
        listed = ", ".join(f"{each}:{i}" if n > 1 else each for each, n in here.items() for i in range(n))
        raise ConfigError(f"device {name!r} is not here: this machine has {listed or 'none'}; use one of them, or auto")
    device: Device = load_backend("offbeat.device", kind)(index)
    return device


def accelerator_kind(name: str) -> str:
    """Return the kind of accelerator behind a name, as clusters call it, such as "GPU"; "" for CPUs.

    Args:
        name: as for `open_device`.

    Raises:
        ConfigError: "auto" opens no device.
    """
    kind = name.partition(":")[0]
    kind = open_device(kind).torch_device.type if kind == "auto" else kind
    return "" if kind == "cpu" else "GPU" if kind == "cuda" else kind.upper()


def rank_device(name: str, rank: int, num_ranks: int, *, setting: str = "device") -> str:
    """Return the device of one of several ranks on this machine: each its own accelerator, or the CPU for all.

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
    if num_ranks == 1 or device.torch_device.index is None:  # a device without a number is shared by all ranks
        return name
    num_devices = available_devices()[device.kind]
    if num_devices < num_ranks:
        raise ConfigError(
            f"{setting} = {name}: {num_ranks} ranks need as many devices of {device.kind}, and this machine has "
            f"{num_devices}; use {num_devices} ranks, or the device cpu"
        )
    return f"{device.kind}:{rank}"


def profile_threads(*activities: torch.profiler.ProfilerActivity) -> torch.profiler.profile:
    """Return a profiler, not started.

    Source: torch 2.13.0, torch/_C/_profiler.pyi, `_ExperimentalConfig`, `profile_all_threads`.
    """
    return torch.profiler.profile(
        activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )
