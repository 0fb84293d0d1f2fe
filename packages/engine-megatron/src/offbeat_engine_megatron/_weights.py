"""Weights in and out: slices of Hugging Face checkpoints into this rank's parameters, and whole tensors out of all.

Every rank makes the same calls in the same order: they follow from the slots alone. Tensors of half a bucket are laid
out as one row of memory, of which they are views; what tensor parallel ranks hold of it comes in rounds of a quarter.
A row may still be read when the next is made, so a rank holds less than two buckets beside the weights; where a tensor
is longer than half a bucket, it has a row of its own. With adapters there is one merged parameter of this rank more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_engine_megatron._layout import Parallel
from offbeat_engine_megatron._shape import ModelShape
from offbeat_engine_megatron._slots import ParameterPath, Slot, list_slots, view_of
from offbeat_mesh import Mesh
from offbeat_training import Box, TensorFolder, slices

PartOf = Callable[[Slot], Tensor]
"""What this rank holds of a tensor: its `part_shape`, or a view of that in other dimensions."""

Rows = tuple[int, int, int]
"""Rows of a cut tensor that travel together: its number in the bucket, the first row of each part, and the end."""


class Gathering:
    """Puts tensors together from the ranks of tensor, expert and pipeline parallelism.

    Args:
        mesh: over megatron's groups.
    """

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
        """What each call gathers: of whole tensors as many elements at most, but a row of one at least."""
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
        tp = self._tp.size
        mine = torch.cat(
            [
                part_of(bucket[number]).reshape(bucket[number].part_shape(tp))[start:stop].reshape(-1)
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
        """What this rank holds whole."""
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


BUCKET_BYTES: Final = 32 * 2**20
"""Tensors are put together in rows of half a bucket, unless one alone is larger: see `Gathering`."""

AHEAD: Final = "mtp."
"""Parameters of multi-token prediction, which is no part of the model."""

Values = Callable[[Any], Tensor]

Put = Callable[[Any, Tensor], object]
"""Given a parameter, and the values for it: float32, of its shape."""


class HeldWeights:
    """The parameters of this rank under Hugging Face names.

    Args:
        parts: the model's parts on this rank, unwrapped.
        shape: of the model.
        parallel: sizes of the axes.
        mesh: over megatron's groups.
        slots: of the tensors to hold, such as adapters'; None for those of the model.

    Attributes:
        slots: of all ranks, in the order in which they are read and exported.
        exported: what is exported of a parameter: itself, or with adapters merged into it. In bfloat16 that is what
            the trainer computes with, not the float32 copy that the optimizer holds.
    """

    exported: Values = staticmethod(Tensor.detach)

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        shape: ModelShape,
        parallel: Parallel,
        mesh: Mesh,
        slots: Sequence[Slot] | None = None,
    ) -> None:
        self.slots = list_slots(shape, parallel) if slots is None else list(slots)
        self._shape, self._parallel = shape, parallel
        self._stage = mesh.coordinates["pp"]
        self._expert_rank = mesh.coordinates["ep"]
        self._device = mesh.device.torch_device
        self._tp, self._gathering = mesh.group("tp"), Gathering(mesh)
        held = {(place.part, place.path) for slot in slots or () for place in (slot.place, *slot.copies)}
        self._parameters = {
            (part, name): parameter
            for part, module in enumerate(parts)
            for name, parameter in module.named_parameters()
            if ((part, name) in held if slots is not None else not name.startswith(AHEAD))
        }

    def read(self, folder: Path, put: Put = Tensor.copy_) -> None:
        """Fill every parameter from the safetensors of a folder, reading only this rank's slices.

        Args:
            folder: of the files.
            put: what takes the values.

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

    @torch.no_grad()
    def read_values(self, tensors: TensorFolder, prefix: str, put: Put) -> None:
        """Read what a folder says of each parameter of this rank, one parameter at a time.

        Args:
            tensors: checked.
            prefix: before the Hugging Face names in it; zeros stand for a tensor that is not there.
            put: what takes the values.
        """
        slots: dict[tuple[int, str], list[Slot]] = {key: [] for key in self._parameters}
        for slot in self.slots:
            for place in (slot.place, *slot.copies):
                if self._holds(slot, place):
                    slots[place.part, place.path].append(slot)
        known = tensors.names
        for key, parameter in self._parameters.items():
            assert slots[key], f"no checkpoint tensor fills {key}"
            values = self._zeros(parameter)
            for slot in slots[key]:
                if prefix + slot.name in known:
                    view = view_of(slot, values, self._shape, self._tp.size)
                    view.copy_(tensors.read(prefix + slot.name, self._box(slot)).view_as(view))
            put(parameter, values)

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]], put: Put) -> None:
        """Take this rank's parts of whole tensors, which come in the order of the slots.

        Args:
            tensors: (Hugging Face name, float32 tensor).
            put: what takes the values of each parameter; they are held until all have come.
        """
        values = {key: self._zeros(parameter) for key, parameter in self._parameters.items()}
        for slot, (name, tensor) in zip(self.slots, tensors, strict=True):
            assert slot.name == name, f"{name} came where {slot.name} was expected"
            part = tensor[slices(self._box(slot))]
            for place in (slot.place, *slot.copies):
                if self._holds(slot, place):
                    view = view_of(slot, values[place.part, place.path], self._shape, self._tp.size)
                    view.copy_(part.view_as(view))
        for key, parameter in self._parameters.items():
            put(parameter, values[key])

    @torch.no_grad()
    def gather(self, values: Values | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on every rank, which all iterate to the end: each bucket is gathered.

        Args:
            values: what to take of each parameter, of its shape; `exported` by default.
        """
        for bucket in self.buckets():
            yield from self.whole(bucket, values)

    def first_not_finite(self) -> str:
        """Name of the first tensor of this rank whose gradient holds an infinity or NaN; empty when there is none."""
        for slot in self.slots:
            if self._holds(slot, slot.place):
                grad = getattr(self._parameters[slot.place.part, slot.place.path], "main_grad", None)
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
    def whole(self, bucket: Sequence[Slot], values: Values | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of one bucket, on every rank; the tensors are copies."""
        chosen = values or _ask_once(self.exported)
        flat = self._empty(sum(slot.num_elements for slot in bucket))
        tensors = self._gathering.whole(bucket, lambda slot: self._view(slot, chosen), flat, BUCKET_BYTES // 4)
        return zip((slot.name for slot in bucket), tensors, strict=True)

    def _view(self, slot: Slot, values: Values) -> Tensor:
        parameter = self._parameters[slot.place.part, slot.place.path]
        return view_of(slot, values(parameter), self._shape, self._tp.size)

    def _zeros(self, parameter: Tensor) -> Tensor:
        return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _holds(self, slot: Slot, place: ParameterPath) -> bool:
        return place.stage == self._stage and slot.owner in (None, self._expert_rank)

    def _box(self, slot: Slot) -> Box:
        """The part of a tensor that belongs on this rank."""
        box = [(0, size) for size in slot.shape]
        if slot.tp_dim is not None:
            length = slot.shape[slot.tp_dim] // self._tp.size
            box[slot.tp_dim] = self._tp.rank * length, (self._tp.rank + 1) * length
        return tuple(box)


def _ask_once(values: Values) -> Values:
    """Keep the last answer: the rows of a long parameter travel in many rounds, and merging adapters is dear."""
    kept: dict[int, Tensor] = {}

    def ask(parameter: Tensor) -> Tensor:
        if id(parameter) not in kept:
            kept.clear()
            kept[id(parameter)] = values(parameter)
        return kept[id(parameter)]

    return ask
