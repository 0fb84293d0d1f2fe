"""Tensors as specs and as bytes."""

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_types import TensorSpec, WeightSyncError

Bytes = npt.NDArray[np.uint8]


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
    """The torch dtype of a spec's dtype name."""
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
        check_dtype(tensor, spec, holder)


def check_dtype(tensor: Tensor, spec: TensorSpec, holder: str) -> None:
    """Raise WeightSyncError unless the tensor has the dtype that the plan gives it."""
    if _dtype_name(tensor.dtype) != spec.dtype:
        raise WeightSyncError(f"{spec.name}: planned as {spec.dtype}, {holder} has {_dtype_name(tensor.dtype)}")


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
