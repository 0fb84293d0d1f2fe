"""Weights in and out: where each Hugging Face tensor lies among the ranks, and how it comes in and goes out.

A slot is one tensor of a Hugging Face checkpoint: the place that holds it, the megatron-core parameter it is part of,
and how it is cut. Loading and export both go by the same list, which is equal on all ranks: every rank makes the same
calls in the same order.
Source: megatron/core/transformer/attention.py (queries, keys and values interleaved by group), mlp.py (gate, up) and
moe/experts.py (experts of TransformerEngine's grouped layers); `offbeat_engine_megatron._layers.GroupedExperts`.

Tensors of half a bucket are views of one row of memory; what tensor parallel ranks hold of it comes in rounds of a
quarter. A row may still be read when the next is made, so a rank holds less than two buckets
beside the weights; where a tensor is longer than half a bucket, it has a row of its own. With adapters there is one
merged parameter of this rank more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from offbeat_engine_megatron._kernels import GROUPED, GROUPED_TE, SEQUENTIAL
from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._shape import ModelShape
from offbeat_mesh import Mesh
from offbeat_training import Box, CutTensor, TensorFolder, slices

TOWER: Final = "model.visual."
"""Beginning of the Hugging Face names of the vision tower's tensors."""

BUCKET_BYTES: Final = 32 * 2**20
"""Tensors are put together in rows of half a bucket, unless one alone is larger: see `Gathering`."""


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
    """

    place: ParameterPath
    copies: tuple[ParameterPath, ...] = ()
    lies: str = ""
    owner: int | None = None
    expert: int | None = None

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
    """All tensors of the model, in the order in which they are loaded and exported; `experts` is of `Kernels`."""
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


def _layer_slots(shape: ModelShape, parallel: Parallel, make: _Layer, experts: str) -> Iterator[Slot]:
    hidden, head = shape.hidden_size, shape.head_size
    rows = {"q": shape.num_heads * head, "k": shape.num_groups * head, "v": shape.num_groups * head}
    for lies, size in rows.items():
        for kind, tail in (("weight", (hidden,)), *([("bias", ())] if shape.qkv_bias else [])):
            path = f"self_attention.linear_qkv.{kind}"
            yield make(f"self_attn.{lies}_proj.{kind}", (size, *tail), path, lies=lies, tp_dim=0)
    yield make("self_attn.o_proj.weight", (hidden, rows["q"]), "self_attention.linear_proj.weight", tp_dim=1)
    for lies in ("q", "k") if shape.qk_norm else ():
        yield make(f"self_attn.{lies}_norm.weight", (head,), f"self_attention.{lies}_layernorm.weight")
    if experts:
        yield make("mlp.gate.weight", (shape.num_experts, hidden), "mlp.router.weight")
        yield from _expert_slots(shape, parallel, make, experts)
    else:
        yield from _feed_forward(make, "mlp", _DENSE, (shape.ffn_size, hidden), cut=True)
    yield make("input_layernorm.weight", (hidden,), "input_layernorm.weight")
    yield make("post_attention_layernorm.weight", (hidden,), "pre_mlp_layernorm.weight")


_DENSE: Final = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
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


PartOf = Callable[[Slot], Tensor]
"""Part that this rank holds of a tensor: its `part_shape`, or a view of that in other dimensions."""

Rows = tuple[int, int, int]
"""Rows of a cut tensor that travel together: its number in the bucket, the first row of each part, and the end."""


class Gathering:
    """Puts tensors together from the ranks of tensor, expert and pipeline parallelism."""

    def __init__(self, mesh: Mesh) -> None:
        self._stage, self._expert_rank = mesh.coordinates["pp"], mesh.coordinates["ep"]
        self._tp, self._pp, self._ep = mesh.group("tp"), mesh.group("pp"), mesh.group("ep")

    def whole(self, bucket: Sequence[Slot], part_of: PartOf, flat: Tensor, round_bytes: int) -> list[Tensor]:
        """Whole tensors of a row, on every rank.

        Args:
            bucket: slots of one stage.
            part_of: asked on the ranks that hold a tensor.
            flat: [elements of the row], overwritten: the tensors are views of it.
            round_bytes: what tensor parallel ranks gather at a time.
        """
        sizes = [slot.num_elements for slot in bucket]
        tensors = [part.view(slot.shape) for part, slot in zip(torch.split(flat, sizes), bucket, strict=True)]
        stage = bucket[0].place.stage
        if self._stage == stage:
            for rows in self._rounds(bucket, round_bytes // flat.itemsize):
                self._gather(bucket, tensors, rows, part_of)
            self._take_uncut(bucket, tensors, part_of)
            self._gather_experts(bucket, flat)
        if self._pp.size > 1:
            self._pp.broadcast(flat, source=stage)
        return tensors

    def _is_cut(self, slot: Slot) -> bool:
        return slot.tp_dim is not None and self._tp.size > 1

    def _rounds(self, bucket: Sequence[Slot], num_elements: int) -> Iterator[list[Rows]]:
        """Yield what each call gathers: of whole tensors as many elements at most, but a row of one at least."""
        found: list[Rows] = []
        size = 0
        for number, slot in enumerate(bucket):
            if not self._is_cut(slot):
                continue
            num_rows, *rest = slot.part_shape(self._tp.size)
            per_row = prod(rest) * self._tp.size
            step = max(1, num_elements // per_row)
            for start in range(0, num_rows, step):
                stop = min(start + step, num_rows)
                if found and size + (stop - start) * per_row > num_elements:
                    yield found
                    found, size = [], 0
                found.append((number, start, stop))
                size += (stop - start) * per_row
        if found:
            yield found

    def _gather(self, bucket: Sequence[Slot], tensors: Sequence[Tensor], rows: Sequence[Rows], part_of: PartOf) -> None:
        """Gather some rows of cut tensors over tp."""
        tp, dtype = self._tp.size, tensors[0].dtype
        mine = torch.cat(
            [
                narrowed(part_of(bucket[number]).reshape(bucket[number].part_shape(tp))[start:stop], dtype).reshape(-1)
                for number, start, stop in rows
            ]
        )
        sizes = [(stop - start) * prod(bucket[number].part_shape(tp)[1:]) for number, start, stop in rows]
        everyones = torch.split(self._tp.all_gather(mine), sizes, 1)
        for (number, start, stop), values in zip(rows, everyones, strict=True):
            dim = bucket[number].tp_dim
            assert dim is not None
            for part, found in zip(tensors[number].chunk(tp, dim), values, strict=True):
                target = part[start:stop]
                target.copy_(found.view_as(target))

    def _take_uncut(self, bucket: Sequence[Slot], tensors: Sequence[Tensor], part_of: PartOf) -> None:
        """Yield what this rank holds whole."""
        for slot, tensor in zip(bucket, tensors, strict=True):
            if not self._is_cut(slot) and slot.owner in (None, self._expert_rank):
                part = part_of(slot)
                tensor.view_as(part).copy_(part)

    def _gather_experts(self, bucket: Sequence[Slot], flat: Tensor) -> None:
        """Experts come from their owners: those that lie side by side in one call."""
        ends = list(accumulate((slot.num_elements for slot in bucket), initial=0))
        for owner, run in groupby(range(len(bucket)), lambda number: bucket[number].owner):
            numbers = list(run)
            if owner is not None:
                self._ep.broadcast(flat[ends[numbers[0]] : ends[numbers[-1] + 1]], source=owner)


Values = Callable[[Any], Tensor]
"""Values to take of a parameter, of its shape."""

Put = Callable[[Any, Tensor], object]
"""Given a parameter, and the values for it: float32, of its shape."""


class HeldWeights:
    """Parameters of this rank under Hugging Face names.

    Attributes:
        slots: of the tensors to hold, of all ranks, in the order in which they are read and exported.
        parameters: of this rank, by part of the model and name within it.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], slots: Iterable[Slot], shape: ModelShape, mesh: Mesh) -> None:
        self.slots = list(slots)
        self._shape, self._device = shape, mesh.device.torch_device
        self._stage, self._expert_rank = mesh.coordinates["pp"], mesh.coordinates["ep"]
        self._tp, self._gathering = mesh.group("tp"), Gathering(mesh)
        self._filled_by: dict[tuple[int, str], list[Slot]] = {}
        for slot in self.slots:
            for place in (slot.place, *slot.copies):
                if self._holds(slot, place):
                    self._filled_by.setdefault((place.part, place.path), []).append(slot)
        self.parameters = {(part, path): parts[part].get_parameter(path) for part, path in self._filled_by}

    def read(self, folder: Path, put: Put = Tensor.copy_) -> None:
        """Fill every parameter from the safetensors of a folder, reading only this rank's slices.

        Raises:
            ModelError: a file cannot be read, or a tensor is missing or of another shape.
        """
        with TensorFolder(folder) as tensors:
            self.check(tensors)
            self.read_values(tensors, "", put)

    def check(self, tensors: TensorFolder) -> None:
        """Raise ModelError unless all tensors of the model are there, this rank's or not, in their shapes."""
        for slot in self.slots:
            tensors.check(slot.name, slot.shape)

    def read_values(self, tensors: TensorFolder, prefix: str, put: Put) -> None:
        """Read what a folder says of each parameter of this rank, one parameter at a time.

        Args:
            tensors: checked.
            prefix: before the Hugging Face names in it; zeros stand for a tensor that is not there.
            put: what takes the values.
        """
        known = tensors.names

        def part_of(slot: Slot) -> Tensor | None:
            name = prefix + slot.name
            return tensors.read(name, self._box(slot)) if name in known else None

        self._put(part_of, put)

    def fill(self, tensors: Iterable[tuple[str, Tensor]], put: Put) -> None:
        """Take this rank's parts of whole tensors, (Hugging Face name, float32 tensor), in the order of the slots.

        They are held until all have come.
        """
        held = {}
        for slot, (name, tensor) in zip(self.slots, tensors, strict=True):
            assert slot.name == name, f"{name} came where {slot.name} was expected"
            if any(self._holds(slot, place) for place in (slot.place, *slot.copies)):
                held[name] = tensor[slices(self._box(slot))].clone()
        self._put(lambda slot: held[slot.name], put)

    @torch.no_grad()
    def _put(self, part_of: Callable[[Slot], Tensor | None], put: Put) -> None:
        """Put each parameter together from this rank's parts of its tensors; None stands for zeros."""
        for key, parameter in self.parameters.items():
            values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for slot in self._filled_by[key]:
                part = part_of(slot)
                if part is not None:
                    view = view_of(slot, values, self._shape, self._tp.size)
                    view.copy_(part.view_as(view))
            put(parameter, values)

    def gather(
        self, values: Values = Tensor.detach, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on every rank, which all iterate to the end: each bucket is gathered.

        Args:
            values: what to take of a parameter.
            dtype: each rank rounds its part to this before it is gathered.
        """
        for bucket in self.buckets():
            yield from self.whole(bucket, values, dtype)

    def first_not_finite(self) -> str:
        """Name of the first tensor of this rank whose gradient holds an infinity or NaN; empty when there is none."""
        for slot in self.slots:
            if self._holds(slot, slot.place):
                grad = getattr(self._parameter(slot), "main_grad", None)
                if grad is not None and not torch.isfinite(view_of(slot, grad, self._shape, self._tp.size)).all():
                    return slot.name
        return ""

    def buckets(self) -> Iterator[list[Slot]]:
        """Slots that travel together: of one stage, in order, as many as fit into half a bucket."""
        bucket: list[Slot] = []
        for slot in self.slots:
            size = 4 * sum(each.num_elements for each in [*bucket, slot])
            if bucket and (size > BUCKET_BYTES // 2 or slot.place.stage != bucket[0].place.stage):
                yield bucket
                bucket = []
            bucket.append(slot)
        yield bucket

    @torch.no_grad()
    def whole(
        self, bucket: Sequence[Slot], values: Values, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of one bucket, on every rank; the tensors are copies."""
        ask = _ask_once(values)
        flat = torch.empty(sum(slot.num_elements for slot in bucket), dtype=dtype, device=self._device)

        def part_of(slot: Slot) -> Tensor:
            return view_of(slot, ask(self._parameter(slot)), self._shape, self._tp.size)

        tensors = self._gathering.whole(bucket, part_of, flat, BUCKET_BYTES // 4)
        return zip((slot.name for slot in bucket), tensors, strict=True)

    def _parameter(self, slot: Slot) -> Tensor:
        return self.parameters[slot.place.part, slot.place.path]

    def _holds(self, slot: Slot, place: ParameterPath) -> bool:
        return place.stage == self._stage and slot.owner in (None, self._expert_rank)

    def _box(self, slot: Slot) -> Box:
        """Return the part of a tensor that belongs on this rank."""
        return slot.box_at(tp=(self._tp.rank, self._tp.size))


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype` where that is shorter: what is gathered then takes fewer bytes, and no more otherwise."""
    return values.to(dtype) if dtype.itemsize < values.dtype.itemsize else values


def _ask_once(values: Values) -> Values:
    """Keep the last answer: the rows of a long parameter travel in many rounds, and merging adapters is dear."""
    kept: dict[int, Tensor] = {}

    def ask(parameter: Tensor) -> Tensor:
        if id(parameter) not in kept:
            kept.clear()
            kept[id(parameter)] = values(parameter)
        return kept[id(parameter)]

    return ask
