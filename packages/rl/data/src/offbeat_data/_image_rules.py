"""Rules by which models take images: in which size, as how many tokens, and how these are written into a prompt.

They come from the files that lie beside the model; no torch and no transformers is needed for them. A family of models
is one class.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_core import DataError, ModelError
from offbeat_data._tokenizer import read_json

_MAX_ASPECT: Final = 200


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Image rules of a model; those of a family say more.

    Args:
        token_id: of the placeholder, which stands once for each square of pixels.
        square: side of such a square, in pixels.
    """

    token_id: int
    square: int

    @property
    def template_id(self) -> int:
        """Token that chat templates write once for an image."""
        return self.token_id

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which the model sees an image of this size, all in pixels. It leaves its results alone.

        Raises:
            DataError: it is too long and thin.
        """
        raise NotImplementedError

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image that the model sees in this size."""
        return height * width // self.square**2

    def write(self, text_of: Callable[[int], str], count: int) -> str:
        """Return what takes the place of a template's token: so many placeholders, and what is around them.

        Args:
            text_of: text of a token.
            count: of the placeholders.
        """
        return text_of(self.token_id) * count


@dataclass(frozen=True, kw_only=True)
class QwenImageRules(ImageRules):
    """Image rules of a model of the Qwen-VL families.

    Args:
        min_pixels: smaller images are enlarged.
        max_pixels: larger ones are scaled down.
    """

    min_pixels: int
    max_pixels: int

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which the model sees an image of this size, all in pixels.

        Raises:
            DataError: it is too long and thin.

        Source: transformers, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
        """
        if not min(height, width) or max(height, width) / min(height, width) > _MAX_ASPECT:
            raise DataError(f"an image of {width} x {height} pixels: one side may be {_MAX_ASPECT} times the other")
        square, area = self.square, height * width
        high, wide = round(height / square) * square, round(width / square) * square
        if high * wide > self.max_pixels:
            by = math.sqrt(area / self.max_pixels)
            high, wide = (max(square, math.floor(side / by / square) * square) for side in (height, width))
        elif high * wide < self.min_pixels:
            by = math.sqrt(self.min_pixels / area)
            high, wide = (math.ceil(side * by / square) * square for side in (height, width))
        return high, wide


@dataclass(frozen=True, kw_only=True)
class Gemma3ImageRules(ImageRules):
    """Image rules of Gemma 3: every image is a square of one size.

    Args:
        begin_id: of the token before the placeholders, which chat templates write for an image.
        end_id: of the token after them.
        side: of the square, in pixels.
    """

    begin_id: int
    end_id: int
    side: int

    @property
    def template_id(self) -> int:
        """Token before the placeholders."""
        return self.begin_id

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Both sides of the square."""
        return self.side, self.side

    def write(self, text_of: Callable[[int], str], count: int) -> str:
        """Return placeholders between their marks, in a paragraph of their own.

        Source: transformers, models/gemma3/processing_gemma3.py, full_image_sequence.
        """
        return f"\n\n{text_of(self.begin_id)}{text_of(self.token_id) * count}{text_of(self.end_id)}\n\n"


@dataclass(frozen=True, kw_only=True)
class Gemma4ImageRules(ImageRules):
    """Image rules of Gemma 4: an image is as large as a number of tokens allows.

    Args:
        begin_id: of the token before the placeholders.
        end_id: of the token after them.
        max_tokens: placeholders of an image at most.
    """

    begin_id: int
    end_id: int
    max_tokens: int

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which the model sees an image of this size, all in pixels.

        The processor's rule is applied until it changes nothing, because engines apply it once more.

        Raises:
            DataError: it is too long and thin.
        """
        size = height, width
        while (fitted := self._fit_once(*size)) != size:
            size = fitted
        return size

    def _fit_once(self, height: int, width: int) -> tuple[int, int]:
        """Source: transformers, models/gemma4/image_processing_gemma4.py, get_aspect_ratio_preserving_size."""
        square, most = self.square, self.max_tokens
        by = math.sqrt(most * square**2 / (height * width)) if height and width else 0.0
        high, wide = (math.floor(side * by / square) for side in (height, width))
        if not high and not wide:
            raise DataError(f"an image of {width} x {height} pixels is too small for the model")
        if not high:
            high, wide = 1, min(width // height, most)
        elif not wide:
            high, wide = min(height // width, most), 1
        return high * square, wide * square

    def write(self, text_of: Callable[[int], str], count: int) -> str:
        """Return placeholders between their marks.

        Source: transformers, models/gemma4/processing_gemma4.py, replace_image_token.
        """
        return f"{text_of(self.begin_id)}{text_of(self.token_id) * count}{text_of(self.end_id)}"


def load_image_rules(folder: str | Path) -> ImageRules:
    """Read the rules of a model folder.

    Raises:
        ModelError: the model takes no images, or is of another family, or its image processor's file is missing.
    """
    folder = Path(folder).expanduser()
    config = read_json(folder / "config.json")
    if config.get("model_type") == "gemma3":
        return _gemma3_rules(config)
    token_id = config.get("image_token_id")
    if token_id is None:
        raise ModelError(f"{folder} takes no images (config.json names no image_token_id): use a vision-language model")
    settings = read_json(folder / "preprocessor_config.json") or read_json(folder / "processor_config.json").get(
        "image_processor", {}
    )
    try:
        if config.get("model_type") == "gemma4":
            square = int(settings["patch_size"]) * int(settings["pooling_kernel_size"])
            return Gemma4ImageRules(
                token_id=token_id,
                square=square,
                begin_id=int(config["boi_token_id"]),
                end_id=int(config["eoi_token_id"]),
                max_tokens=int(settings["max_soft_tokens"]),
            )
        square = int(settings["patch_size"]) * int(settings["merge_size"])
        return QwenImageRules(token_id=token_id, square=square, **_limits(settings))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}: preprocessor_config.json, or image_processor in processor_config.json, must give patch_size, "
            "merge_size and the least and most pixels of an image, as Qwen-VL's do, or patch_size, pooling_kernel_size "
            f"and max_soft_tokens, as Gemma 4's ({error!r}); copy it from the model"
        ) from error


def _gemma3_rules(config: Mapping[str, Any]) -> Gemma3ImageRules:
    """Return the rules in a config.json, which leaves out what is as in the published models."""
    side = int(config.get("vision_config", {}).get("image_size", 896))
    return Gemma3ImageRules(
        token_id=int(config.get("image_token_index", 262144)),
        square=side // math.isqrt(int(config.get("mm_tokens_per_image", 256))),
        begin_id=int(config.get("boi_token_index", 255999)),
        end_id=int(config.get("eoi_token_index", 256000)),
        side=side,
    )


def _limits(settings: Mapping[str, Any]) -> dict[str, int]:
    """Fewest and most pixels, in the older writing and in the newer, where the older one goes before."""
    size = settings.get("size") or {}
    names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    return {older: int(settings.get(older) or size.get(older) or size[newer]) for older, newer in names.items()}
