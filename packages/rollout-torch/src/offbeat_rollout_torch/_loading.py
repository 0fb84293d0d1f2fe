"""Reads a Hugging Face model folder: safetensors, one file or several, and the end-of-sequence tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from offbeat_rollout_torch._weights import DecoderWeights, WeightWriter
from offbeat_types import ModelError, list_model_files, read_eos_ids, read_model_json
from offbeat_weightsync import TensorSpec, dequantize_blocks, is_fp8_weight, quantize_blocks


def load_weights(weights: DecoderWeights, folder: Path, *, as_fp8: bool = False) -> None:
    """Fill `weights` from the safetensors files of `folder`.

    Args:
        weights: empty.
        folder: in Hugging Face format.
        as_fp8: round the matrices that FP8 updates will round, too.

    Raises:
        ModelError: a file is missing or corrupt; a tensor is missing, unknown, or of another shape.
    """
    writer = WeightWriter(weights, ModelError, str(folder))
    for path in list_model_files(folder):
        for name, tensor in _tensors(path):
            if not name.endswith("rotary_emb.inv_freq"):  # old folders stored what the config says already
                tensor = _rounded(name, tensor) if as_fp8 else tensor
                writer.write(_named(name, weights.architecture.prefix), tensor)
    writer.finish()
    weights.freeze()


def _rounded(name: str, tensor: Tensor) -> Tensor:
    if not is_fp8_weight(TensorSpec(name, "float32", tuple(tensor.shape))):
        return tensor
    return dequantize_blocks(*quantize_blocks(tensor))


def _named(name: str, prefix: str) -> str:
    """The name of today, for vision-language folders written before transformers 4.52."""
    if prefix == "model." or name.startswith((prefix, "model.visual.", "lm_head.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else f"{prefix}{name.removeprefix('model.')}"


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download or write it again") from error


def eos_ids_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence ids: of the model's configuration, else of tokenizer_config.json; else none."""
    if named := read_eos_ids(folder):
        return named
    path = folder / "tokenizer_config.json"
    token = read_model_json(path).get("eos_token") if path.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(text) if text else None
    return frozenset() if found is None else frozenset([found])
