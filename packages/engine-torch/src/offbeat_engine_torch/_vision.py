"""Images: where they stand among tokens, at which positions, and what the vision tower is given of them.

The tower, the positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, M placeholder tokens, P patches, C values of a patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat_engine_torch._packing import Indices, TextOnly
from offbeat_types import BackendError, DataError, Image, ModelError, TrainSequence

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width."""


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
        self._backbone, self._folder = backbone, Path(model_path).expanduser()
        self._image_id: int = backbone.config.image_token_id
        self._merge: int = vision.spatial_merge_size
        self._num_values: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self._grids: dict[tuple[int, int], Grid] = {}

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse placeholders that are not those of the images.

        Raises:
            DataError: other runs of placeholder tokens than the images take.
            ModelError, BackendError: the image processor cannot be loaded.
        """
        for index, sequence in enumerate(sequences):
            wanted = [math.prod(self._grid(image)) // self._merge**2 for image in sequence.images]
            found = [stop - start for start, stop in self.spans(sequence)]
            if wanted != found:
                raise DataError(
                    f"sequence {index}: its images take {wanted} placeholder tokens (id {self._image_id}) one after "
                    f"the other, and it holds runs of {found}; give the ids and images that the model was sampled with"
                )

    def spans(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """(start, stop) of each run of placeholders. Those in the loss were sampled: they are tokens like others."""
        marked = np.zeros(len(sequence.ids) + 2, bool)
        marked[1:-1] = (sequence.ids == self._image_id) & ~sequence.loss_mask
        edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def positions(self, sequence: TrainSequence) -> Indices:
        """[3, T]: position in time, height and width; equal but within images, as transformers computes them."""
        if not sequence.images:
            return np.tile(np.arange(len(sequence.ids)), (3, 1))
        kinds = np.zeros((1, len(sequence.ids)), np.int32)
        for start, stop in self.spans(sequence):
            kinds[0, start:stop] = 1
        ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
        grids = torch.tensor([self._grid(image) for image in sequence.images])
        found, _ = self._backbone.get_rope_index(ids, torch.from_numpy(kinds), image_grid_thw=grids)
        positions: Indices = found[:, 0].numpy()
        return positions

    def patches(self, images: Sequence[Image], place_M: Indices, device: torch.device) -> ImagePatches:
        """Prepare images; without any, the smallest blank one, for a rank that meets the others in the tower."""
        if images:
            pixels, grid = self._prepare(images)
        else:
            pixels = torch.zeros(self._merge**2, self._num_values)
            grid = torch.tensor([[1, self._merge, self._merge]])
        return ImagePatches(
            pixels_PC=pixels.to(device), grid_I3=grid.to(device), place_M=torch.from_numpy(place_M).to(device)
        )

    def _prepare(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """Pixels and grids, from the model's own image processor."""
        made = self._processor(images=list(images), input_data_format="channels_last", return_tensors="pt")
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        if grid.tolist() != [list(self._grid(image)) for image in images]:
            raise ModelError(f"{self._folder}: {type(self._processor).__name__} cuts images otherwise than it declares")
        return pixels, grid

    def _grid(self, image: Image) -> Grid:
        size = (image.shape[0], image.shape[1])
        if size not in self._grids:
            self._grids[size] = self._cut(*size)
        return self._grids[size]

    def _cut(self, height: int, width: int) -> Grid:
        """Patches of an image of this size in pixels: the arithmetic of the image processor's module."""
        processor = self._processor
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        resize = import_module(type(processor).__module__).smart_resize
        try:
            size = resize(height, width, factor=processor.patch_size * processor.merge_size, **limits)
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error
        return 1, size[0] // processor.patch_size, size[1] // processor.patch_size

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._folder, local_files_only=True)
        except ImportError as error:
            raise BackendError(
                f"images are prepared by {self._folder.name}'s processor, which needs Pillow or torchvision ({error}); "
                'install it with: pip install "offbeat-engine-torch[vision]"'
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{self._folder}: no image processor can be loaded: {error}; copy preprocessor_config.json (or "
                "processor_config.json) from the model"
            ) from error
