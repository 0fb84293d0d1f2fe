"""What a model folder holds, read from its headers alone: before anything starts, and without torch."""

import math
from dataclasses import dataclass
from pathlib import Path

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
    return ModelFolder(
        path=folder,
        family=str(config.get("model_type", "unknown")),
        num_parameters=sum(math.prod(shape) for file in files for shape in read_tensor_shapes(file).values()),
        vocabulary=int(text.get("vocab_size", 0)),
        max_positions=int(text.get("max_position_embeddings", 0)),
    )
