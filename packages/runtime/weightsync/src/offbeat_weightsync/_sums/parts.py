"""Proof of weights that several processes hold together, such as the workers of one tensor-parallel engine.

The sum of words of a bucket (`words.py`) is linear in its bytes: those that a process does not hold count as zeros
in its sum, and the sums of parts that together cover a tensor add up to that of the whole, modulo 2^64. So each process
sums its parts where they lie, and only these sums travel.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, stack

from offbeat_core import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._plan import BucketPlan, Piece
from offbeat_weightsync._sums.words import MODULUS, BoxWords


class HeldPart(NamedTuple):
    """A box out of one tensor, as a process holds it.

    Args:
        name: of the whole tensor, as planned.
        first: index, within the whole tensor, of the box's first element.
        held: the box, with as many dims as the whole tensor, of the planned dtype; on any device.
    """

    name: str
    first: tuple[int, ...]
    held: Tensor


class PartSum(NamedTuple):
    """Sums of the words of one `HeldPart`.

    Args:
        name: of the whole tensor.
        first: index of the box's first element.
        shape: of the box.
        sums: what the box adds to each bucket in which the tensor travels, modulo 2^64.
    """

    name: str
    first: tuple[int, ...]
    shape: tuple[int, ...]
    sums: tuple[int, ...]


def sum_parts(plan: BucketPlan, parts: Iterable[HeldPart]) -> list[PartSum]:
    """Sum the words of parts, which all lie on one device; only the sums are fetched from it, all at once."""
    specs = {spec.name: spec for spec in plan.specs}
    pieces = _pieces(plan)
    taken: list[tuple[HeldPart, int]] = []
    found: list[Tensor] = []
    for part in parts:
        spec = specs[part.name]
        _check(part, spec)
        words = BoxWords(spec.shape, part.first, part.held)
        found += [
            words.sum(piece.tensor_offset, piece.num_bytes, piece.bucket_offset) for _, piece in pieces[part.name]
        ]
        taken.append((part, len(pieces[part.name])))
    values: Iterator[int] = iter(stack(found).tolist() if found else ())
    return [
        PartSum(part.name, part.first, tuple(part.held.shape), tuple(next(values) % MODULUS for _ in range(count)))
        for part, count in taken
    ]


def join_sums(plan: BucketPlan, version: int, sums: Iterable[PartSum]) -> WeightProof:
    """Return the proof of the whole from the sums of all parts. A part that several processes hold counts once.

    Raises:
        WeightSyncError: the parts do not cover a tensor, or processes that hold the same part differ.
    """
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]] = {}
    for part in sums:
        boxes = parts.setdefault(part.name, {})
        if boxes.setdefault((part.first, part.shape), part.sums) != part.sums:
            raise WeightSyncError(f"{part.name}: workers that hold the same part of it hold different numbers")
    totals, pieces = [0] * len(plan.buckets), _pieces(plan)
    for spec in plan.specs:
        boxes = parts.get(spec.name, {})
        covered = sum(math.prod(shape) for _, shape in boxes)
        if covered != math.prod(spec.shape):
            raise WeightSyncError(f"{spec.name}: the workers hold {covered} of its {math.prod(spec.shape)} numbers")
        for added in boxes.values():
            for (bucket, _), value in zip(pieces[spec.name], added, strict=True):
                totals[bucket] += value
    checksums = tuple(f"{total % MODULUS:016x}" for total in totals)
    return WeightProof(version=version, num_tensors=len(plan.specs), checksums=checksums)


def _pieces(plan: BucketPlan) -> dict[str, list[tuple[int, Piece]]]:
    """Return the pieces of each tensor, in order, with the index of the bucket that each travels in."""
    pieces: dict[str, list[tuple[int, Piece]]] = {spec.name: [] for spec in plan.specs}
    for index, bucket in enumerate(plan.buckets):
        for piece in bucket.pieces:
            pieces[plan.specs[piece.tensor].name].append((index, piece))
    return pieces


def _check(part: HeldPart, spec: TensorSpec) -> None:
    dtype, shape = str(part.held.dtype).removeprefix("torch."), tuple(part.held.shape)
    if dtype != spec.dtype:
        raise WeightSyncError(f"{spec.name}: planned as {spec.dtype}, the worker holds {dtype}")
    ends = [start + size for start, size in zip(part.first, shape, strict=True)]
    if len(ends) != len(spec.shape) or any(end > size for end, size in zip(ends, spec.shape, strict=True)):
        raise WeightSyncError(f"{spec.name}: planned with shape {spec.shape}, a worker holds {shape} at {part.first}")
