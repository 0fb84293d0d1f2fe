"""Images: where they stand among tokens, at which positions, and what the vision tower is given of them.

The tower, the positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, M placeholder tokens, P patches, C values of a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_engine_torch._packing import Indices, TextOnly
from offbeat_types import DataError, Image, ImageCutter, ImagePlaces, TrainSequence

_INSTALL: Final = 'pip install "offbeat-engine-torch[vision]"'


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


class Vision(ImagePlaces):
    """Of a vision-language model of the Qwen-VL families.

    Source: transformers 5.19, models/qwen3_vl and models/qwen2_5_vl (get_rope_index, get_image_features).

    Args:
        backbone: of transformers; its configuration is read, and its positions are asked for.
        model_path: its folder, with the configuration of its image processor.
    """

    def __init__(self, backbone: Any, model_path: str) -> None:
        folder = Path(model_path).expanduser()
        self._backbone = backbone
        cutter = ImageCutter(folder, partial(_load_processor, folder), _INSTALL)
        super().__init__(backbone.config, cutter, self._find_positions)

    def patches(self, images: Sequence[Image], place_M: Indices, device: torch.device) -> ImagePatches:
        """Prepare images; without any, the smallest blank one, for a rank that meets the others in the tower."""
        if images:
            pixels, grid = self._cutter.prepare(images)
        else:
            pixels, grid = torch.zeros(self.blank_shape), torch.tensor([self.blank_grid])
        return ImagePatches(
            pixels_PC=pixels.to(device), grid_I3=grid.to(device), place_M=torch.from_numpy(place_M).to(device)
        )

    def _find_positions(self, ids: Any, kinds: Any, grids: Any) -> Any:
        tokens, marks = torch.from_numpy(ids), torch.from_numpy(kinds)
        found, _ = self._backbone.get_rope_index(tokens, marks, image_grid_thw=torch.tensor(grids))
        return found[:, 0].numpy()


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
