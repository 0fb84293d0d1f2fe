"""Weights in and out: read from files into the parameters of this rank, and gathered from all ranks.

Tensors of half a bucket are views of one row of memory; what tensor parallel ranks hold of it comes in rounds of a
quarter. A row may still be read when the next is made, so a rank holds less than two buckets
beside the weights; where a tensor is longer than half a bucket, it has a row of its own. With adapters there is one
merged parameter of this rank more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_engine_megatron._shape import ModelShape
from offbeat_engine_megatron._slots import ParameterPath, Slot, view_of
from offbeat_mesh import Mesh
from offbeat_training import Box, TensorFolder, slices

BUCKET_BYTES: Final = 32 * 2**20
"""Tensors are put together in rows of half a bucket, unless one alone is larger: see `Gathering`."""

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
            dtype: each rank rounds its part to this before it is gathered; not of frozen tensors.
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
        """Slots that travel together: of one stage and format, in order, as many as fit into half a bucket."""
        bucket: list[Slot] = []
        for slot in self.slots:
            size = 4 * sum(each.num_elements for each in [*bucket, slot])
            kind = slot.place.stage, slot.frozen
            if bucket and (size > BUCKET_BYTES // 2 or kind != (bucket[0].place.stage, bucket[0].frozen)):
                yield bucket
                bucket = []
            bucket.append(slot)
        yield bucket

    @torch.no_grad()
    def whole(
        self, bucket: Sequence[Slot], values: Values, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of one bucket, on every rank; the tensors are copies."""
        ask, dtype = _ask_once(values), torch.float32 if bucket[0].frozen else dtype
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
