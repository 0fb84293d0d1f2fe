"""Images of a vision-language model: where they stand among tokens, at which positions, and their pixels.

Positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, P patches, C values of a patch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import DataError, Image, ImageCutter, ImagePlaces, TrainSequence

Indices = npt.NDArray[np.int64]


class ImageInputs(Protocol):
    """Facts about images that packing needs of a model: `ImageProcessor` or `NoImages`."""

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Raise DataError for images or placeholders that the model cannot take."""
        ...

    def positions(self, sequence: TrainSequence) -> Indices:
        """Position of each token, [T] or, with the axes time, height and width, [3, T]."""
        ...

    def spans(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """(start, stop) of the placeholder tokens of each image."""
        ...


class NoImages:
    """Image inputs of a model that takes no images."""

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse images.

        Raises:
            DataError: there is one.
        """
        for index, sequence in enumerate(sequences):
            if sequence.images:
                raise DataError(
                    f"sequence {index} holds {len(sequence.images)} images, and the model takes none: train a "
                    "vision-language model, or leave the images out"
                )

    def positions(self, sequence: TrainSequence) -> Indices:
        """[T]: one after the other."""
        return np.arange(len(sequence.ids))

    def spans(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """None."""
        return []


class ImageProcessor(ImagePlaces):
    """Image processor of a vision-language model of the Qwen-VL families.

    Source: transformers 5.19, models/qwen3_vl and models/qwen2_5_vl (get_rope_index, get_image_features).

    Args:
        hf_config: of the model.
        model_path: its folder, with the configuration of its image processor.
        rope_index: `get_rope_index` of transformers' model.
        install: what to run where pillow is missing.
    """

    def __init__(self, hf_config: Any, model_path: str, rope_index: Callable[..., Any], install: str) -> None:
        folder = Path(model_path).expanduser()
        self._find = rope_index
        super().__init__(hf_config, ImageCutter(folder, partial(_load_processor, folder), install), self._positions)

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """[P, C] pixels and [I, 3] grids of images; without any, of the smallest blank one.

        The blank one is for a rank that has no image, but must meet the others in the vision tower.
        """
        if not images:
            return torch.zeros(self.blank_shape), torch.tensor([self.blank_grid])
        pixels, grid = self._cutter.prepare(images)
        return pixels, grid

    def _positions(self, ids: Any, kinds: Any, grids: Any) -> Any:
        tokens, marks = torch.from_numpy(ids), torch.from_numpy(kinds)
        found, _ = self._find(tokens, marks, image_grid_thw=torch.tensor(grids))
        return found[:, 0].numpy()


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
