"""Images for the reference: what transformers' own processor makes of them, and what a side may have made instead."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from offbeat_core import Ids, Image, ModelError

_INPUTS: Final = ("pixel_values", "image_grid_thw", "image_position_ids")


class ImageInputs:
    """The processor of a model folder, and how the model is called with what it returns.

    Args:
        folder: of the model.
        config: of the model.

    Raises:
        ModelError: transformers makes no processor of the folder.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"{folder}: transformers makes no image processor of it: {error}") from error
        self._config = config

    def __call__(self, ids: Ids, images: Sequence[Image], **settings: Any) -> dict[str, Tensor]:
        """Return the arguments of a forward pass over `ids` [T], beside these.

        Args:
            ids: whose placeholders are all those of the images.
            images: each [H, W, 3] uint8.
            settings: of the processor, in place of its own.
        """
        made = self._processor(images=list(images), input_data_format="channels_last", return_tensors="pt", **settings)
        places = torch.from_numpy(ids == self._config.image_token_id)[None].int()
        name = "token_type_ids" if self._config.model_type == "gemma3" else "mm_token_type_ids"
        return {key: made[key] for key in _INPUTS if key in made} | {name: places}

    def readings(self, ids: Ids, images: Sequence[Image]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield what an engine may have made of the images instead, each with the arguments of that."""
        for name, change in _CHANGES.items():
            changed = [np.ascontiguousarray(change(image)) for image in images]
            if all(image.shape == other.shape for image, other in zip(images, changed, strict=True)):
                yield name, self(ids, changed)
        for name, settings in _SETTINGS.items():
            yield name, self(ids, images, **settings)
        if len(images) > 1 and len({image.shape for image in images}) == 1:
            yield "images in reverse order", self(ids, images[::-1])
        given = self(ids, images)
        if "image_grid_thw" in given:
            yield "positions of text", given | {"position_ids": torch.arange(len(ids)).expand(3, 1, -1)}


_CHANGES: Final[Mapping[str, Callable[[Image], Image]]] = {
    "red and blue swapped": lambda image: image[..., ::-1],
    "rows and columns swapped": lambda image: image.transpose(1, 0, 2),
    "mirrored": lambda image: image[:, ::-1],
    "blank": lambda image: np.full_like(image, 255),
    "black": np.zeros_like,
}
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "not normalised": {"do_normalize": False},
    "not scaled to [0, 1]": {"do_rescale": False},
}
