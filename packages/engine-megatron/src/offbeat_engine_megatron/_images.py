"""Images: where they stand among tokens, at which positions, and what the vision tower is given of them.

The tower, the positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, P patches, C values of a patch.
"""

import math
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat_engine_megatron._packing import Indices
from offbeat_types import (
    Image,
    ImageCutter,
    TrainSequence,
    check_placeholders,
    find_placeholders,
)


class Images:
    """What is known of a model's images.

    Source: transformers 5.19, models/qwen3_vl and models/qwen2_5_vl (get_rope_index, get_image_features).

    Args:
        hf_config: of a vision-language model of the Qwen-VL families.
        model_path: its folder, with the configuration of its image processor.
    """

    def __init__(self, hf_config: Any, model_path: str) -> None:
        vision = hf_config.vision_config
        self._config = hf_config
        folder = Path(model_path).expanduser()
        self._cutter = ImageCutter(
            folder, partial(_load_processor, folder), 'pip install "offbeat-engine-megatron[vision]"'
        )
        self._image_id: int = hf_config.image_token_id
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
        found, _ = self._outline.get_rope_index(ids, torch.from_numpy(kinds), image_grid_thw=grids)
        positions: Indices = found[:, 0].numpy()
        return positions

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """[P, C] pixels and [I, 3] grids of images; without any, of the smallest blank one, for a tower that trains."""
        if not images:
            return torch.zeros(self._merge**2, self._num_values), torch.tensor([[1, self._merge, self._merge]])
        pixels, grid = self._cutter.prepare(images)
        return pixels, grid

    @cached_property
    def _outline(self) -> Any:
        """The model of transformers without memory: it computes positions from its configuration."""
        from transformers import AutoModel

        with torch.device("meta"):
            return AutoModel.from_config(self._config)


_INSTALL = 'pip install "offbeat-engine-megatron[vision]"'


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
