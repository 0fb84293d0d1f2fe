"""What a Hugging Face model folder says of a model before it is loaded: tensors, vocabulary, end-of-sequence ids."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_types import ModelError

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES: Final = 100_000_000
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
        """Read config, generation config and the headers of the safetensors files.

        Raises:
            ModelError: a file is missing or corrupt.
        """
        config = _read_json(path / "config.json")
        text = config.get("text_config", config)
        shapes = _tensor_shapes(path)
        optional = {}
        if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            tables = [name for name in shapes if name.endswith("embed_tokens.weight")]
            shapes.pop(HEAD, None)
            optional = {HEAD: shapes[tables[0]]} if tables else {}
        return cls(
            path=path,
            shapes=shapes,
            optional=optional,
            eos_ids=_eos_ids(path, config, text),
            vocab_size=int(text.get("vocab_size", 0)),
            has_vision="vision_config" in config,
            image_token_id=config.get("image_token_id", config.get("image_token_index")),
        )

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield (name, tensor) of all that an update must bring, file by file.

        Raises:
            ModelError: a file is corrupt.
        """
        from safetensors import SafetensorError, safe_open

        for name in _weight_files(self.path):
            try:
                with safe_open(self.path / name, framework="pt") as file:
                    for tensor in file.keys():  # noqa: SIM118 - not a dict
                        if tensor in self.shapes:
                            yield tensor, file.get_tensor(tensor)
            except SafetensorError as error:
                raise ModelError(f"{self.path / name} is not a whole safetensors file ({error})") from error

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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; give a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download or write it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    return sorted(set(_read_json(index).get("weight_map", {}).values())) if index.is_file() else ["model.safetensors"]


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _weight_files(folder):
        for tensor, entry in _header(folder / name).items():
            if tensor != "__metadata__" and not tensor.endswith("rotary_emb.inv_freq"):
                shapes[tensor] = tuple(entry["shape"])
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: its length as 8 bytes, little-endian, and JSON.

    Source: https://github.com/huggingface/safetensors, README, "Format".
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header = json.loads(file.read(length))
            return dict(header)
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} lacks {path.name}; weights must be safetensors") from error
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download or write it again") from error


def _eos_ids(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> frozenset[int]:
    """Of generation_config.json, else config.json; none where neither names any."""
    generation = folder / "generation_config.json"
    for settings in (_read_json(generation) if generation.is_file() else {}, config, text):
        value = settings.get("eos_token_id")
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
