"""Weights as FP8 blocks: what vLLM is started with, what an update must bring, and the blocks of a model folder.

Blocks are of 128 x 128 in e4m3 with a scale each, as the trainer sends them. On a GPU vLLM holds the blocks themselves,
as of a model that was stored so: the folder's config is overridden to say it was, and the blocks come by updates, the
first of them from the folder. On a CPU vLLM's kernels for blocks want AMX; so there the engine holds the values they
stand for, in its own format.

Source: vllm 0.32.0, vllm/model_executor/layers/quantization/fp8.py (Fp8Config.from_config; Fp8LinearMethod: `weight`
and `weight_scale_inv`; all linear layers but `modules_to_not_convert`), quantization/utils/fp8_utils.py
(validate_fp8_block_shape), vllm/model_executor/kernels/linear/ (which kernels there are, and what they make of the
blocks); verl, verl/utils/vllm/vllm_fp8_utils.py at 1736c199 (the same override of the config).
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import ConfigError, ModelError, ModelFolder, RolloutEngineConfig, TensorSpec, list_model_files
from offbeat_rollout_vllm._updates import FolderStream

if TYPE_CHECKING:
    from torch import Tensor


FP8: Final = "fp8"
"""Value of `RolloutEngineSettings.weight_format`."""
BLOCK: Final = 128
SCALE: Final = "_scale_inv"
DTYPES: Final = ("bfloat16", "float16")
"""Formats that vLLM computes in with blocks (Fp8Config.get_supported_act_dtypes)."""
READABLE_KERNELS: Final = {"VLLM_USE_DEEP_GEMM": "0"}
"""DeepGEMM lays scales out anew, or rounds them: what it serves could not be compared with what came."""


def holds_blocks(config: RolloutEngineConfig, *, is_cpu: bool) -> bool:
    return config.weight_format == FP8 and not is_cpu


def block_arguments(config: RolloutEngineConfig, options: Mapping[str, Any], folder: ModelFolder) -> dict[str, Any]:
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
    """Return what an update of blocks must bring: a scale for each block, too."""
    scales = {
        name + SCALE: tuple(-(-size // BLOCK) for size in folder.shapes[name])
        for name in _matrices(folder)
        if _is_fp8(folder, name)
    }
    found = copy(folder)
    found.shapes = {**folder.shapes, **scales}
    return found


def _matrices(folder: ModelFolder) -> list[str]:
    return [name for name, shape in folder.shapes.items() if len(shape) == 2 and name.endswith(".weight")]


def _is_fp8(folder: ModelFolder, name: str) -> bool:
    from offbeat_weightsync import is_fp8_weight

    return is_fp8_weight(TensorSpec(name, "float32", folder.shapes[name]))


def read_blocks(folder: ModelFolder) -> FolderStream:
    """Return the folder's weights, each matrix as blocks and their scale: served before the first sync."""
    from offbeat_weightsync import quantize_tensors

    return FolderStream(lambda: quantize_tensors(_read_tensors(folder)), version=0)


def _read_tensors(folder: ModelFolder) -> "Iterator[tuple[str, Tensor]]":
    """Return what an update must bring, file by file."""
    from safetensors import SafetensorError, safe_open

    for file_path in list_model_files(folder.path):
        try:
            with safe_open(file_path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in folder.shapes:
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file_path} is not a whole safetensors file ({error})") from error
