"""Checksums of what a side holds: of each bucket, to prove that weights have arrived; of each tensor, for changes."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import xxhash
from torch import Tensor

from offbeat_types import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes, torch_dtype

MAX_HASHERS: Final = 4
"""Threads that hash. More are no faster: memory bandwidth is the limit."""


def prove_tensors(
    plan: BucketPlan, version: int, read: Callable[[str], Any], holder: str = "the engine"
) -> WeightProof:
    """Read every tensor back and say what is there, in the form that `PlannedTensors` gives for the buckets sent.

    It looks at all of it, after all of it was loaded: a tensor that a later one has overwritten shows.
    """
    num_hashers = min(MAX_HASHERS, os.cpu_count() or 1, len(plan.buckets))
    checksums: list[Future[str]] = []
    with ThreadPoolExecutor(num_hashers, "offbeat-weight-proof") as hashers:
        for parts in _read_buckets(plan, read, holder):
            if len(checksums) > num_hashers:  # read no further ahead: an engine may have to unpack what it reads
                checksums[-num_hashers - 1].result()
            checksums.append(hashers.submit(_checksum, parts))
        found = tuple(each.result() for each in checksums)
    return WeightProof(version=version, num_tensors=len(plan.specs), checksums=found)


def compare_proofs(plan: BucketPlan, sent: WeightProof, held: WeightProof, holder: str) -> None:
    """Raise WeightSyncError unless the holder has what was sent: version, number of tensors, every checksum."""
    if held.version != sent.version:
        raise WeightSyncError(f"{holder} proved version {held.version}; version {sent.version} was sent")
    if held.num_tensors != sent.num_tensors:
        raise WeightSyncError(f"{holder} proved {held.num_tensors} tensors; {sent.num_tensors} were sent")
    if len(held.checksums) != len(sent.checksums):
        raise WeightSyncError(f"{holder} proved {len(held.checksums)} buckets; {len(sent.checksums)} were sent")
    for index, (ours, theirs) in enumerate(zip(sent.checksums, held.checksums, strict=True)):
        if ours != theirs:
            pieces = plan.buckets[index].pieces
            first, last = plan.specs[pieces[0].tensor].name, plan.specs[pieces[-1].tensor].name
            raise WeightSyncError(
                f"{holder} holds other bytes than were sent, in bucket {index} of {len(plan.buckets)} "
                f"({first} to {last}): checksum {ours} was sent, it has {theirs}"
            )


def tensor_checksums(
    specs: Iterable[TensorSpec], read: Callable[[str], Any], holder: str = "the engine"
) -> dict[str, str]:
    """Name -> checksum of each tensor that is held: what to give to `receive` as `held`.

    Args:
        specs: of the tensors, in the dtypes in which they travel.
        read: name -> the tensor as the engine holds it, read back now.
        holder: for errors.

    Raises:
        WeightSyncError: a tensor has another shape or dtype.
    """
    checksums = {}
    for spec in specs:
        tensor = read(spec.name)
        check_tensor(tensor, spec, holder)
        checksums[spec.name] = _checksum([tensor_bytes(tensor)])
    return checksums


def planned_checksums(plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The same of the trainer's tensors, as they would travel."""
    specs = {spec.name: spec for spec in plan.specs}
    checksums = {}
    for name, tensor in tensors:
        if name not in specs:
            raise WeightSyncError(f"{name}: names and order must be those of the plan")
        check_tensor(tensor, specs[name], "the trainer", dtype=False)
        checksums[name] = _checksum([tensor_bytes(tensor.detach().to(torch_dtype(specs[name].dtype)))])
    if missing := specs.keys() - checksums.keys():
        raise WeightSyncError(f"{min(missing)}: planned, but the trainer's tensors ended before it")
    return checksums


def plan_changes(plan: BucketPlan, ours: Mapping[str, str], theirs: Iterable[Mapping[str, str] | None]) -> BucketPlan:
    """The plan of the tensors that at least one receiver does not hold as we do.

    Args:
        plan: of all tensors.
        ours: checksums of all of them.
        theirs: what each receiver holds; None: it did not say, so all are sent.

    Returns:
        Never an empty plan: if nothing differs it holds the smallest tensor, for a version comes with a proof.
    """
    held = [each or {} for each in theirs]
    changed = [spec for spec in plan.specs if any(each.get(spec.name) != ours[spec.name] for each in held)]
    return BucketPlan.build(changed or [min(plan.specs, key=lambda spec: spec.num_bytes)], plan.bucket_bytes)


def kept_digest(checksums: Mapping[str, str], sent: Collection[str]) -> str:
    """16 hex digits for names and checksums of all tensors that are not sent: equal at trainer and engine."""
    kept = sorted((name, checksum) for name, checksum in checksums.items() if name not in sent)
    return hashlib.sha256(repr(kept).encode()).hexdigest()[:16]


def _checksum(parts: list[Bytes]) -> str:
    """64-bit xxh3 over the parts in order. Hashing releases the interpreter's lock."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part.data)
    return hasher.hexdigest()


def _read_buckets(plan: BucketPlan, read: Callable[[str], Any], holder: str) -> Iterator[list[Bytes]]:
    index, held = -1, None
    for bucket in plan.buckets:
        parts: list[Bytes] = []
        for piece in bucket.pieces:
            if held is None or index != piece.tensor:  # the pieces of one tensor follow each other
                index, held = piece.tensor, _read_bytes(plan.specs[piece.tensor], read, holder)
            parts.append(held[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
        yield parts


def _read_bytes(spec: TensorSpec, read: Callable[[str], Any], holder: str) -> Bytes:
    try:
        tensor = read(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: was sent, but {holder} holds no tensor of that name") from error
    check_tensor(tensor, spec, holder)
    return tensor_bytes(tensor)
