"""FP8 weights: blocks of 128 x 128 in e4m3 with a scale each, as the trainer sends them.

On a GPU vLLM holds the blocks themselves, as of a model that was stored so: the folder's config is overridden to say it
was, and the blocks come by updates, the first of them from the folder. On a CPU vLLM's kernels for blocks want AMX; so
there the engine holds the values they stand for, in its own format.

Source: vllm 0.32.0, vllm/model_executor/layers/quantization/fp8.py (Fp8Config.from_config; Fp8LinearMethod: `weight`
and `weight_scale_inv`; all linear layers but `modules_to_not_convert`), quantization/utils/fp8_utils.py
(validate_fp8_block_shape), vllm/model_executor/kernels/linear/ (which kernels there are, and what they make of the
blocks); verl, verl/utils/vllm/vllm_fp8_utils.py at 1736c199 (the same override of the config).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from offbeat_rollout_vllm._folders import ModelFolder
from offbeat_types import ConfigError, RolloutEngineConfig, WeightProof, WeightStream, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

FP8: Final = "fp8"
"""Of `RolloutEngineSettings.weight_format`."""
BLOCK: Final = 128
SCALE: Final = "_scale_inv"
DTYPES: Final = ("bfloat16", "float16")
"""In which vLLM computes with blocks (Fp8Config.get_supported_act_dtypes)."""
READABLE_KERNELS: Final = {"VLLM_USE_DEEP_GEMM": "0"}
"""DeepGEMM lays scales out anew, or rounds them: what it serves could not be compared with what came."""


def holds_blocks(config: RolloutEngineConfig, *, is_cpu: bool) -> bool:
    """Whether the engine will hold the blocks themselves."""
    return config.weight_format == FP8 and not is_cpu


def block_arguments(config: RolloutEngineConfig, options: Mapping[str, Any], folder: ModelFolder) -> dict[str, Any]:
    """Arguments for vLLM's EngineArgs, so that it takes blocks.

    Args:
        config: what every engine gets.
        options: the user's, for vLLM.
        folder: of the model, in another format.

    Raises:
        ConfigError: a number format in which vLLM does not compute with blocks; an option that blocks decide; a mixture
            of experts, whose stacks of blocks cannot be read back.
    """
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"rollout.weight_format = fp8: vLLM computes with FP8 blocks in {' or '.join(DTYPES)}, and rollout.dtype "
            f"is {config.dtype}: set it to {DTYPES[0]}"
        )
    if any(".experts." in name for name in folder.shapes):
        raise ConfigError(
            f"rollout.weight_format = fp8: blocks of experts cannot be proved, and {folder.path} has experts; "
            "leave it out"
        )
    others = [name.removesuffix(".weight") for name in _matrices(folder) if not _is_fp8(folder, name)]
    stored = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": others,
    }
    arguments = {"hf_overrides": {"quantization_config": stored}, "load_format": "dummy"}
    for name in [*arguments, "quantization"]:
        if name in options:
            raise ConfigError(f"option {name} of rollout-vllm cannot be set: rollout.weight_format = fp8 decides it")
    return arguments


def with_scales(folder: ModelFolder) -> ModelFolder:
    """What an update of blocks must bring: a scale for each block, too."""
    scales = {
        name + SCALE: tuple(-(-size // BLOCK) for size in folder.shapes[name])
        for name in _matrices(folder)
        if _is_fp8(folder, name)
    }
    return replace(folder, shapes={**folder.shapes, **scales})


def _matrices(folder: ModelFolder) -> list[str]:
    return [name for name, shape in folder.shapes.items() if len(shape) == 2 and name.endswith(".weight")]


def _is_fp8(folder: ModelFolder, name: str) -> bool:
    from offbeat_weightsync import TensorSpec, is_fp8_weight

    return is_fp8_weight(TensorSpec(name, "float32", folder.shapes[name]))


def values_of(stream: WeightStream) -> WeightStream:
    """The values that a stream's blocks stand for; it proves the blocks."""
    from offbeat_weightsync import DequantizedStream

    return DequantizedStream(stream)


class BlockFolder:
    """A weight stream of a model folder, its matrices as blocks: what is served before the trainer has sent any.

    Args:
        folder: of the model, in another format.
    """

    version = 0

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield (name, tensor); after each matrix of blocks comes its scale."""
        from offbeat_weightsync import quantize_tensors

        yield from quantize_tensors(self._folder.tensors())

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
        """Compare every tensor with what is held.

        Raises:
            WeightSyncError: one differs.
        """
        import torch

        digest, count = hashlib.blake2b(digest_size=8), 0
        for name, tensor in self:
            held = read(name).contiguous()
            sent = tensor.to(held.dtype).contiguous()
            if not torch.equal(held.flatten().view(torch.uint8), sent.flatten().view(torch.uint8)):
                raise WeightSyncError(f"the engine holds other numbers than the folder's in {name}")
            digest.update(name.encode() + held.flatten().view(torch.uint8).numpy().tobytes())
            count += 1
        return WeightProof(version=self.version, num_tensors=count, checksums=(digest.hexdigest(),))
