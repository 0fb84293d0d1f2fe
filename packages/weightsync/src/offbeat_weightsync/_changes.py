"""Which tensors differ between trainer and engines, agreed by both: a checksum of each tensor. Pure."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import xxhash
from torch import Tensor

from offbeat_types import TensorSpec, WeightSyncError
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._tensors import check_tensor, tensor_bytes, torch_dtype


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
        checksums[spec.name] = _checksum(tensor)
    return checksums


def planned_checksums(plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The same of the trainer's tensors, as they would travel.

    Raises:
        WeightSyncError: they are not those of the plan.
    """
    specs = {spec.name: spec for spec in plan.specs}
    checksums = {}
    for name, tensor in tensors:
        if name not in specs:
            raise WeightSyncError(f"{name}: names and order must be those of the plan")
        check_tensor(tensor, specs[name], "the trainer", dtype=False)
        checksums[name] = _checksum(tensor.detach().to(torch_dtype(specs[name].dtype)))
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


def _checksum(tensor: Tensor) -> str:
    return xxhash.xxh3_64(tensor_bytes(tensor).data).hexdigest()
