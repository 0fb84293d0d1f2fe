"""What a Hugging Face model folder says of a model before it is loaded: tensors, vocabulary, end-of-sequence ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from offbeat_types import ModelError, list_model_files, read_eos_ids, read_model_json, read_tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

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
        config = read_model_json(path / "config.json")
        text = config.get("text_config", config)
        shapes = {
            name: shape
            for file in list_model_files(path)
            for name, shape in read_tensor_shapes(file).items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        optional = {}
        if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            tables = [name for name in shapes if name.endswith("embed_tokens.weight")]
            shapes.pop(HEAD, None)
            optional = {HEAD: shapes[tables[0]]} if tables else {}
        return cls(
            path=path,
            shapes=shapes,
            optional=optional,
            eos_ids=read_eos_ids(path),
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

        for file_path in list_model_files(self.path):
            try:
                with safe_open(file_path, framework="pt") as file:
                    for tensor in file.keys():  # noqa: SIM118 - not a dict
                        if tensor in self.shapes:
                            yield tensor, file.get_tensor(tensor)
            except SafetensorError as error:
                raise ModelError(f"{file_path} is not a whole safetensors file ({error})") from error

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
