"""How a model cuts images into patches: by its own image processor, asked beforehand how many there will be."""

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from offbeat_types._errors import BackendError, DataError, ModelError
from offbeat_types._requests import Image

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width."""


class ImageCutter:
    """Prepares images for a vision tower of the Qwen-VL families. May be used from several threads.

    Source: `smart_resize` of transformers 5.19, in the module of the model's image processor.

    Args:
        folder: of the model, for errors.
        load: loads its image processor, when the first image comes.
        install: what to run where Pillow or torchvision is missing.
    """

    def __init__(self, folder: Path, load: Callable[[], Any], install: str) -> None:
        self._folder, self._load, self._install = folder, load, install
        self._grids: dict[tuple[int, int], Grid] = {}

    def grid(self, image: Image) -> Grid:
        """Patches that an image will become.

        Raises:
            DataError: it is too narrow to be cut.
            ModelError, BackendError: the image processor cannot be loaded.
        """
        size = (image.shape[0], image.shape[1])
        if size not in self._grids:
            self._grids[size] = self._cut(*size)
        return self._grids[size]

    def prepare(self, images: Sequence[Image]) -> tuple[Any, Any]:
        """Tensors [P, C] of pixels and [I, 3] of grids: P patches of C values, I images.

        Raises:
            ModelError: the processor cuts images otherwise than its sizes say, or cannot be loaded.
            BackendError: Pillow or torchvision is missing.
        """
        made = self._processor(images=list(images), input_data_format="channels_last", return_tensors="pt")
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        if grid.tolist() != [list(self.grid(image)) for image in images]:
            raise ModelError(f"{self._folder}: {type(self._processor).__name__} cuts images otherwise than it declares")
        return pixels, grid

    def _cut(self, height: int, width: int) -> Grid:
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
        try:
            return self._load()
        except ImportError as error:
            raise BackendError(
                f"images are prepared by {self._folder.name}'s processor, which needs Pillow or torchvision ({error}); "
                f"install it with: {self._install}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{self._folder}: no image processor can be loaded: {error}; copy preprocessor_config.json (or "
                "processor_config.json) from the model"
            ) from error
