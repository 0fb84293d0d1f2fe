"""What a model folder holds, read from its headers alone: before anything starts, and without torch."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_types import ModelError


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
    config = _read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors; convert its weights (pickled weights are never read)")
    text = config.get("text_config") or config
    return ModelFolder(
        path=folder,
        family=str(config.get("model_type", "unknown")),
        num_parameters=sum(_count_elements(file) for file in files),
        vocabulary=int(text.get("vocab_size", 0)),
        max_positions=int(text.get("max_position_embeddings", 0)),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a model folder: it holds no config.json") from None
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is corrupt: {error}; copy it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is corrupt: it must hold an object; copy it again")
    return config


def _count_elements(file: Path) -> int:
    """Elements in one safetensors file. Source: the format description of the safetensors project."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(header_bytes, size)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors), default=0)
        elements = sum(int(math.prod(entry["shape"])) for entry in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is corrupt: {error}; copy it again") from error
    if end != size:
        raise ModelError(f"{file} is corrupt: it should have {end} bytes and has {size}; copy it again")
    return elements
