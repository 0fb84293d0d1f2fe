"""What a Hugging Face model folder says of a model before it is loaded, and its weights as FP8 blocks.

Blocks are of 128 x 128 in e4m3 with a scale each, as the trainer sends them. On a GPU vLLM holds the blocks themselves,
as of a model that was stored so: the folder's config is overridden to say it was, and the blocks come by updates, the
first of them from the folder. On a CPU vLLM's kernels for blocks want AMX; so there the engine holds the values they
stand for, in its own format.

Source: vllm 0.32.0, vllm/model_executor/layers/quantization/fp8.py (Fp8Config.from_config; Fp8LinearMethod: `weight`
and `weight_scale_inv`; all linear layers but `modules_to_not_convert`), quantization/utils/fp8_utils.py
(validate_fp8_block_shape), vllm/model_executor/kernels/linear/ (which kernels there are, and what they make of the
blocks); verl, verl/utils/vllm/vllm_fp8_utils.py at 1736c199 (the same override of the config).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_types import (
    ConfigError,
    ModelError,
    RolloutEngineConfig,
    WeightProof,
    WeightSyncError,
    list_model_files,
    read_eos_ids,
    read_model_json,
    read_tensor_shapes,
)

if TYPE_CHECKING:
    from torch import Tensor


HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model on disk.

    Args:
        path: the folder.
        shapes: Hugging Face name -> shape of each tensor a weight update must bring.
        optional: names an update may bring too: an output embedding that is tied to the input embedding.
        eos_ids: end-of-sequence ids.
        vocab_size: ids lie in [0, vocab_size).
        has_vision: the model takes images.
        image_token_id: placeholder of an image, where the config names one.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]
    eos_ids: frozenset[int]
    vocab_size: int
    has_vision: bool = False
    image_token_id: int | None = None

    @classmethod
    def read(cls, path: Path) -> "ModelFolder":
        config = read_model_json(path / "config.json")
        text = config.get("text_config", config)
        shapes = {
            name: shape
            for file in list_model_files(path)
            for name, shape in read_tensor_shapes(file).items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        optional = {}
        if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            tables = [name for name in shapes if name.endswith("embed_tokens.weight")]
            shapes.pop(HEAD, None)
            optional = {HEAD: shapes[tables[0]]} if tables else {}
        return cls(
            path=path,
            shapes=shapes,
            optional=optional,
            eos_ids=read_eos_ids(path),
            vocab_size=int(text.get("vocab_size", 0)),
            has_vision="vision_config" in config,
            image_token_id=config.get("image_token_id", config.get("image_token_index")),
        )

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield (name, tensor) of all that an update must bring, file by file."""
        from safetensors import SafetensorError, safe_open

        for file_path in list_model_files(self.path):
            try:
                with safe_open(file_path, framework="pt") as file:
                    for tensor in file.keys():  # noqa: SIM118 - not a dict
                        if tensor in self.shapes:
                            yield tensor, file.get_tensor(tensor)
            except SafetensorError as error:
                raise ModelError(f"{file_path} is not a whole safetensors file ({error})") from error

    def stored_name(self, name: str) -> str:
        """Return the folder's name of a tensor that transformers may call otherwise in memory, else the name as it is.

        Folders of Qwen2-VL and Qwen2.5-VL say "model.layers" and "visual" for what transformers, since release 4.52,
        loads as "model.language_model.layers" and "model.visual", and saves under the old names again.

        Source: transformers 5.19.0, transformers/conversion_mapping.py ("qwen2_5_vl").
        """
        for candidate in (name, name.replace("model.language_model.", "model.", 1), name.removeprefix("model.")):
            if candidate in self.shapes or candidate in self.optional:
                return candidate
        return name

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor under either name; None: there is none."""
        stored = self.stored_name(name)
        return self.shapes.get(stored, self.optional.get(stored))


FP8: Final = "fp8"
"""Of `RolloutEngineSettings.weight_format`."""
BLOCK: Final = 128
SCALE: Final = "_scale_inv"
DTYPES: Final = ("bfloat16", "float16")
"""In which vLLM computes with blocks (Fp8Config.get_supported_act_dtypes)."""
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


class FolderStream:
    def __init__(self, read: "Callable[[], Iterable[tuple[str, Tensor]]]", version: int) -> None:
        self._read, self.version = read, version

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._read()

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
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


def read_blocks(folder: ModelFolder) -> FolderStream:
    """The folder's weights, each matrix as blocks and their scale after it: served before the trainer has sent any."""
    from offbeat_weightsync import quantize_tensors

    return FolderStream(lambda: quantize_tensors(folder.tensors()), version=0)
