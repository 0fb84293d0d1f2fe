"""The files of a Hugging Face model folder: what they are called, which holds which tensor, and how one begins.

Source: the safetensors format, github.com/huggingface/safetensors (8 bytes of header length, JSON header, data);
transformers' sharded checkpoints for the names and the index.
"""

import json
import math
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

_FORMATS: Final = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's names, without "torch."; those of safetensors, and bytes of an element."""


def tensor_file_header(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file, up to the first tensor's bytes: a multiple of 64 long.

    Args:
        entries: (name, number format such as "bfloat16", shape) of each tensor, in the order of their bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        code, itemsize = _FORMATS[dtype]
        start, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def drop_model_files(folder: Path) -> None:
    """Remove the weights in a folder, before others come: under other names they would lie beside these."""
    for pattern in _MODEL_FILES:
        for path in folder.glob(pattern):
            path.unlink()


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


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / MODEL_INDEX_FILE
    if not path.is_file():
        return {}
    try:
        index: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the folder anew") from error
    return index
