"""The files of a Hugging Face model folder: what they are called, what they hold, and how they reach the disk.

Source: the safetensors format, github.com/huggingface/safetensors (8 bytes of header length, little-endian, JSON
header of at most 100 MB, data); transformers' sharded checkpoints for names and index.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_core._errors import ModelError
from offbeat_core._files import read_small
from offbeat_core._models.digests import DIGEST_SUFFIX

MODEL_FILE: Final = "model.safetensors"
MODEL_INDEX_FILE: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
"""Bound on a safetensors header and on the JSON files beside it: a tokenizer of 300,000 tokens has a third of that."""
_MODEL_FILES: Final = (
    MODEL_FILE,
    "model-?????-of-?????.safetensors",
    MODEL_INDEX_FILE,
    "mtp.safetensors",
    "mtp-?????-of-?????.safetensors",
)
"""All that the weights of a model may be called, as offbeat's engines and others write them."""
TOKENIZER_FILES: Final = (
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
        for path in (*folder.glob(pattern), *folder.glob(pattern + DIGEST_SUFFIX)):
            path.unlink()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what makes token ids of text and images: tokenizer, chat template, processor; what is not there is not."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def find_tensors(folder: Path, held: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return which file to read each tensor from: the one that the index names, where there is one.

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
        raise ModelError(f"{folder} is not whole: {absent[0]} is missing; download the folder again")
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
        content = read_small(path, _MAX_HEADER_BYTES)
        _refuse_pointer(path, content)
        value = json.loads(content)
    except OSError as error:
        raise ModelError(f"a model folder needs {path.name}: cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download or write the model folder again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / MODEL_INDEX_FILE
    index = read_model_json(path).get("weight_map") if path.is_file() else {}
    if not isinstance(index, dict):
        raise ModelError(f"{path} names no files in weight_map; download the folder again")
    return index


def _refuse_pointer(path: Path, begin: bytes) -> None:
    """Refuse what git leaves in place of a large file where git-lfs is not installed."""
    if begin.startswith(b"version https://git-lfs.github.com/"):
        raise ModelError(
            f"{path} is a pointer of git-lfs and not the file itself: install git-lfs and run `git lfs pull` in that "
            "folder, or download it again"
        )


def list_model_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights: those of the index, which is not read when there is a model.safetensors.

    Raises:
        ModelError: one is missing.
    """
    names = [MODEL_FILE]
    if not (folder / MODEL_FILE).is_file() and (folder / MODEL_INDEX_FILE).is_file():
        names = sorted(set(_read_index(folder).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent or not names:
        raise ModelError(f"{folder} lacks {', '.join(absent) or 'weights'}; weights must be safetensors")
    return [folder / name for name in names]


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in a safetensors file, from its header.

    Raises:
        ModelError: it cannot be read, or is longer or shorter than the header says.
    """
    try:
        with path.open("rb") as file:
            got = os.fstat(file.fileno()).st_size
            _refuse_pointer(path, file.read(64))
            file.seek(0)
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {num_bytes} bytes")  # noqa: TRY301
            header: dict[str, Any] = json.loads(file.read(num_bytes))
        header.pop("__metadata__", None)
        wanted = 8 + num_bytes + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download or write it again") from error
    if got != wanted:
        raise ModelError(
            f"{path} is not a whole safetensors file: it should have {wanted} bytes and has {got}; "
            "download or write it again"
        )
    return shapes


def read_eos_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids: of generation_config.json, else of config.json; none where neither names any.

    Raises:
        ModelError: a file cannot be read.
    """
    path, config = folder / "generation_config.json", read_model_json(folder / "config.json")
    generation = read_model_json(path) if path.is_file() else {}
    for settings in (generation, config, config.get("text_config") or {}):
        value = settings.get("eos_token_id")
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()


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
"""Formats of safetensors, and bytes of an element."""
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
    """Return the start of a safetensors file, up to the first tensor's bytes: a multiple of 64 long.

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
    """Return what transformers reads to find the tensors of a model in several files, JSON.

    Args:
        files: for the name of each its tensors.
    """
    places = {spec: name for name, specs in files.items() for spec in specs}
    total = sum(spec.num_bytes for spec in places)
    weight_map = {spec.name: name for spec, name in places.items()}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
