"""Images of vision-language models: where they stand among tokens, at which positions, and what their towers are given.

Positions and the preparation of pixels are transformers' own; here is what packing has to know of them. A family of
models is one class.

Shapes: T tokens of a sequence, I images, P patches (of an image, or of all), C values of a patch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import DataError, Image, ImageCutter, ImagePlaces, LateProcessor, ModelError, TrainSequence

Indices = npt.NDArray[np.int64]


class ImageInputs(Protocol):
    """Facts about images that packing needs of a model: `NoImages`, `ImageProcessor`, or another family's."""

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Raise DataError for images or placeholders that the model cannot take."""
        ...

    def positions(self, sequence: TrainSequence) -> Indices:
        """Position of each token, [T] or, with the axes time, height and width, [3, T]."""
        ...

    def spans(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """(start, stop) of the placeholder tokens of each image."""
        ...


class VisionInputs(ImageInputs, Protocol):
    """Facts about images of a model that takes some, and what its tower is given."""

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, ...]:
        """Arguments of transformers' `get_image_features`; without images, those of a blank one.

        The blank one is for a rank that has no image, but must meet the others in the vision tower.
        """
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
        folder, vision = Path(model_path).expanduser(), hf_config.vision_config
        self._find, self._cutter = rope_index, ImageCutter(folder, partial(_load_processor, folder), install)
        self._merge: int = vision.spatial_merge_size
        self._patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        super().__init__(hf_config.image_token_id, lambda image: math.prod(self._cutter.grid(image)) // self._merge**2)

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """[P, C] pixels and [I, 3] grids of images; without any, of the smallest blank one."""
        if not images:
            grid = (1, self._merge, self._merge)
            return torch.zeros(self._merge**2, self._patch_values), torch.tensor([grid])
        pixels, grids = self._cutter.prepare(images)
        return pixels, grids

    def positions(self, sequence: TrainSequence) -> Indices:
        """[3, T]: position in time, height and width; equal but within images, as transformers computes them."""
        if not sequence.images:
            return np.tile(np.arange(len(sequence.ids)), (3, 1))
        kinds_T = torch.zeros(len(sequence.ids), dtype=torch.int32)
        for start, stop in self.spans(sequence):
            kinds_T[start:stop] = 1
        grids = torch.tensor([self._cutter.grid(image) for image in sequence.images])
        ids_T = torch.from_numpy(sequence.ids.astype(np.int64))
        found: Indices = self._find(ids_T[None], kinds_T[None], image_grid_thw=grids)[0][:, 0].numpy()
        return found


class Gemma3Images(ImagePlaces):
    """Image processor of Gemma 3: each image is one square of pixels, and as many tokens.

    Source: transformers 5.19, models/gemma3 (processing, Gemma3MultiModalProjector).

    Args:
        hf_config: of the model.
        model_path: its folder, with the configuration of its image processor.
        install: what to run where pillow is missing.
    """

    def __init__(self, hf_config: Any, model_path: str, install: str) -> None:
        folder = Path(model_path).expanduser()
        self._processor = LateProcessor(folder, partial(_load_processor, folder), install)
        self._side: int = hf_config.vision_config.image_size
        super().__init__(hf_config.image_token_id, lambda _: int(hf_config.mm_tokens_per_image))

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor]:
        """[I, 3, side, side] pixels; without images, of a blank one.

        Raises:
            ModelError: the processor cuts images into several, or makes them of another size than the tower's.
        """
        if not images:
            return (torch.zeros(1, 3, self._side, self._side),)
        pixels: Tensor = self._processor.run(images)["pixel_values"]
        wanted = (len(images), 3, self._side, self._side)
        if tuple(pixels.shape) != wanted:
            raise ModelError(
                f"{self._processor.folder}: the image processor must make pixels {list(wanted)} of {len(images)} "
                f"images, and makes {list(pixels.shape)}: set its size to the tower's, and do_pan_and_scan to false"
            )
        return (pixels,)


class Gemma4Images(ImagePlaces):
    """Image processor of Gemma 4: of an image's patches, `pooling_kernel_size` squared are one token.

    Source: transformers 5.19, models/gemma4 (image_processing_gemma4.py, Gemma4VisionPooler).

    Args:
        hf_config: of the model.
        model_path: its folder, with the configuration of its image processor.
        install: what to run where pillow is missing.
    """

    def __init__(self, hf_config: Any, model_path: str, install: str) -> None:
        folder, vision = Path(model_path).expanduser(), hf_config.vision_config
        self._processor = LateProcessor(folder, partial(_load_processor, folder), install)
        self._pooled, self._patch_values = vision.pooling_kernel_size, 3 * vision.patch_size**2
        super().__init__(hf_config.image_token_id, self._count)

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """[I, P, C] pixels and [I, P, 2] places of patches, padded to as many; without images, of one blank token."""
        if not images:
            side = torch.arange(self._pooled)
            return torch.zeros(1, self._pooled**2, self._patch_values), torch.cartesian_prod(side, side)[None]
        made = self._processor.run(images)
        return made["pixel_values"], made["image_position_ids"]

    def _count(self, image: Image) -> int:
        processor = self._processor.loaded
        side, most = processor.pooling_kernel_size, processor.max_soft_tokens
        resize = import_module(type(processor).__module__).get_aspect_ratio_preserving_size
        height, width = image.shape[:2]
        try:
            size = resize(height, width, processor.patch_size, most * side**2, side)
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error
        return int(math.prod(size) // (processor.patch_size * side) ** 2)


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
