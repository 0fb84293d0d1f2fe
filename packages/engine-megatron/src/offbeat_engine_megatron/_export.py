"""Whole tensors out of the ranks that share them, a bucket at a time.

Every rank makes the same calls in the same order: they follow from the slots alone. Tensors of half a bucket are laid
out as one row of memory, of which they are views; what tensor parallel ranks hold of it comes in rounds of a quarter.
A row may still be read when the next is made, so a rank holds less than two buckets beside the weights; where a tensor
is longer than half a bucket, it has a row of its own. With adapters there is one merged parameter of this rank more.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from math import prod

import torch
from torch import Tensor

from offbeat_engine_megatron._slots import Slot
from offbeat_mesh import Mesh

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
