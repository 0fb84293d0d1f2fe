"""Images of a request: prepared by the model's own processor, seen by transformers' tower, placed by its positions.

Only a vision-language model needs transformers; models for text are decoded without it.

Shapes: P prompt tokens, M placeholder tokens, I images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import BackendError, DataError, GenerateRequest, ImageCutter, ModelError, ScoreRequest

Indices = npt.NDArray[np.int64]


@dataclass(eq=False)
class RequestImages:
    """The images of one request.

    Args:
        pixels: [patches, values] as the model's image processor cuts them.
        grid: [I, 3] patches of each image in time, height and width.
        placeholders_M: [M] which prompt tokens are placeholders.
        positions_3P: position of each prompt token in time, height and width.
        offset: what to add to the place of a later token to have its position: at most 0.
        features: what the tower made of them under the present weights, each [M, hidden]; empty before it was asked.
    """

    pixels: Tensor
    grid: Tensor
    placeholders_M: Indices
    positions_3P: Indices
    offset: int
    features: tuple[Tensor, ...] = ()

    def encode(self, tower: Any) -> tuple[Tensor, ...]:
        """Return what the tower makes of the images: in the place of embeddings, and for each of the first layers."""
        if not self.features:
            found = tower(self.pixels.to(tower.dtype), grid_thw=self.grid)
            self.features = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        return self.features


def build_tower(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the vision tower of a model folder, with memory for its weights and nothing in it."""
    whole = _empty_model(folder, dtype)
    tower = whole.model.visual.to_empty(device=device).eval()
    for module in tower.modules():
        if module._non_persistent_buffers_set:  # rotary frequencies, computed as transformers itself does
            whole._init_weights(module)
    return tower


class ImageProcessor:
    """Image settings of a model's folder. Holds no weights; may be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self._backbone = _empty_model(folder, torch.float32).model
        self._cutter = ImageCutter(folder, partial(_load_processor, folder), _INSTALL)
        config = self._backbone.config
        self._image_id: int = config.image_token_id
        self._merged: int = config.vision_config.spatial_merge_size**2

    def prepare(self, request: GenerateRequest | ScoreRequest, device: torch.device) -> RequestImages | None:
        ids = np.asarray(request.prompt_ids)
        placeholders_M = np.flatnonzero(ids == self._image_id)
        runs = np.split(placeholders_M, np.flatnonzero(np.diff(placeholders_M) > 1) + 1) if len(placeholders_M) else []
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
        return RequestImages(
            pixels=pixels.to(device),
            grid=grid.to(device),
            placeholders_M=placeholders_M,
            positions_3P=positions[:, 0].numpy(),
            offset=int(offset),
        )


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)


_INSTALL = 'pip install "offbeat-rollout-torch[vision]"'


def _empty_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the whole model of a folder, as transformers builds it, without memory for weights."""
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


@dataclass(frozen=True)
class ImageInputs:
    """Features that the vision tower has made of the images in one pass.

    Args:
        placeholders_M: [M] int64, which tokens of the pass stand for images.
        embeds_MH: what is in the place of their embeddings.
        deeper: [M, hidden] each, added to what the first layers give (Qwen3-VL; none in Qwen2.5-VL).
    """

    placeholders_M: Tensor
    embeds_MH: Tensor
    deeper: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class TokenRange:
    """Consecutive tokens of one sequence in a pass.

    Args:
        images: of its prompt; None without any.
        first: place of the first of them in the sequence.
        num_tokens: how many.
    """

    images: RequestImages | None
    first: int
    num_tokens: int


def token_rotations(ranges: Sequence[TokenRange], rotations_PC2: Tensor, axes_C: Tensor) -> Tensor | None:
    """[N, C, 2], where positions have axes; None where the place in the cache says it all."""
    if not len(axes_C):
        return None
    positions_3N = np.concatenate([_positions(each) for each in ranges], 1)
    by_pair_CN = torch.from_numpy(positions_3N).to(axes_C.device).index_select(0, axes_C)
    return rotations_PC2.gather(0, by_pair_CN.T[..., None].expand(-1, -1, 2))


def _positions(tokens: TokenRange) -> npt.NDArray[np.int64]:
    """[3, num_tokens]: in time, height and width."""
    start, num_tokens, images = tokens.first, tokens.num_tokens, tokens.images
    index = np.arange(start, start + num_tokens)
    if images is None:
        return np.tile(index, (3, 1))
    found = np.tile(index + images.offset, (3, 1))
    of_prompt = images.positions_3P[:, start : start + num_tokens]
    found[:, : of_prompt.shape[1]] = of_prompt
    return found


def gather_image_inputs(ranges: Sequence[TokenRange], tower: Any, device: torch.device) -> ImageInputs | None:
    """Return what the tower made of those tokens of the pass that stand for images; None where there are none."""
    indices: list[Tensor] = []
    features: list[tuple[Tensor, ...]] = []
    start = 0
    for each in ranges:
        if (images := each.images) is not None:
            offsets = images.placeholders_M - each.first
            there = np.flatnonzero((offsets >= 0) & (offsets < each.num_tokens))
            if len(there):
                rows = torch.from_numpy(there).to(device)
                indices.append(torch.from_numpy(offsets[there] + start).to(device))
                features.append(tuple(layer.index_select(0, rows) for layer in images.encode(tower)))
        start += each.num_tokens
    if not indices:
        return None
    embeds, *deeper = (torch.cat(layer) for layer in zip(*features, strict=True))
    return ImageInputs(torch.cat(indices), embeds, tuple(deeper))
