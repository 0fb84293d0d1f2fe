"""Where each Hugging Face tensor lies among the ranks, and how it lies in megatron-core's parameters.

A slot is one tensor of a Hugging Face checkpoint: the place that holds it, the megatron-core parameter it is part of,
and how it is cut. Loading and export both go by the same list, which is equal on all ranks.
Source: megatron/core/transformer/attention.py (queries, keys and values interleaved by group) and mlp.py (gate, up).

Shapes: E hidden size, D head size.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from torch import Tensor

from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._shape import ModelShape

TOWER: Final = "model.visual."
"""What Hugging Face names of the vision tower's tensors begin with."""


@dataclass(frozen=True, kw_only=True)
class ParameterPath:
    """A parameter of megatron-core: pipeline stage, part of the model on it, name within that part."""

    stage: int
    part: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One Hugging Face tensor.

    Args:
        name: in Hugging Face checkpoints.
        shape: of the whole tensor.
        place: that exports it.
        copies: other places that hold the same, such as the head of a tied model on the last stage.
        lies: as all of the parameter, or as its "q", "k", "v", "gate" or "up".
        tp_dim: dimension that tp ranks share; None where each holds all of it.
        owner: ep rank that holds it; None where all do.
    """

    name: str
    shape: tuple[int, ...]
    place: ParameterPath
    copies: tuple[ParameterPath, ...] = ()
    lies: str = ""
    tp_dim: int | None = None
    owner: int | None = None

    def part_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of what one tp rank holds."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape)


def view_of(slot: Slot, parameter: Tensor, shape: ModelShape, tp: int) -> Tensor:
    """The slot's values in a parameter of this rank, as a view; `part_shape` is the shape to give them."""
    if slot.lies in ("gate", "up"):
        return parameter.view(2, -1, *parameter.shape[1:])[int(slot.lies == "up")]
    if slot.lies:
        heads = shape.num_heads // shape.num_groups
        groups = parameter.view(shape.num_groups // tp, heads + 2, shape.head_size, *parameter.shape[1:])
        return {"q": groups[:, :heads], "k": groups[:, heads], "v": groups[:, heads + 1]}[slot.lies]
    return parameter


def list_slots(shape: ModelShape, parallel: Parallel) -> list[Slot]:
    """All tensors of the model, in the order in which they are loaded and exported."""
    return list(_slots(shape, parallel))


def _slots(shape: ModelShape, parallel: Parallel) -> Iterator[Slot]:
    table = (shape.vocabulary, shape.hidden_size)
    first = ParameterPath(stage=0, part=0, path="embedding.word_embeddings.weight")
    head = ParameterPath(stage=parallel.pp - 1, part=parallel.vpp - 1, path="output_layer.weight")
    last = ParameterPath(stage=head.stage, part=head.part, path=first.path)
    copies = (last if shape.mtp_layers else head,) if parallel.pp > 1 and (shape.tied or shape.mtp_layers) else ()
    for name, size in shape.tower:
        place = ParameterPath(stage=0, part=0, path=f"visual.{name}")
        yield Slot(name=f"{TOWER}{name}", shape=size, place=place)
    yield Slot(name=f"{shape.stem}.embed_tokens.weight", shape=table, place=first, copies=copies, tp_dim=0)
    for layer in range(shape.num_layers):
        sparse = bool(shape.num_experts) and shape.sparse_layers[layer]
        yield from _layer_slots(shape, parallel, _Maker(shape, parallel, layer), sparse=sparse)
    norm = ParameterPath(stage=head.stage, part=head.part, path="decoder.final_layernorm.weight")
    yield Slot(name=f"{shape.stem}.norm.weight", shape=(shape.hidden_size,), place=norm)
    if not shape.tied:
        yield Slot(name="lm_head.weight", shape=table, place=head, tp_dim=0)


def list_ahead_slots(shape: ModelShape, parallel: Parallel) -> list[Slot]:
    """Tensors of the layers of multi-token prediction, under the names that DeepSeek-V3's checkpoints give them.

    They come after the model's own layers; embedding and head are the model's. Source: the weights' README of
    deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md), "MTP modules".
    """
    return [slot for layer in range(shape.mtp_layers) for slot in _ahead_slots(shape, parallel, layer)]


def _ahead_slots(shape: ModelShape, parallel: Parallel, layer: int) -> Iterator[Slot]:
    hidden, sparse = shape.hidden_size, bool(shape.num_experts) and shape.sparse_layers[-1]
    around = _AheadMaker(shape, parallel, layer, path="")
    yield around("enorm.weight", (hidden,), "enorm.weight")
    yield around("hnorm.weight", (hidden,), "hnorm.weight")
    yield around("eh_proj.weight", (hidden, 2 * hidden), "eh_proj.weight", tp_dim=0)
    yield from _layer_slots(
        shape, parallel, _AheadMaker(shape, parallel, layer, path="transformer_layer."), sparse=sparse
    )
    yield around("shared_head.norm.weight", (hidden,), "final_layernorm.weight")


def _layer_slots(shape: ModelShape, parallel: Parallel, make: "_Maker", *, sparse: bool) -> Iterator[Slot]:
    hidden, head = shape.hidden_size, shape.head_size
    rows = {"q": shape.num_heads * head, "k": shape.num_groups * head, "v": shape.num_groups * head}
    for lies, size in rows.items():
        for kind, tail in (("weight", (hidden,)), *([("bias", ())] if shape.qkv_bias else [])):
            path = f"self_attention.linear_qkv.{kind}"
            yield make(f"self_attn.{lies}_proj.{kind}", (size, *tail), path, lies=lies, tp_dim=0)
    yield make("self_attn.o_proj.weight", (hidden, rows["q"]), "self_attention.linear_proj.weight", tp_dim=1)
    for lies in ("q", "k") if shape.qk_norm else ():
        yield make(f"self_attn.{lies}_norm.weight", (head,), f"self_attention.{lies}_layernorm.weight")
    if sparse:
        yield from _expert_slots(shape, parallel, make)
    else:
        yield from _feed_forward(make, "mlp", "mlp", shape.ffn_size, hidden, {"gate": 0, "up": 0, "down": 1}, None)
    yield make("input_layernorm.weight", (hidden,), "input_layernorm.weight")
    yield make("post_attention_layernorm.weight", (hidden,), "pre_mlp_layernorm.weight")


def _expert_slots(shape: ModelShape, parallel: Parallel, make: "_Maker") -> Iterator[Slot]:
    yield make("mlp.gate.weight", (shape.num_experts, shape.hidden_size), "mlp.router.weight")
    held = shape.num_experts // parallel.ep
    for expert in range(shape.num_experts):
        path = f"mlp.experts.local_experts.{expert % held}"
        owner = expert // held if parallel.ep > 1 else None
        name = f"mlp.experts.{expert}"
        yield from _feed_forward(make, name, path, shape.expert_size, shape.hidden_size, {}, owner)


def _feed_forward(
    make: "_Maker", name: str, path: str, width: int, hidden: int, tp_dims: dict[str, int], owner: int | None
) -> Iterator[Slot]:
    for lies in ("gate", "up"):
        rest: dict[str, Any] = {"lies": lies, "tp_dim": tp_dims.get(lies), "owner": owner}
        yield make(f"{name}.{lies}_proj.weight", (width, hidden), f"{path}.linear_fc1.weight", **rest)
    yield make(
        f"{name}.down_proj.weight",
        (hidden, width),
        f"{path}.linear_fc2.weight",
        tp_dim=tp_dims.get("down"),
        owner=owner,
    )


class _Maker:
    """Makes the slots of one layer: knows its place in the pipeline."""

    def __init__(self, shape: ModelShape, parallel: Parallel, layer: int) -> None:
        per_round, per_part = shape.num_layers // parallel.vpp, shape.num_layers // (parallel.vpp * parallel.pp)
        self._part, self._stage = layer // per_round, layer % per_round // per_part
        self._stem, self._path = f"{shape.stem}.layers.{layer}", f"decoder.layers.{layer % per_part}."

    def __call__(self, name: str, shape: tuple[int, ...], path: str, **rest: Any) -> Slot:
        place = ParameterPath(stage=self._stage, part=self._part, path=self._path + path)
        return Slot(name=f"{self._stem}.{name}", shape=shape, place=place, **rest)


class _AheadMaker(_Maker):
    """Makes the slots of one layer of multi-token prediction: all of them lie behind the last part."""

    def __init__(self, shape: ModelShape, parallel: Parallel, layer: int, *, path: str) -> None:
        self._stem = f"model.layers.{shape.num_layers + layer}"
        self._stage, self._part = parallel.pp - 1, parallel.vpp - 1
        self._path = f"mtp.layers.{layer}.{path}"


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
    layer: ParameterPath
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
