"""Tensors of Hugging Face checkpoints, and where each lies among the ranks.

A slot is one tensor: the place that holds it, the megatron-core parameter it is part of, and how it is cut. Loading and
export both go by the same list, which is equal on all ranks: every rank makes the same calls in the same order.
Source: megatron/core/transformer/attention.py (queries, keys and values interleaved by group), mlp.py (gate, up) and
moe/experts.py (experts of TransformerEngine's grouped layers); `offbeat_engine_megatron._layers.experts`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor

from offbeat_engine_megatron._kernels import GROUPED, GROUPED_TE, SEQUENTIAL
from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._shape import LatentShape, ModelShape
from offbeat_training import CutTensor

TOWER: Final = "model.visual."
"""Beginning of the Hugging Face names of the vision tower's tensors."""


class ParameterPath(NamedTuple):
    """A parameter of megatron-core: pipeline stage, part of the model on it, name within that part."""

    stage: int
    part: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Slot(CutTensor):
    """One Hugging Face tensor, and where ranks hold it.

    Args:
        place: that exports it.
        copies: other places that hold the same, such as the head of a tied model on the last stage.
        lies: as all of the parameter, or as its "q", "k", "v", "gate" or "up".
        owner: ep rank that holds it; None where all do.
        expert: which of the experts in a parameter that holds all of a rank; None where it holds one, or none.
        frozen: a bias of routers: no gradient moves it, and it stays in float32 whatever is asked for.
    """

    place: ParameterPath
    copies: tuple[ParameterPath, ...] = ()
    lies: str = ""
    owner: int | None = None
    expert: int | None = None
    frozen: bool = False

    def part_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of what one tp rank holds."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))


def view_of(slot: Slot, parameter: Tensor, shape: ModelShape, tp: int) -> Tensor:
    """Return the slot's values in a parameter of this rank, as a view; `part_shape` is the shape to give them."""
    if slot.expert is not None:
        parameter = parameter[slot.expert]
    if slot.lies in ("gate", "up"):
        return parameter.view(2, -1, *parameter.shape[1:])[int(slot.lies == "up")]
    if slot.lies:
        heads = shape.num_heads // shape.num_groups
        groups = parameter.view(shape.num_groups // tp, heads + 2, shape.head_size, *parameter.shape[1:])
        return {"q": groups[:, :heads], "k": groups[:, heads], "v": groups[:, heads + 1]}[slot.lies]
    return parameter


def list_slots(shape: ModelShape, parallel: Parallel, experts: str = SEQUENTIAL) -> Iterator[Slot]:
    """All tensors of the model, in the order in which they are loaded and exported; `experts` is of `Kernels`.

    Frozen ones come last, so that buckets of one format are long.
    """
    yield from sorted(_model_slots(shape, parallel, experts), key=lambda slot: slot.frozen)


def _model_slots(shape: ModelShape, parallel: Parallel, experts: str) -> Iterator[Slot]:
    table = (shape.vocabulary, shape.hidden_size)
    first = ParameterPath(0, 0, "embedding.word_embeddings.weight")
    head = ParameterPath(parallel.pp - 1, parallel.vpp - 1, "output_layer.weight")
    last = head._replace(path=first.path)
    copies = (last if shape.mtp_layers else head,) if parallel.pp > 1 and (shape.tied or shape.mtp_layers) else ()
    for name, size in shape.tower:
        yield Slot(name=f"{TOWER}{name}", shape=size, place=ParameterPath(0, 0, f"visual.{name}"))
    yield Slot(name=f"{shape.stem}.embed_tokens.weight", shape=table, place=first, copies=copies, tp_dim=0)
    per_round, per_part = shape.num_layers // parallel.vpp, shape.num_layers // (parallel.vpp * parallel.pp)
    for number in range(shape.num_layers):
        place = ParameterPath(
            number % per_round // per_part, number // per_round, f"decoder.layers.{number % per_part}."
        )
        sparse = bool(shape.num_experts) and shape.sparse_layers[number]
        form = experts if sparse else ""
        yield from _layer_slots(shape, parallel, _Layer(f"{shape.stem}.layers.{number}", place), form)
    norm = head._replace(path="decoder.final_layernorm.weight")
    yield Slot(name=f"{shape.stem}.norm.weight", shape=(shape.hidden_size,), place=norm)
    if not shape.tied:
        yield Slot(name="lm_head.weight", shape=table, place=head, tp_dim=0)


def list_mtp_slots(shape: ModelShape, parallel: Parallel, experts: str = SEQUENTIAL) -> Iterator[Slot]:
    """Tensors of the layers of multi-token prediction, under the names that DeepSeek-V3's checkpoints give them.

    They come after the model's own layers; embedding and head are the model's. Source: the weights' README of
    deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md), "MTP modules".
    """
    hidden, form = shape.hidden_size, experts if shape.num_experts and shape.sparse_layers[-1] else ""
    for number in range(shape.mtp_layers):
        place = ParameterPath(parallel.pp - 1, parallel.vpp - 1, f"mtp.layers.{number}.")
        around = _Layer(f"model.layers.{shape.num_layers + number}", place)
        yield around("enorm.weight", (hidden,), "enorm.weight")
        yield around("hnorm.weight", (hidden,), "hnorm.weight")
        yield around("eh_proj.weight", (hidden, 2 * hidden), "eh_proj.weight", tp_dim=0)
        inner = _Layer(around.stem, place._replace(path=f"{place.path}transformer_layer."))
        yield from _layer_slots(shape, parallel, inner, form)
        yield around("shared_head.norm.weight", (hidden,), "final_layernorm.weight")


@dataclass(frozen=True)
class _Layer:
    """Makes the slots of one layer: knows its name and its place."""

    stem: str
    place: ParameterPath

    def __call__(self, name: str, shape: tuple[int, ...], path: str, **rest: Any) -> Slot:
        place = self.place._replace(path=self.place.path + path)
        return Slot(name=f"{self.stem}.{name}", shape=shape, place=place, **rest)


def _attention_slots(shape: ModelShape, make: _Layer) -> Iterator[Slot]:
    hidden, head = shape.hidden_size, shape.head_size
    rows = {"q": shape.num_heads * head, "k": shape.num_groups * head, "v": shape.num_groups * head}
    for lies, size in rows.items():
        for kind, tail in (("weight", (hidden,)), *([("bias", ())] if shape.qkv_bias else [])):
            path = f"self_attention.linear_qkv.{kind}"
            yield make(f"self_attn.{lies}_proj.{kind}", (size, *tail), path, lies=lies, tp_dim=0)
    yield make("self_attn.o_proj.weight", (hidden, rows["q"]), "self_attention.linear_proj.weight", tp_dim=1)
    for lies in ("q", "k") if shape.qk_norm else ():
        yield make(f"self_attn.{lies}_norm.weight", (head,), f"self_attention.{lies}_layernorm.weight")


def _latent_slots(shape: ModelShape, latent: LatentShape, make: _Layer) -> Iterator[Slot]:
    """Projections to latent numbers are whole on every rank; those from them are cut by heads."""
    hidden, rank = shape.hidden_size, latent.query_rank
    queries = shape.num_heads * shape.head_size
    if rank is None:
        yield make("self_attn.q_proj.weight", (queries, hidden), "self_attention.linear_q_proj.weight", tp_dim=0)
    else:
        yield make("self_attn.q_a_proj.weight", (rank, hidden), "self_attention.linear_q_down_proj.weight")
        yield make("self_attn.q_a_layernorm.weight", (rank,), "self_attention.q_layernorm.weight")
        yield make("self_attn.q_b_proj.weight", (queries, rank), "self_attention.linear_q_up_proj.weight", tp_dim=0)
    down = (latent.key_rank + latent.rotary_size, hidden)
    up = (shape.num_heads * (latent.plain_size + latent.value_size), latent.key_rank)
    yield make("self_attn.kv_a_proj_with_mqa.weight", down, "self_attention.linear_kv_down_proj.weight")
    yield make("self_attn.kv_a_layernorm.weight", (latent.key_rank,), "self_attention.kv_layernorm.weight")
    yield make("self_attn.kv_b_proj.weight", up, "self_attention.linear_kv_up_proj.weight", tp_dim=0)
    out = (hidden, shape.num_heads * latent.value_size)
    yield make("self_attn.o_proj.weight", out, "self_attention.linear_proj.weight", tp_dim=1)


def _layer_slots(shape: ModelShape, parallel: Parallel, make: _Layer, experts: str) -> Iterator[Slot]:
    hidden = shape.hidden_size
    yield from _attention_slots(shape, make) if shape.latent is None else _latent_slots(shape, shape.latent, make)
    if experts:
        yield make("mlp.gate.weight", (shape.num_experts, hidden), "mlp.router.weight")
        if shape.sigmoid_router:
            bias = "mlp.gate.e_score_correction_bias"
            yield make(bias, (shape.num_experts,), "mlp.router.expert_bias", frozen=True)
        yield from _expert_slots(shape, parallel, make, experts)
        if shape.shared_size:
            name = "mlp.shared_expert" if shape.shared_gate else "mlp.shared_experts"
            yield from _feed_forward(make, name, _SHARED, (shape.shared_size, hidden), cut=True)
        if shape.shared_gate:
            yield make("mlp.shared_expert_gate.weight", (1, hidden), "mlp.shared_experts.gate_weight")
    else:
        yield from _feed_forward(make, "mlp", _DENSE, (shape.ffn_size, hidden), cut=True)
    yield make("input_layernorm.weight", (hidden,), "input_layernorm.weight")
    yield make("post_attention_layernorm.weight", (hidden,), "pre_mlp_layernorm.weight")


_DENSE: Final = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")

_SHARED: Final = ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight")

_EXPERTS: Final = {
    SEQUENTIAL: tuple(f"mlp.experts.local_experts.{{}}.linear_fc{number}.weight" for number in (1, 2)),
    GROUPED: ("mlp.experts.weight1", "mlp.experts.weight2"),
    GROUPED_TE: tuple(f"mlp.experts.linear_fc{number}.weight{{}}" for number in (1, 2)),
}
"""Names that each form of experts gives (gate and up, down) of one that a rank holds."""


def _expert_slots(shape: ModelShape, parallel: Parallel, make: _Layer, experts: str) -> list[Slot]:
    """Return what one rank holds stands together, for it sends it at once.

    And in that the tensors of each parameter, so that
    what is asked of the parameter is asked once.
    """
    slots: list[Slot] = []
    held, size = shape.num_experts // parallel.ep, (shape.expert_size, shape.hidden_size)
    for expert in range(shape.num_experts):
        owner, number = expert // held if parallel.ep > 1 else None, expert % held
        inside = number if experts == GROUPED else None
        paths = tuple(path.format(number) for path in _EXPERTS[experts])
        slots += _feed_forward(make, f"mlp.experts.{expert}", paths, size, cut=False, owner=owner, expert=inside)
    return sorted(slots, key=lambda slot: (slot.owner or 0, slot.place.path)) if experts == GROUPED else slots


def _feed_forward(
    make: _Layer, name: str, paths: tuple[str, ...], size: tuple[int, int], *, cut: bool, **rest: Any
) -> Iterator[Slot]:
    for lies in ("gate", "up"):
        yield make(f"{name}.{lies}_proj.weight", size, paths[0], lies=lies, tp_dim=0 if cut else None, **rest)
    yield make(f"{name}.down_proj.weight", size[::-1], paths[1], tp_dim=1 if cut else None, **rest)


WEIGHT: Final = ".weight"


def list_adapted(slots: Iterable[Slot]) -> list[Slot]:
    """Return those of the model's weights that get adapters: every linear layer in the blocks, but for experts."""
    return [
        slot
        for slot in slots
        if slot.name.startswith("model.layers.") and slot.name.endswith("_proj.weight") and ".experts." not in slot.name
    ]


def list_adapter_slots(weight: Slot, rank: int) -> Iterator[Slot]:
    """Both sides of a weight's adapter, named as the layer with `.lora_A` and `.lora_B`.

    A meets what goes into the layer, B what comes out of it; the side where ranks share the layer is cut too.
    """
    layer = weight.place.path.removesuffix(WEIGHT)
    rows, columns = weight.shape
    for side, shape, meets in (("A", (rank, columns), 1), ("B", (rows, rank), 0)):
        yield Slot(
            name=f"{weight.name.removesuffix(WEIGHT)}.lora_{side}",
            shape=shape,
            place=weight.place._replace(path=f"{layer}.adapter.{weight.lies or 'all'}_{side}"),
            tp_dim=meets if weight.tp_dim == meets else None,
        )
