"""Images of a request: prepared by the model's own processor, seen by transformers' tower, placed by its positions.

Only a vision-language model needs transformers; models for text are decoded without it.

Shapes: P prompt tokens, M placeholder tokens, I images.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_types import BackendError, DataError, GenerateRequest, ImageCutter, ModelError, ScoreRequest

Indices = npt.NDArray[np.int64]


@dataclass(eq=False)
class Pictures:
    """The images of one request.

    Args:
        pixels: [patches, values] as the model's image processor cuts them.
        grid: [I, 3] patches of each image in time, height and width.
        place_M: [M] which prompt tokens are placeholders.
        positions_3P: position of each prompt token in time, height and width.
        offset: what to add to the place of a later token to have its position: at most 0.
        seen: what the tower made of them under the present weights, each [M, hidden]; empty before it has looked.
    """

    pixels: Tensor
    grid: Tensor
    place_M: Indices
    positions_3P: Indices
    offset: int
    seen: tuple[Tensor, ...] = ()


def look(pictures: Pictures, tower: Any) -> tuple[Tensor, ...]:
    """What the tower makes of the images: in the place of embeddings, and for each of the first layers."""
    if not pictures.seen:
        found = tower(pictures.pixels.to(tower.dtype), grid_thw=pictures.grid)
        pictures.seen = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
    return pictures.seen


def build_tower(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The vision tower of a model folder, with memory for its weights and nothing in it."""
    whole = _outline(folder, dtype)
    tower = whole.model.visual.to_empty(device=device).eval()
    for module in tower.modules():
        if module._non_persistent_buffers_set:  # rotary frequencies, computed as transformers itself does
            whole._init_weights(module)
    return tower


class Eyes:
    """What a model's folder says of images. Holds no weights; may be used from several threads.

    Args:
        folder: of a vision-language model.

    Raises:
        BackendError: transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._backbone = _outline(folder, torch.float32).model
        self._cutter = ImageCutter(folder, partial(_load_processor, folder), _INSTALL)
        config = self._backbone.config
        self._image_id: int = config.image_token_id
        self._merged: int = config.vision_config.spatial_merge_size**2

    def prepare(self, request: GenerateRequest | ScoreRequest, device: torch.device) -> Pictures | None:
        """Prepare the images of a request; None when it has none.

        Raises:
            DataError: the prompt holds other placeholder tokens than the images take.
        """
        ids = np.asarray(request.prompt_ids)
        place_M = np.flatnonzero(ids == self._image_id)
        runs = np.split(place_M, np.flatnonzero(np.diff(place_M) > 1) + 1) if len(place_M) else []
        wanted = [math.prod(self._cutter.grid(image)) // self._merged for image in request.images]
        if wanted != [len(run) for run in runs]:
            raise DataError(
                f"request {request.request_id!r}: its images take {wanted} placeholder tokens (id {self._image_id}) "
                f"one after the other, and the prompt holds runs of {[len(run) for run in runs]}; give the ids that "
                "the model's processor makes of prompt and images"
            )
        if not request.images:
            return None
        pixels, grid = self._cutter.prepare(request.images)
        is_image = torch.from_numpy((ids == self._image_id).astype(np.int32))[None]
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        positions, offset = self._backbone.get_rope_index(tokens, is_image, image_grid_thw=grid)
        return Pictures(
            pixels=pixels.to(device),
            grid=grid.to(device),
            place_M=place_M,
            positions_3P=positions[:, 0].numpy(),
            offset=int(offset),
        )


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)


_INSTALL = 'pip install "offbeat-rollout-torch[vision]"'


def _outline(folder: Path, dtype: torch.dtype) -> Any:
    """The whole model of a folder, as transformers builds it, without memory for weights."""
    try:
        from transformers import AutoConfig, AutoModelForImageTextToText
    except ImportError as error:
        raise BackendError(
            f"a vision-language model needs transformers and Pillow; install them with: {_INSTALL}"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: transformers cannot build a vision-language model from it: {error}") from error
