"""Proofs: checksums of what a side holds, bucket by bucket, and their comparison."""

from collections.abc import Callable
from typing import Any

import xxhash

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._plan import Bucket, BucketPlan
from offbeat_weightsync._tensors import Bytes, check_tensor, tensor_bytes


def bucket_checksum(bucket: Bucket, memory: Bytes) -> str:
    """Checksum of a filled bucket: 64-bit xxh3 over its pieces in order; gaps do not count.

    Args:
        bucket: its layout.
        memory: [bytes] uint8, at least `bucket.num_bytes` long.
    """
    hasher = xxhash.xxh3_64()
    for piece in bucket.pieces:
        hasher.update(memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].data)
    return hasher.hexdigest()


def prove_tensors(
    plan: BucketPlan, version: int, read: Callable[[str], Any], holder: str = "the engine"
) -> WeightProof:
    """Read every tensor back and say what is there, in the form that `bucket_checksum` gives for the buckets sent.

    Args:
        plan: names, shapes, dtypes and layout.
        version: policy version the weights are meant to be.
        read: name -> tensor of the planned shape and dtype, on any device.
        holder: who holds them, for errors.

    Raises:
        WeightSyncError: a tensor is missing, or has another shape or dtype.
    """
    checksums = []
    held: tuple[int, Bytes] | None = None
    for bucket in plan.buckets:
        hasher = xxhash.xxh3_64()
        for piece in bucket.pieces:
            if held is None or held[0] != piece.tensor:  # the pieces of one tensor follow each other
                held = piece.tensor, _read_bytes(plan, piece.tensor, read, holder)
            hasher.update(held[1][piece.tensor_offset : piece.tensor_offset + piece.num_bytes].data)
        checksums.append(hasher.hexdigest())
    return WeightProof(version=version, num_tensors=len(plan.specs), checksums=tuple(checksums))


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


def _read_bytes(plan: BucketPlan, index: int, read: Callable[[str], Any], holder: str) -> Bytes:
    spec = plan.specs[index]
    try:
        tensor = read(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: was sent, but {holder} holds no tensor of that name") from error
    check_tensor(tensor, spec, holder)
    return tensor_bytes(tensor)
