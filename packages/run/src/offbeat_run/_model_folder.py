"""What a model folder holds, read from its headers alone: before anything starts, and without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_types import ModelError, read_model_json, read_tensor_shapes


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A Hugging Face model folder that looks whole.

    Args:
        path: absolute.
        family: `model_type` of its config, such as "qwen3".
        num_parameters: elements of all tensors, tied ones once.
        vocabulary: rows of the embedding.
        max_positions: longest sequence the model was made for, in tokens.
    """

    path: Path
    family: str
    num_parameters: int
    vocabulary: int
    max_positions: int


def inspect_model(path: str) -> ModelFolder:
    """Read config and safetensors headers of a model folder.

    Raises:
        ModelError: missing, no config, no safetensors, or a file that is cut short.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ModelError(f"model.path: no such folder: {folder}; give a Hugging Face model folder")
    config = read_model_json(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors; convert its weights (pickled weights are never read)")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelError(f"{folder / 'config.json'}: text_config must be an object, got {text!r:.40}")
    _size(folder, text, "num_hidden_layers", most=100_000)
    shapes = {name: shape for file in files for name, shape in read_tensor_shapes(file).items()}
    vocabulary = _size(folder, text, "vocab_size")
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and vocabulary and shape[0] != vocabulary:
            raise ModelError(
                f"{folder}: by its config.json its embedding has {vocabulary} rows (vocab_size), and {name} has "
                f"{shape[0]}; take the config.json that belongs to the weights"
            )
    return ModelFolder(
        path=folder,
        family=str(config.get("model_type", "unknown")),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        vocabulary=vocabulary,
        max_positions=_size(folder, text, "max_position_embeddings"),
    )


def _size(folder: Path, config: Mapping[str, Any], key: str, most: int = 2**40) -> int:
    """0 where it is not there."""
    value = config.get(key) or 0
    if type(value) is not int or not 0 <= value <= most:
        raise ModelError(f"{folder / 'config.json'}: {key} must be a whole number up to {most}, got {value!r:.40}")
    return value
