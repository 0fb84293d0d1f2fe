"""A model and how it is asked: turns packs into log-probabilities and entropies."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_engine_torch._model import CausalModel, HeadQuery, ImagePatches
from offbeat_engine_torch._options import TorchEngineOptions
from offbeat_engine_torch._pieces import Piece
from offbeat_engine_torch._rows import AttentionPlan
from offbeat_engine_torch._sharding import free_gathered
from offbeat_mesh import Device
from offbeat_training import Family, ImageProcessor, MicroBatch, NoImages, lay_out, without_lora
from offbeat_types import TrainEngineConfig, TrainSequence

_INSTALL: Final = 'pip install "offbeat-engine-torch[vision]"'

FORMATS = {"float32": None, "bfloat16": torch.bfloat16}


class Policy:
    """One set of weights on one device, or this rank's part of it.

    Args:
        model: whole, or cut over a mesh.
        pieces: what of it this rank holds.
        device: where it computes.
        config: number format.
        options: temperature, head and entropy.
    """

    def __init__(
        self,
        model: CausalModel,
        pieces: Sequence[Piece],
        device: Device,
        config: TrainEngineConfig,
        options: TorchEngineOptions,
    ) -> None:
        self.model, self.pieces = model, pieces
        backbone: Any = model.backbone
        self.images = (
            NoImages()
            if model.tower is None
            else ImageProcessor(backbone.config, config.model_path, backbone.get_rope_index, _INSTALL)
        )
        self.kernel: str = getattr(device, "packed_attention", "rows")
        self._device, self._options = device.torch_device, options
        self._autocast = FORMATS[config.dtype]

    @property
    def vocabulary_size(self) -> int:
        """Rows of the vocabulary head: token ids are below it."""
        return self.model.head.out_features

    def ask(self, pack: MicroBatch, *, through_tower: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] and entropies [N] of a pack's loss tokens.

        Args:
            pack: one micro-batch.
            through_tower: run the vision tower though the pack has no image, because another rank's has one.
        """
        query = HeadQuery(
            predictor_N=self.tensor(pack.predictor_N),
            target_N=self.tensor(pack.target_N),
            temperature=self._options.temperature,
            coarse=self._options.head_dtype == "bfloat16",
            entropy_gradient=self._options.entropy_gradient,
        )
        ids, positions = self.tensor(pack.ids_T), self.tensor(pack.positions_T)
        plan = AttentionPlan(pack.segments, self._device)
        patches = self._patches(pack) if pack.images or through_tower else None
        answer: tuple[Tensor, Tensor] = self.model(ids, positions, plan, self.kernel, query, self._autocast, patches)
        return answer

    def _patches(self, pack: MicroBatch) -> ImagePatches:
        assert isinstance(self.images, ImageProcessor), "a model without a vision tower was asked to look"
        pixels, grid = self.images.pixels(pack.images)
        return ImagePatches(
            pixels_PC=pixels.to(self._device), grid_I3=grid.to(self._device), place_M=self.tensor(pack.place_M)
        )

    def without_adapters(self) -> AbstractContextManager[None]:
        """Ask the base model."""
        return without_lora(self.model)

    def settle(self) -> None:
        """Drop what asking without a backward pass has left."""
        free_gathered(self.model)

    def lay_out(self, sequences: Sequence[TrainSequence], families: Sequence[Family]) -> MicroBatch:
        """Lay out one micro-batch for this model."""
        return lay_out(sequences, families, self.images)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Put an array onto the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
