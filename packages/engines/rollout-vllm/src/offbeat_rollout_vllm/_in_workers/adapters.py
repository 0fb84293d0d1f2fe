"""Runs in vLLM's workers: where the matrices of LoRA adapters lie, and their values there.

Each layer holds the matrices of all adapters, padded with zeros to the largest rank; of a layer that fuses several of
the trainer's, each part has its own. Tensor-parallel ranks have columns of A where the layer is row parallel, else rows
of B, and the rest whole.

Source: vllm 0.32.0, vllm/lora/model_manager.py (LoRAModelManager.modules, lora_index_to_id) and
vllm/lora/layers/base_linear.py, column_parallel_linear.py (lora_a_stacked, lora_b_stacked: [slot, 1, rows, columns]).
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_rollout_vllm._in_workers.weights import HeldWeights, TensorLocation

DOWN: Final = ".lora_A."
PEFT_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class AdapterLocation:
    """A rank's part of an adapter's matrix, and where it lies within the whole: see `TensorLocation`."""

    held: Tensor
    dim: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)


class HeldAdapter:
    """The matrices of one adapter on one worker, by the trainer's names."""

    def __init__(self, manager: Any, weights: HeldWeights, number: int) -> None:
        if manager.lora_config.fully_sharded_loras:
            raise ValueError("adapters cannot be read back with fully_sharded_loras; leave that option out")
        self._layers = {id(layer.base_layer): layer for layer in manager.modules.values()}
        self._weights, self._slot = weights, manager.lora_index_to_id.index(number)

    def find(self, name: str) -> AdapterLocation:
        is_down = DOWN in name
        target = name.removeprefix(PEFT_PREFIX).replace(DOWN, ".").replace(".lora_B.", ".")
        location = self._weights.find(target)
        layer = self._layers.get(id(location.module))
        if layer is None:
            raise KeyError(f"vLLM does not adapt the layer of {name}")
        part = _part(layer, location)
        held = (layer.lora_a_stacked if is_down else layer.lora_b_stacked)[part][self._slot, 0]
        split = (location.dim == 1) == is_down
        ((start, _),) = location.pieces
        dim = 1 if is_down else 0
        return AdapterLocation(held=held, dim=dim, pieces=((start if split else 0, held.shape[dim]),))

    def dtype_of(self, location: AdapterLocation) -> torch.dtype:
        return location.held.dtype

    def read(self, name: str) -> Tensor:
        return self.find(name).held


def _part(layer: Any, location: TensorLocation) -> int:
    """Return which of the matrices fused in a layer it is: the one that begins at the location's first row."""
    starts = [sum(layer.output_slices[:index]) for index in range(layer.n_slices)]
    return starts.index(location.first_row)
