"""Images: where they stand among tokens, at which positions, and what the vision tower is given of them.

The tower, the positions and the preparation of pixels are transformers' own; here is what packing has to know of them.

Shapes: T tokens of a sequence, I images, P patches, C values of a patch.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_types import Image, ImageCutter, ImagePlaces

_INSTALL: Final = 'pip install "offbeat-engine-megatron[vision]"'


class Images(ImagePlaces):
    """What is known of a model's images.

    Source: transformers 5.19, models/qwen3_vl and models/qwen2_5_vl (get_rope_index, get_image_features).

    Args:
        hf_config: of a vision-language model of the Qwen-VL families.
        model_path: its folder, with the configuration of its image processor.
    """

    def __init__(self, hf_config: Any, model_path: str) -> None:
        folder = Path(model_path).expanduser()
        self._config = hf_config
        cutter = ImageCutter(folder, partial(_load_processor, folder), _INSTALL)
        super().__init__(hf_config, cutter, self._find_positions)

    def pixels(self, images: Sequence[Image]) -> tuple[Tensor, Tensor]:
        """[P, C] pixels and [I, 3] grids of images; without any, of the smallest blank one, for a tower that trains."""
        if not images:
            return torch.zeros(self.blank_shape), torch.tensor([self.blank_grid])
        pixels, grid = self._cutter.prepare(images)
        return pixels, grid

    def _find_positions(self, ids: Any, kinds: Any, grids: Any) -> Any:
        tokens, marks = torch.from_numpy(ids), torch.from_numpy(kinds)
        found, _ = self._outline.get_rope_index(tokens, marks, image_grid_thw=torch.tensor(grids))
        return found[:, 0].numpy()

    @cached_property
    def _outline(self) -> Any:
        """The model of transformers without memory: it computes positions from its configuration."""
        from transformers import AutoModel

        with torch.device("meta"):
            return AutoModel.from_config(self._config)


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
