"""Tensors as plain data: what is known of each before it comes, on a wire or in a file.

Source: the safetensors format, github.com/huggingface/safetensors (8 bytes of header length, JSON header, data);
transformers' sharded checkpoints for the index.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

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
"""Those of safetensors, and bytes of an element."""

TENSOR_DTYPES: Final = tuple(_FORMATS)
"""Number formats that a tensor may have, by torch's names without "torch."."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor.

    Args:
        name: under which all know it: the Hugging Face name.
        dtype: one of `TENSOR_DTYPES`: the format it travels and is held in.
        shape: () for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _FORMATS[self.dtype][1]


def tensor_file_header(specs: Iterable[TensorSpec]) -> bytes:
    """The start of a safetensors file, up to the first tensor's bytes: a multiple of 64 long.

    Args:
        specs: of the tensors, in the order of their bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        code = _FORMATS[spec.dtype][0]
        header[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def tensor_file_index(files: Mapping[str, Iterable[TensorSpec]]) -> str:
    """What transformers reads to find the tensors of a model in several files, JSON.

    Args:
        files: for the name of each its tensors.
    """
    places = {spec: name for name, specs in files.items() for spec in specs}
    total = sum(spec.num_bytes for spec in places)
    weight_map = {spec.name: name for spec, name in places.items()}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
