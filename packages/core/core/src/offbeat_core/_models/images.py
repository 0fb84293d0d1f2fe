"""Image processors of vision-language models, and the places of images among the tokens of a sequence.

Shapes: T tokens of a sequence.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat_core._contracts.requests import Image
from offbeat_core._contracts.trajectory import TrainSequence
from offbeat_core._errors import BackendError, DataError, ModelError

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width."""


class LateProcessor:
    """Image processor of a model folder, loaded with the first image. May be used from several threads.

    Args:
        folder: of the model, for errors.
        load: loads its image processor.
        install: what to run where Pillow or torchvision is missing.
    """

    def __init__(self, folder: Path, load: Callable[[], Any], install: str) -> None:
        self.folder, self._load, self._install = folder, load, install

    @cached_property
    def loaded(self) -> Any:
        """Transformers' processor.

        Raises:
            ModelError, BackendError: it cannot be loaded.
        """
        try:
            return self._load()
        except ImportError as error:
            raise BackendError(
                f"images are prepared by {self.folder.name}'s processor, which needs Pillow or torchvision ({error}); "
                f"install it with: {self._install}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{self.folder}: no image processor can be loaded: {error}; copy preprocessor_config.json (or "
                "processor_config.json) from the model"
            ) from error

    def run(self, images: Sequence[Image]) -> Any:
        """Return what the processor makes of images, as tensors by name."""
        return self.loaded(images=list(images), input_data_format="channels_last", return_tensors="pt")


class ImageCutter(LateProcessor):
    """Image processor of the Qwen-VL families, and the patches it cuts.

    Source: `smart_resize` of transformers 5.19, in the module of the model's image processor.
    """

    def __init__(self, folder: Path, load: Callable[[], Any], install: str) -> None:
        super().__init__(folder, load, install)
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
        made = self.run(images)
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        if grid.tolist() != [list(self.grid(image)) for image in images]:
            raise ModelError(f"{self.folder}: {type(self.loaded).__name__} cuts images otherwise than it declares")
        return pixels, grid

    def _cut(self, height: int, width: int) -> Grid:
        processor = self.loaded
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        resize = import_module(type(processor).__module__).smart_resize
        try:
            size = resize(height, width, factor=processor.patch_size * processor.merge_size, **limits)
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error
        return 1, size[0] // processor.patch_size, size[1] // processor.patch_size


Indices = npt.NDArray[np.int64]


class ImagePlaces:
    """Places of images in the sequences that train one vision-language model; positions count tokens.

    Args:
        image_id: of the placeholder token.
        num_tokens: placeholders of an image.
    """

    def __init__(self, image_id: int, num_tokens: Callable[[Image], int]) -> None:
        self._image_id, self._num_tokens = image_id, num_tokens

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse placeholders that are not those of the images.

        Raises:
            DataError: other runs of placeholder tokens than the images take.
            ModelError, BackendError: the image processor cannot be loaded.
        """
        for index, sequence in enumerate(sequences):
            wanted = [self._num_tokens(image) for image in sequence.images]
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
        """[T]: one after the other."""
        return np.arange(len(sequence.ids))
