"""An Ascend NPU as a device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from offbeat_core import BackendError, EngineNeeds
from offbeat_device import AttendedTokens, DeviceMemory, MaskedAttention, Profiler, StreamLane
from offbeat_npu._attention import shape_attention
from offbeat_npu._environment import (
    NOTHING_INSTALLED,
    VISIBLE_DEVICES,
    examine_environment,
    has_npu_software,
    needs_of_vllm,
)
from offbeat_npu._operators import Operators, substitute_operators
from offbeat_npu._runtime import load_operators, load_runtime, patch_megatron

MEGATRON, VLLM = "megatron", "vllm"


class NpuDevice:
    """One NPU, by its index among those visible to this process (ASCEND_RT_VISIBLE_DEVICES).

    Source: torch_npu 2.13.0, torch_npu/npu/__init__.py, memory.py, random.py, utils.py.
    """

    kind: ClassVar[str] = "npu"
    visible_variable: ClassVar[str] = VISIBLE_DEVICES
    preference: ClassVar[int] = 20
    """Above CUDA's: what MindSpeed imports makes torch answer for NPUs under that name too."""

    collective_backend = "hccl"
    packed_attention = "rows"
    shapes_masks = True
    wide_products = False
    autocast_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    def __init__(self, index: int = 0) -> None:
        self._runtime = load_runtime()
        self._index = index
        self.torch_device = torch.device(self.kind, index)
        self._runtime.set_device(index)  # HCCL connects the device that is current

    @classmethod
    def count(cls) -> int:
        """Visible NPUs; 0 where torch_npu or CANN is missing, or there is none."""
        try:
            runtime = load_runtime()
        except BackendError:
            return 0
        return int(runtime.device_count()) if runtime.is_available() else 0

    @classmethod
    def memory_of_smallest(cls) -> int:
        return 0

    @classmethod
    def findings(cls) -> list[tuple[str, str]]:
        """Say for `doctor` what an NPU needs and what is missing; one line where nothing of it is installed."""
        return examine_environment() if has_npu_software() else [("npu", NOTHING_INSTALLED)]

    @classmethod
    def engine_needs(
        cls, library: str, devices: Sequence[int], options: Mapping[str, Any], releases: Collection[str]
    ) -> EngineNeeds:
        """Return what a rollout engine needs on NPUs; see `offbeat_core.engine_needs`."""
        return needs_of_vllm(devices, options, releases) if library == VLLM else EngineNeeds()

    def synchronize(self) -> None:
        self._runtime.synchronize(self._index)

    def memory(self) -> DeviceMemory:
        """Return what the allocator of torch_npu holds for tensors; what it keeps for reuse is not counted as free."""
        free_bytes, total_bytes = self._runtime.mem_get_info(self._index)
        return DeviceMemory(
            allocated_bytes=int(self._runtime.memory_allocated(self._index)),
            peak_bytes=int(self._runtime.max_memory_allocated(self._index)),
            total_bytes=int(total_bytes),
            free_bytes=int(free_bytes),
        )

    def reset_peak_memory(self) -> None:
        self._runtime.reset_peak_memory_stats(self._index)

    def release_unused(self) -> None:
        self._runtime.empty_cache()

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """None yet: what torch_npu has of CANN's virtual memory was not tried."""

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copied = tensor.to("cpu", copy=True)
        return lambda: copied

    def copy_lane(self) -> StreamLane:
        """Return a lane on a stream of torch_npu's, whose names are those of `torch.cuda`."""
        return StreamLane(self._runtime, self.torch_device)

    def work_graphs(self) -> None:
        """None yet: torch_npu's graphs were not tried."""

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self._runtime.get_rng_state(self._index)
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._runtime.set_rng_state(state, self._index)

    def adapt(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Put fused operators in place of a transformers model's norms, gates and rotations; their names."""
        return substitute_operators(model, Operators.of(load_operators()))

    def compiler_lacks(self) -> str:
        return "compiled layers have not been tried on NPUs"

    def masked_attention(self, tokens: AttendedTokens) -> MaskedAttention:
        """Return attention by the platform's fused operator, under the mask that it takes: a pack, or rows with images.

        Args:
            tokens: of the micro-batch.
        """
        return shape_attention(tokens, Operators.of(load_operators()), self.torch_device)

    def prepare(self, library: str, settings: Mapping[str, Any]) -> None:
        """Patch a library for this device; must come before the library is imported.

        Args:
            library: "megatron" is patched by MindSpeed; others are fit as they are.
            settings: the layout and options that the library is going to be used with.
        """
        if library == MEGATRON:
            patch_megatron(settings)

    def profiler(self) -> Profiler:
        """Return the platform's own, of NPU and CPU.

        Whether it sees threads other than the one that starts it is not known.

        Source: torch_npu 2.13.0, torch_npu/profiler/profiler.py, `profile`, `_KinetoProfile.export_chrome_trace`.
        """
        profiler = load_operators().profiler
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        profile: Profiler = profiler.profile(activities=activities)
        return profile
