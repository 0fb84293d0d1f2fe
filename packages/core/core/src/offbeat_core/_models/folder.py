"""Weights of a Hugging Face model folder that a rollout engine takes, and the check of what comes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat_core._errors import WeightSyncError
from offbeat_core._models.files import list_model_files, read_eos_ids, read_model_json, read_tensor_shapes

_HEAD: Final = "lm_head.weight"


class ModelFolder:
    """A Hugging Face model folder as a rollout engine needs it, read without loading anything.

    Args:
        path: holds config.json and safetensors.

    Attributes:
        shapes: Hugging Face name -> shape of each tensor that a weight update must bring.
        optional: of those that it may bring too: an output embedding that is tied to the input embedding.
        eos_ids: end-of-sequence ids.
        vocab_size: ids lie in [0, vocab_size).
        has_vision: the model takes images.
        image_token_id: placeholder of an image; None where the config names none.

    Raises:
        ModelError: a file is missing or corrupt.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        config = read_model_json(self.path / "config.json")
        text = config.get("text_config", config)
        files = map(read_tensor_shapes, list_model_files(self.path))
        found = {name: shape for file in files for name, shape in file.items()}
        self.shapes = {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}
        self.optional: dict[str, tuple[int, ...]] = {}
        if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            self.shapes.pop(_HEAD, None)
            tables = [shape for name, shape in self.shapes.items() if name.endswith("embed_tokens.weight")]
            self.optional = {_HEAD: tables[0]} if tables else {}
        self.eos_ids = read_eos_ids(self.path)
        self.vocab_size = int(text.get("vocab_size", 0))
        self.has_vision = "vision_config" in config
        self.image_token_id: int | None = config.get("image_token_id", config.get("image_token_index"))

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


class ExpectedTensors:
    """Checks that tensors come each once, in their shapes, and that none is missing at the end.

    Args:
        source: where they come from, for errors.
        error: raised for whatever is wrong.

    Attributes:
        taken: names of those that have come.
    """

    def __init__(self, source: str, error: type[Exception] = WeightSyncError) -> None:
        self._source, self._error = source, error
        self.taken: set[str] = set()

    def take(self, name: str, found: tuple[int, ...], expected: tuple[int, ...] | None, stored: str = "") -> None:
        """Note that a tensor has come.

        Args:
            name: under which it came.
            found: its shape.
            expected: shape of the model's tensor of that name; None: it has none.
            stored: the name to note, where it is another.
        """
        if expected is None:
            raise self._error(f"{self._source}: this model has no tensor {name!r}")
        if (stored or name) in self.taken:
            raise self._error(f"{self._source}: the tensor {name!r} came twice")
        if found != expected:
            raise self._error(f"{self._source}: {name!r} must have shape {expected}, got {found}")
        self.taken.add(stored or name)

    def finish(self, names: Mapping[str, object]) -> None:
        """Check that all of these have come."""
        if missing := [name for name in names if name not in self.taken]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise self._error(f"{self._source}: missing {', '.join(map(repr, missing[:3]))}{more}")
