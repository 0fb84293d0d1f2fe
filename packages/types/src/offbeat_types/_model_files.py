"""The files of a Hugging Face model folder: what they are called, and which holds which tensor.

Source: transformers' sharded checkpoints, for the names and the index.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat_types._errors import ModelError

MODEL_FILE: Final = "model.safetensors"
MODEL_INDEX_FILE: Final = "model.safetensors.index.json"

_MODEL_FILES: Final = (
    MODEL_FILE,
    "model-?????-of-?????.safetensors",
    MODEL_INDEX_FILE,
    "mtp.safetensors",
    "mtp-?????-of-?????.safetensors",
)
"""All that the weights of a model may be called, as offbeat's engines and others write them."""

_TOKENIZER_FILES: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
)


def drop_model_files(folder: Path) -> None:
    """Remove the weights in a folder, before others come: under other names they would lie beside these."""
    for pattern in _MODEL_FILES:
        for path in folder.glob(pattern):
            path.unlink()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what makes token ids of text and images: tokenizer, chat template, processor; what is not there is not."""
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def find_tensors(folder: Path, held: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Which file to read each tensor from: the one that the index names, where there is one.

    Args:
        folder: of the files; like transformers, this asks no index beside model.safetensors.
        held: names of the tensors in each file.

    Returns:
        For each tensor the name of its file.

    Raises:
        ModelError: the index cannot be read, its file is missing, or two files hold one tensor and no index decides.
    """
    index = {} if MODEL_FILE in held else _read_index(folder)
    absent = sorted(set(index.values()) - set(held))
    if absent:
        raise ModelError(f"{folder} is not whole: {absent[0]} is missing; fetch the folder anew")
    found: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if index.get(name, file) != file:
                continue
            if name in found:
                raise ModelError(
                    f"{folder} holds {name} twice, in {found[name]} and in {file}: they are of two models; remove one"
                )
            found[name] = file
    return found


def read_model_json(path: Path) -> dict[str, Any]:
    """Read one of the JSON files of a model folder.

    Raises:
        ModelError: it is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"a model folder needs {path.name}: cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download or write the model folder again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / MODEL_INDEX_FILE
    if not path.is_file():
        return {}
    try:
        index: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the folder anew") from error
    return index
