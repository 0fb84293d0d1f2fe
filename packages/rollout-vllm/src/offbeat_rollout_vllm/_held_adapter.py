"""Runs in vLLM's workers: where a LoRA adapter's matrices lie within the engine's.

Each layer holds the matrices of all adapters, padded with zeros to the largest rank; of a layer that fuses several of
the trainer's, each part has its own. Tensor-parallel ranks have columns of A where the layer is row parallel, else rows
of B, and the rest whole.

Source: vllm 0.32.0, vllm/lora/model_manager.py (LoRAModelManager.modules, lora_index_to_id) and
vllm/lora/layers/base_linear.py, column_parallel_linear.py (lora_a_stacked, lora_b_stacked: [slot, 1, rows, columns]).
"""

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from offbeat_rollout_vllm._held import HeldWeights
from offbeat_rollout_vllm._place import Place

DOWN: Final = ".lora_A."
PEFT_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class AdapterPlace:
    """Where this rank's part of an adapter's matrix lies: the fields of `Place` that a reader needs.

    Args:
        held: this rank's part itself.
        dim: along which ranks have different parts.
        start: of this rank's part within the whole, along `dim`.
    """

    held: Tensor
    dim: int
    start: int

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The one run that it is."""
        return ((self.start, self.shape[self.dim]),)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return tuple(self.held.shape)


class HeldAdapter:
    """The matrices of one adapter on one worker, by the trainer's names.

    Args:
        manager: vLLM's, of all adapters.
        weights: of the model.
        number: vLLM's of the adapter.
    """

    def __init__(self, manager: Any, weights: HeldWeights, number: int) -> None:
        if manager.lora_config.fully_sharded_loras:
            raise ValueError("adapters cannot be read back with fully_sharded_loras; leave that option out")
        self._layers = {id(layer.base_layer): layer for layer in manager.modules.values()}
        self._weights, self._slot = weights, manager.lora_index_to_id.index(number)

    def find(self, name: str) -> AdapterPlace:
        """Where the trainer's tensor `name` lies.

        Raises:
            KeyError: the model has no such layer, or one that vLLM does not adapt.
        """
        is_down = DOWN in name
        target = name.removeprefix(PEFT_PREFIX).replace(DOWN, ".").replace(".lora_B.", ".")
        place = self._weights.find(target)
        layer = self._layers.get(id(place.module))
        if layer is None:
            raise KeyError(f"vLLM does not adapt the layer of {name}")
        part = _part(layer, place)
        held = (layer.lora_a_stacked if is_down else layer.lora_b_stacked)[part][self._slot, 0]
        split = (place.dim == 1) == is_down
        ((start, _),) = place.pieces
        return AdapterPlace(held=held, dim=1 if is_down else 0, start=start if split else 0)

    def read(self, name: str) -> Tensor:
        """Return this rank's part of the trainer's tensor `name`, as it serves."""
        return self.find(name).held

    def forget(self) -> None:
        """Nothing is kept from reading."""


def _part(layer: Any, place: Place) -> int:
    """Which of the matrices fused in a layer it is: the one that begins at the place's first row."""
    starts = [sum(layer.output_slices[:index]) for index in range(layer.n_slices)]
    return starts.index(place.first_row)
