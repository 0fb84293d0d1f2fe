"""Proofs: checksums of what a side holds, bucket by bucket, and their comparison."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import xxhash

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._places import Place
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes

MAX_HASHERS: Final = 4
"""Threads that hash: memory feeds no more."""


def prove_tensors(
    plan: BucketPlan,
    version: int,
    read: Callable[[str], Any],
    holder: str = "the engine",
    places: Sequence[Place] = (),
) -> WeightProof:
    """Read every tensor back and say what is there, in the form that `PlannedTensors.fill` gives for the buckets sent.

    It looks at all of it, after all of it was loaded: a tensor that a later one has overwritten shows.

    Args:
        plan: names, shapes, dtypes and layout.
        version: policy version the weights are meant to be.
        read: name -> tensor of the planned shape and dtype, on any device.
        holder: who holds them, for errors.
        places: of each tensor, where they are known from loading: what lies there is looked at, not laid out, again.

    Raises:
        WeightSyncError: a tensor is missing, or has another shape or dtype.
    """
    num_hashers = min(MAX_HASHERS, os.cpu_count() or 1, len(plan.buckets))
    checksums: list[Future[str]] = []
    with ThreadPoolExecutor(num_hashers, "offbeat-weight-proof") as hashers:
        for parts in _read_buckets(plan, read, holder, places):
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


def proof_to_data(proof: WeightProof) -> dict[str, Any]:
    """The proof as plain data, for a wire or a file."""
    return {"version": proof.version, "num_tensors": proof.num_tensors, "checksums": list(proof.checksums)}


def proof_from_data(data: Any) -> WeightProof:
    """The proof that `proof_to_data` wrote.

    Raises:
        WeightSyncError: it is no such data.
    """
    try:
        version, num_tensors, checksums = int(data["version"]), int(data["num_tensors"]), data["checksums"]
        return WeightProof(version=version, num_tensors=num_tensors, checksums=tuple(map(str, checksums)))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"a proof needs version, num_tensors and checksums: got {data!r:.80}") from error


def _checksum(parts: list[Bytes]) -> str:
    """64-bit xxh3 over the parts in order. Hashing releases the interpreter's lock."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part.data)
    return hasher.hexdigest()


def _read_buckets(
    plan: BucketPlan, read: Callable[[str], Any], holder: str, places: Sequence[Place]
) -> Iterator[list[Bytes]]:
    """What the holder has of each bucket: the bytes of its pieces."""
    held: tuple[int, Bytes] | None = None
    for bucket in plan.buckets:
        parts: list[Bytes] = []
        for piece in bucket.pieces:
            if held is None or held[0] != piece.tensor:  # the pieces of one tensor follow each other
                held = piece.tensor, _read_bytes(plan, piece.tensor, read, holder, places)
            parts.append(held[1][piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
        yield parts


def _read_bytes(
    plan: BucketPlan, index: int, read: Callable[[str], Any], holder: str, places: Sequence[Place]
) -> Bytes:
    spec = plan.specs[index]
    try:
        tensor = read(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: was sent, but {holder} holds no tensor of that name") from error
    check_tensor(tensor, spec, holder)
    known = places[index].bytes_of(tensor) if places else None
    return tensor_bytes(tensor) if known is None else known
