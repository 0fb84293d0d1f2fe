"""What the adapter reads of a model folder: which tensors the model has, when a sample ends, whether it sees."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from offbeat_types import ModelError, list_model_files, read_eos_ids, read_model_json, read_tensor_shapes

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
        self.config = read_model_json(self.path / "config.json")
        text = self.config.get("text_config", self.config)
        self.vocab_size = int(text.get("vocab_size", 0))
        self.tied = bool(self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    @property
    def has_vision(self) -> bool:
        """Whether the model sees: only then is an engine asked whether it loads in parts."""
        return "vision_config" in self.config

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample."""
        return tuple(sorted(read_eos_ids(self.path)))

    def tokenizer(self) -> Tokenizer:
        """For stop strings and text."""
        try:
            return Tokenizer.from_file(str(self.path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"{self.path}: tokenizer.json is missing or unreadable: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor, from the headers of the safetensors files."""
        return {name: shape for file in list_model_files(self.path) for name, shape in read_tensor_shapes(file).items()}
