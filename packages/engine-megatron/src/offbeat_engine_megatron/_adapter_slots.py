"""Where the low-rank adapters of a model lie among the ranks: beside the weights that they change."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from offbeat_engine_megatron._slots import Place, Slot

WEIGHT: Final = ".weight"


@dataclass(frozen=True, kw_only=True)
class AdapterSlot:
    """One side of an adapter.

    Args:
        slot: of the tensor, named as the layer with `.lora_A` or `.lora_B`.
        layer: megatron-core's layer that it belongs to; `path` is a module's.
        weight: the slot of the weight that it changes.
    """

    slot: Slot
    layer: Place
    weight: Slot


def list_adapter_slots(weights: Iterable[Slot], rank: int) -> list[AdapterSlot]:
    """Both sides of the adapter of every linear layer in the blocks, in the order of the weights.

    Args:
        weights: the model's.
        rank: of the updates.
    """
    return [each for weight in weights if _is_adapted(weight) for each in _sides(weight, rank)]


def _is_adapted(weight: Slot) -> bool:
    inside = weight.name.startswith("model.layers.") and weight.name.endswith("_proj.weight")
    return inside and ".experts." not in weight.name


def _sides(weight: Slot, rank: int) -> Iterator[AdapterSlot]:
    """A meets what goes into the layer, B what comes out of it; the side where ranks share the layer is cut too."""
    layer = dataclasses.replace(weight.place, path=weight.place.path.removesuffix(WEIGHT))
    rows, columns = weight.shape
    for side, shape, meets in (("A", (rank, columns), 1), ("B", (rows, rank), 0)):
        slot = Slot(
            name=f"{weight.name.removesuffix(WEIGHT)}.lora_{side}",
            shape=shape,
            place=dataclasses.replace(layer, path=f"{layer.path}.adapter.{weight.lies or 'all'}_{side}"),
            tp_dim=meets if weight.tp_dim == meets else None,
        )
        yield AdapterSlot(slot=slot, layer=layer, weight=weight)
