"""Where images stand among the tokens of a sequence: as runs of one placeholder id, a run for each image.

Shapes: T tokens of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import DataError
from offbeat_types._image_cutter import Grid, ImageCutter
from offbeat_types._training import TrainSequence

Indices = npt.NDArray[np.int64]
RopeIndex = Callable[[Indices, npt.NDArray[np.int32], list[Grid]], Indices]
"""From [1, T] ids, [1, T] kinds (1 for a token of an image) and the grids of the images to [3, T] positions."""


class ImagePlaces:
    """Of the sequences that train one vision-language model of the Qwen-VL families.

    Args:
        config: transformers' configuration of the model.
        cutter: of its images.
        rope_index: computes positions, as transformers' `get_rope_index` does.

    Attributes:
        blank_shape: (patches, values) of the smallest image.
        blank_grid: patches of it in time, height and width.
    """

    def __init__(self, config: Any, cutter: ImageCutter, rope_index: RopeIndex) -> None:
        vision = config.vision_config
        self._image_id: int = config.image_token_id
        self._cutter, self._rope_index = cutter, rope_index
        merge: int = vision.spatial_merge_size
        self._patches_of_token = merge**2
        self.blank_shape = (merge**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        self.blank_grid: Grid = (1, merge, merge)

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse placeholders that are not those of the images.

        Raises:
            DataError: other runs of placeholder tokens than the images take.
            ModelError, BackendError: the image processor cannot be loaded.
        """
        for index, sequence in enumerate(sequences):
            wanted = [math.prod(self._cutter.grid(image)) // self._patches_of_token for image in sequence.images]
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
        grids = [self._cutter.grid(image) for image in sequence.images]
        return self._rope_index(sequence.ids.astype(np.int64)[None], kinds, grids)
