"""Tensors as bytes: the trainer's on their way into buckets, and the engine's that are written."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from offbeat_types import TensorSpec, WeightSyncError
from offbeat_weightsync._plan import Bucket, BucketPlan, Piece

Bytes = npt.NDArray[np.uint8]

RUN_BYTES: Final = 512 << 10
"""Copied or sent, and hashed: short enough for what was read and written to be in the cache of the core (L2)."""


def describe_tensors(named_tensors: Iterable[tuple[str, Tensor]], dtype: str | None = None) -> list[TensorSpec]:
    """Name, dtype and shape of each tensor.

    Args:
        named_tensors: (name, tensor), in the order in which they will be sent.
        dtype: format in which floating-point tensors travel, such as "bfloat16"; None keeps each one's own.
    """
    return [
        TensorSpec(
            name,
            dtype if dtype is not None and tensor.is_floating_point() else _dtype_name(tensor.dtype),
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
    """The elements as [bytes] uint8, row-major: a view where the tensor is contiguous and in host memory."""
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

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._specs, self._tensors = plan.specs, iter(tensors)
        self._checksums: list[str] = []
        self._index = -1
        self._flat: Tensor | None = None  # of the present tensor: its elements, where they are converted or copied
        self._bytes: Bytes | None = None  # or its bytes, where these are what travels

    def fill(self, bucket: Bucket, memory: Tensor) -> Iterator[int]:
        """Copy a bucket into memory run by run, and hash what lies there then. Buckets are filled in order.

        Args:
            bucket: of the plan.
            memory: [bytes] uint8 on any device, at least `bucket.num_bytes` long.

        Yields:
            How many of the bucket's bytes are there.
        """
        hasher = xxhash.xxh3_64()
        for run in self._runs(bucket, RUN_BYTES if memory.is_cpu else bucket.num_bytes):
            target = memory[run.bucket_offset : run.bucket_offset + run.num_bytes]
            self._copy(run, target)
            hasher.update(tensor_bytes(target).data)  # what has arrived, not what was sent off
            yield run.bucket_offset + run.num_bytes
        self._checksums.append(hasher.hexdigest())

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
        """The checksum of each bucket; WeightSyncError if there are more tensors than planned."""
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

    Args:
        tensor: the engine's. `bytes` are its elements, where they are contiguous in host memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_contiguous = tensor, tensor.is_contiguous()
        self.bytes = tensor_bytes(tensor) if self.is_contiguous and tensor.is_cpu else None

    def room(self, run: Piece) -> Bytes | None:
        """Where a run belongs, if that is host memory."""
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
