"""What a Hugging Face model folder says of a model before it is loaded: settings, files, shapes, ends of sequences.

Source: the safetensors format, github.com/huggingface/safetensors (8 bytes of header length, little-endian, JSON
header of at most 100 MB, data); transformers' sharded checkpoints for the index.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from offbeat_types._errors import ModelError
from offbeat_types._model_files import MODEL_FILE, MODEL_INDEX_FILE, read_model_json

_MAX_HEADER_BYTES: Final = 100_000_000


def list_model_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, which nobody asks beside model.safetensors.

    Raises:
        ModelError: one is missing.
    """
    names = [MODEL_FILE]
    if not (folder / MODEL_FILE).is_file() and (folder / MODEL_INDEX_FILE).is_file():
        names = sorted(set(read_model_json(folder / MODEL_INDEX_FILE).get("weight_map", {}).values()))
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
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {num_bytes} bytes")  # noqa: TRY301
            header: dict[str, Any] = json.loads(file.read(num_bytes))
        header.pop("__metadata__", None)
        wanted = 8 + num_bytes + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
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
