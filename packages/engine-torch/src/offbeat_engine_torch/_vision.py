"""Images: where they stand among tokens, at which positions, and what the vision tower is given of them.

The tower, the positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, M placeholder tokens, P patches, C values of a patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat_engine_torch._packing import Indices, TextOnly
from offbeat_types import (
    DataError,
    Image,
    ImageCutter,
    TrainSequence,
    check_placeholders,
    find_placeholders,
)


@dataclass(frozen=True, kw_only=True)
class ImagePatches:
    """What the vision tower is given of one pack.

    Args:
        pixels_PC: of all images, as the model's image processor cuts them.
        grid_I3: patches of each image in time, height and width.
        place_M: packed index of each placeholder token; none where the patches stand for no image.
    """

    pixels_PC: Tensor
    grid_I3: Tensor
    place_M: Tensor


def see(backbone: Any, model_path: str) -> "Vision | Blind":
    """What is known of a model's images.

    Args:
        backbone: of transformers.
        model_path: its folder.
    """
    return Vision(backbone, model_path) if hasattr(backbone, "visual") else Blind()


class Blind(TextOnly):
    """Of a model that takes no images."""

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

    def patches(self, images: Sequence[Image], place_M: Indices, device: torch.device) -> ImagePatches:
        """Never asked for."""
        raise AssertionError("a model without a vision tower was asked to look")


class Vision:
    """Of a vision-language model of the Qwen-VL families.

    Source: transformers 5.19, models/qwen3_vl and models/qwen2_5_vl (get_rope_index, get_image_features).

    Args:
        backbone: of transformers; its configuration is read, and its positions are asked for.
        model_path: its folder, with the configuration of its image processor.
    """

    def __init__(self, backbone: Any, model_path: str) -> None:
        vision = backbone.config.vision_config
        self._backbone = backbone
        folder = Path(model_path).expanduser()
        self._cutter = ImageCutter(
            folder, partial(_load_processor, folder), 'pip install "offbeat-engine-torch[vision]"'
        )
        self._image_id: int = backbone.config.image_token_id
        self._merge: int = vision.spatial_merge_size
        self._num_values: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse placeholders that are not those of the images.

        Raises:
            DataError: other runs of placeholder tokens than the images take.
            ModelError, BackendError: the image processor cannot be loaded.
        """
        check_placeholders(
            sequences, self._image_id, lambda image: math.prod(self._cutter.grid(image)) // self._merge**2
        )

    def spans(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """(start, stop) of each run of placeholders."""
        return find_placeholders(sequence, self._image_id)

    def positions(self, sequence: TrainSequence) -> Indices:
        """[3, T]: position in time, height and width; equal but within images, as transformers computes them."""
        if not sequence.images:
            return np.tile(np.arange(len(sequence.ids)), (3, 1))
        kinds = np.zeros((1, len(sequence.ids)), np.int32)
        for start, stop in self.spans(sequence):
            kinds[0, start:stop] = 1
        ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
        grids = torch.tensor([self._cutter.grid(image) for image in sequence.images])
        found, _ = self._backbone.get_rope_index(ids, torch.from_numpy(kinds), image_grid_thw=grids)
        positions: Indices = found[:, 0].numpy()
        return positions

    def patches(self, images: Sequence[Image], place_M: Indices, device: torch.device) -> ImagePatches:
        """Prepare images; without any, the smallest blank one, for a rank that meets the others in the tower."""
        if images:
            pixels, grid = self._cutter.prepare(images)
        else:
            pixels = torch.zeros(self._merge**2, self._num_values)
            grid = torch.tensor([[1, self._merge, self._merge]])
        return ImagePatches(
            pixels_PC=pixels.to(device), grid_I3=grid.to(device), place_M=torch.from_numpy(place_M).to(device)
        )


_INSTALL = 'pip install "offbeat-engine-torch[vision]"'


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
