"""How a vision-language model cuts images: in which size it sees one, and as how many tokens it stands in a prompt.

The numbers come from the files that lie beside the model; no torch and no transformers is needed for them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_types import DataError, ModelError

_MAX_ASPECT: Final = 200


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Of a model of the Qwen-VL families.

    Args:
        token_id: of the placeholder, which stands once for each square of merged patches.
        square: side of such a square, in pixels.
        min_pixels: smaller images are enlarged.
        max_pixels: larger ones are scaled down.
    """

    token_id: int
    square: int
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

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image that the model sees in this size."""
        return height * width // self.square**2


def load_image_rules(folder: str | Path) -> ImageRules:
    """Read the rules of a model folder.

    Raises:
        ModelError: the model takes no images, or is of another family, or its image processor's file is missing.
    """
    folder = Path(folder).expanduser()
    token_id = _read(folder / "config.json").get("image_token_id")
    if token_id is None:
        raise ModelError(f"{folder} takes no images (config.json names no image_token_id): use a vision-language model")
    settings = _read(folder / "preprocessor_config.json") or _read(folder / "processor_config.json").get(
        "image_processor", {}
    )
    try:
        size = _limits(settings)
        return ImageRules(token_id=token_id, square=int(settings["patch_size"]) * int(settings["merge_size"]), **size)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}: preprocessor_config.json, or image_processor in processor_config.json, must give patch_size, "
            f"merge_size and the least and most pixels of an image, as Qwen-VL's do ({error!r}); copy it from the model"
        ) from error


def _limits(settings: Mapping[str, Any]) -> dict[str, int]:
    """Fewest and most pixels, in the older writing and in the newer, where the older one goes before."""
    size = settings.get("size") or {}
    names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    return {older: int(settings.get(older) or size.get(older) or size[newer]) for older, newer in names.items()}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is corrupt: {error}; copy it again from the model it belongs to") from error
    return content if isinstance(content, dict) else {}
