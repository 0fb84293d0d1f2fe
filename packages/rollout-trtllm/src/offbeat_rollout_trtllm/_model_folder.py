"""What the adapter reads of a model folder: which tensors the model has, when a sample ends, whether it sees."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from offbeat_types import ModelError

FP8_QUANTIZATION: Final = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""As DeepSeek-V3's config.json has it; TensorRT-LLM reads it as FP8_BLOCK_SCALES."""


class ModelFolder:
    """A Hugging Face model folder.

    Args:
        path: holds config.json, tokenizer.json and safetensors.

    Raises:
        ModelError: something is missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self._read("config.json")
        text = self.config.get("text_config", self.config)
        self.vocab_size = int(text.get("vocab_size", 0))
        self.tied = bool(self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    @property
    def has_vision(self) -> bool:
        """Whether the model sees: only then is an engine asked whether it loads in parts."""
        return "vision_config" in self.config

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample."""
        generation = self._read("generation_config.json") if (self.path / "generation_config.json").is_file() else {}
        found = generation.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    def tokenizer(self) -> Tokenizer:
        """For stop strings and text."""
        try:
            return Tokenizer.from_file(str(self.path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"{self.path}: tokenizer.json is missing or unreadable: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor, from the headers of the safetensors files.

        Source: the safetensors format: eight bytes of length, little-endian, then JSON.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with file.open("rb") as opened:
                    header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            except (OSError, ValueError) as error:
                raise ModelError(f"{file}: not a safetensors file: {error}") from error
            found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        if not found:
            raise ModelError(f"{self.path}: no safetensors file; the engine's tensors are checked against them")
        return found

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: {name} is missing or unreadable: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{self.path}: {name} must hold an object")
        return content
