"""Tensors as bytes: the trainer's on their way into buckets, the engine's that are written, and checksums of both.

A checksum of each bucket proves that weights have arrived; one of each tensor shows what has changed.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from offbeat_core import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._plan import Bucket, BucketPlan, Piece
from offbeat_weightsync._sums.words import WordSum

Bytes = npt.NDArray[np.uint8]

Checksum = Literal["xxh3", "words"]
"""Checksum of a bucket: 64-bit xxh3, in host memory, or the sum of its words where they lie (`WordSum`)."""

RUN_BYTES: Final = 512 << 10
"""Copied or sent, and hashed: short enough for what was read and written to be in the cache of the core (L2)."""


def describe_tensors(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: str | None = None, *, keep: Container[str] = ()
) -> list[TensorSpec]:
    """Name, dtype and shape of each tensor.

    Args:
        named_tensors: (name, tensor), in the order in which they will be sent.
        dtype: format in which floating-point tensors travel, such as "bfloat16"; None keeps each one's own.
        keep: names of tensors that keep their own all the same: see `TrainEngine`.
    """
    return [
        TensorSpec(
            name,
            dtype if dtype and name not in keep and tensor.is_floating_point() else _dtype_name(tensor.dtype),
            tuple(tensor.shape),
        )
        for name, tensor in named_tensors
    ]


@cache
def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def tensor_bytes(tensor: Tensor) -> Bytes:
    """Return the elements as [bytes] uint8, row-major: a view where the tensor is contiguous and in host memory."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if not (plain.is_cpu and plain.is_contiguous()):
        plain = plain.cpu().contiguous()
    if not plain.dim():
        plain = plain.view(1)
    return plain.view(torch.uint8).numpy().reshape(-1)  # a view; torch's takes four times as long to make


def check_tensor(tensor: Tensor, spec: TensorSpec, holder: str, *, dtype: bool = True) -> None:
    """Raise WeightSyncError unless the tensor has the shape, and the dtype, that the plan gives it."""
    if tensor.shape != spec.shape:  # torch.Size is a tuple
        raise WeightSyncError(f"{spec.name}: planned with shape {spec.shape}, {holder} has {tuple(tensor.shape)}")
    if dtype:
        _check_dtype(tensor, spec, holder)


class PlannedTensors:
    """Takes tensors one by one from the trainer, checks them against the plan, and gives their bytes, hashed."""

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]], checksum: Checksum = "xxh3") -> None:
        self._specs, self._tensors, self._checksum = plan.specs, iter(tensors), checksum
        self._checksums: list[str] = []
        self._index = -1
        self._flat: Tensor | None = None  # of the present tensor: its elements, where they are converted or copied
        self._bytes: Bytes | None = None  # or its bytes, where these are what travels

    def fill(self, bucket: Bucket, memory: Tensor) -> Iterator[int]:
        """Copy a bucket into memory, [bytes] uint8 on any device, and yield how many of its bytes are there.

        Run by run, and hashed as it lies there then. Buckets are filled in order.
        """
        hasher, words = xxhash.xxh3_64(), WordSum()
        for run in self._runs(bucket, RUN_BYTES if memory.is_cpu else bucket.num_bytes):
            target = memory[run.bucket_offset : run.bucket_offset + run.num_bytes]
            self._copy(run, target)
            if self._checksum == "words":  # what has arrived, not what was sent off
                words.add(run.bucket_offset, target)
            else:
                hasher.update(tensor_bytes(target).data)
            yield run.bucket_offset + run.num_bytes
        self._checksums.append(words.hexdigest() if self._checksum == "words" else hasher.hexdigest())

    def runs(self, bucket: Bucket) -> Iterator[tuple[Piece, memoryview]]:
        """Each run of a bucket with its bytes, hashed; they are valid until the next is asked for. Raises as `fill`."""
        hasher = xxhash.xxh3_64()
        scratch = torch.empty(min(RUN_BYTES, bucket.num_bytes), dtype=torch.uint8)
        for run in self._runs(bucket, RUN_BYTES):
            if self._bytes is not None:
                data = self._bytes[run.tensor_offset : run.tensor_offset + run.num_bytes].data
            else:
                self._copy(run, scratch[: run.num_bytes])
                data = scratch[: run.num_bytes].numpy().data
            hasher.update(data)
            yield run, data
        self._checksums.append(hasher.hexdigest())

    def finish(self) -> tuple[str, ...]:
        """Return the checksum of each bucket; WeightSyncError if there are more tensors than planned."""
        self._flat = self._bytes = None
        for name, _ in self._tensors:
            raise WeightSyncError(f"{name}: {_describe_surplus(name, self._specs)}")
        return tuple(self._checksums)

    def _runs(self, bucket: Bucket, run_bytes: int) -> Iterator[Piece]:
        for piece in bucket.pieces:
            if piece.tensor != self._index:
                self._take(piece.tensor)
            yield from piece.cut(run_bytes)

    def _take(self, index: int) -> None:
        spec = self._specs[index]
        self._flat = self._bytes = None  # let a tensor made for us go before the next one is made
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"{spec.name}: planned, but the trainer's tensors ended before it")
        if name != spec.name:
            surplus = _describe_surplus(name, self._specs[:index])
            raise WeightSyncError(f"{name}: came where {spec.name} was planned; {surplus}")
        check_tensor(tensor, spec, "the trainer", dtype=False)
        self._index = index
        if tensor.is_cpu and tensor.dtype is torch_dtype(spec.dtype):
            self._bytes = tensor_bytes(tensor)
        else:
            self._flat = tensor.detach().reshape(-1)

    def _copy(self, run: Piece, target: Tensor) -> None:
        """Copy a run of the present tensor, in the dtype planned for it."""
        if self._bytes is not None:
            source = self._bytes[run.tensor_offset : run.tensor_offset + run.num_bytes]
            if target.is_cpu:
                np.copyto(target.numpy(), source)
            else:
                target.copy_(torch.from_numpy(source))
            return
        assert self._flat is not None
        elements = target.view(torch_dtype(self._specs[run.tensor].dtype))
        first = run.tensor_offset // elements.element_size()
        elements.copy_(self._flat[first : first + elements.numel()])


class TargetTensor:
    """An engine's own tensor, to be written run by run where its elements are contiguous.

    `bytes` are its elements, where they are contiguous in host memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_contiguous = tensor, tensor.is_contiguous()
        self.bytes = tensor_bytes(tensor) if self.is_contiguous and tensor.is_cpu else None

    def room(self, run: Piece) -> Bytes | None:
        """Return where a run belongs, if that is host memory."""
        return None if self.bytes is None else self.bytes[run.tensor_offset : run.tensor_offset + run.num_bytes]

    def write(self, run: Piece, part: Tensor) -> None:
        """Copy a run to where it belongs."""
        room = self.room(run)
        if room is not None and part.is_cpu:
            np.copyto(room, part.numpy())  # torch's copy_ is up to a third slower
        else:
            elements = self.tensor.view(-1).view(torch.uint8)
            elements[run.tensor_offset : run.tensor_offset + run.num_bytes].copy_(part)


def find_target(target: Callable[[str], Tensor], spec: TensorSpec) -> Tensor:
    try:
        tensor = target(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: is being sent, but the engine holds no tensor of that name") from error
    _check_dtype(tensor, spec, "the engine")
    if tensor.numel() * tensor.element_size() != spec.num_bytes:
        raise WeightSyncError(f"{spec.name}: planned with shape {spec.shape}, the engine has {tuple(tensor.shape)}")
    return tensor.detach() if tensor.requires_grad else tensor


def _describe_surplus(name: str, sent: Iterable[TensorSpec]) -> str:
    if any(spec.name == name for spec in sent):
        return "it was sent already: the name comes twice"
    return "names and order must be those of the plan"


def _check_dtype(tensor: Tensor, spec: TensorSpec, holder: str) -> None:
    if _dtype_name(tensor.dtype) != spec.dtype:
        raise WeightSyncError(f"{spec.name}: planned as {spec.dtype}, {holder} has {_dtype_name(tensor.dtype)}")


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MAX_HASHERS: Final = 4
"""Threads that hash. More are no faster: memory bandwidth is the limit."""


def prove_tensors(
    plan: BucketPlan,
    version: int,
    read: Callable[[str], Any],
    holder: str = "the engine",
    checksum: Checksum = "xxh3",
) -> WeightProof:
    """Read every tensor back and report its bytes, in the form that `PlannedTensors` gives for the buckets sent.

    It reads all of it after all of it was loaded, so a tensor that a later one has overwritten shows.
    """
    if checksum == "words":
        found = tuple(_word_sums(plan, read, holder))
        return WeightProof(version=version, num_tensors=len(plan.specs), checksums=found)
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
    """Return the same of the trainer's tensors, as they would travel."""
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
    """Return the plan of the tensors that at least one receiver does not hold as we do; all for one that does not say.

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


def _word_sums(plan: BucketPlan, read: Callable[[str], Any], holder: str) -> Iterator[str]:
    """The same where tensors lie."""
    index, held = -1, None
    for bucket in plan.buckets:
        words = WordSum()
        for piece in bucket.pieces:
            if held is None or index != piece.tensor:
                index, tensor = piece.tensor, _read(plan.specs[piece.tensor], read, holder)
                held = tensor.detach().reshape(-1).view(torch.uint8)
            words.add(piece.bucket_offset, held[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
        yield words.hexdigest()


def _read_bytes(spec: TensorSpec, read: Callable[[str], Any], holder: str) -> Bytes:
    return tensor_bytes(_read(spec, read, holder))


def _read(spec: TensorSpec, read: Callable[[str], Any], holder: str) -> Tensor:
    try:
        tensor: Tensor = read(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: was sent, but {holder} holds no tensor of that name") from error
    check_tensor(tensor, spec, holder)
    return tensor
