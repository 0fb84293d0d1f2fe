"""Tensors on their way to a collective and back: flat, contiguous, of a dtype that the backend knows."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from offbeat_types import ConfigError, ShapeError

ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]

REDUCE_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided here
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

NATIVE_DTYPES: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""What every backend can reduce. Other dtypes are moved as bytes and cannot be reduced."""


def to_flat(tensor: torch.Tensor) -> torch.Tensor:
    """[n], contiguous: a view where the tensor is, else a copy."""
    return tensor.detach().contiguous().view(-1)


def as_movable(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes where the backend does not know the dtype."""
    return flat if flat.dtype in NATIVE_DTYPES else flat.view(torch.uint8)


def put_back(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Write what arrived into the caller's tensor, if it is not there already."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tensor


def describe(tensor: torch.Tensor) -> str:
    """Such as "float32[2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe_rows(part: torch.Tensor) -> str:
    """The same for any number of rows: "float32[*, 3]"."""
    return f"{str(part.dtype).removeprefix('torch.')}[{', '.join(['*', *map(str, part.shape[1:])])}]"


def gather_options(timeout: timedelta) -> AllgatherOptions:
    """The one operation of torch whose short form takes no timeout."""
    options = AllgatherOptions()
    options.timeout = timeout
    return options


def check_reduction(tensor: torch.Tensor, op: ReduceOp, group: str) -> None:
    """Refuse what a backend would compute differently from another, or not at all.

    Raises:
        ConfigError: no such reduction.
        ShapeError: a dtype that it is not defined for.
    """
    if op not in REDUCE_OPS:
        raise ConfigError(f"a reduction is one of {', '.join(REDUCE_OPS)}: got {op!r}")
    if tensor.dtype not in NATIVE_DTYPES or (op == "mean" and not tensor.is_floating_point()):
        wanted = "a floating-point dtype" if op == "mean" else "a float, or an int of 8, 32 or 64 bit"
        raise ShapeError(f"{op} over {group} needs {wanted}: got {describe(tensor)}; convert it before")


def check_rows(rows: torch.Tensor, size: int, what: str, *, like: torch.Tensor | None = None) -> None:
    """Refuse rows that are not one for each member, or not like the tensor they go to.

    Raises:
        ShapeError: they are not.
    """
    if rows.dim() == 0 or rows.shape[0] != size:
        raise ShapeError(f"{what} needs one row for each member, [{size}, ...]: got {describe(rows)}")
    if like is None:
        return
    if rows.shape[1:] != like.shape or rows.dtype != like.dtype or rows.device != like.device:
        raise ShapeError(f"each row of {what} must be like the output, {describe(like)}: got rows {describe(rows)}")


def check_parts(parts: Sequence[torch.Tensor], size: int, what: str) -> None:
    """Refuse parts that are not one for each member, alike but for their first dim.

    Raises:
        ShapeError: they are not.
    """
    kinds = {(part.dtype, part.device, part.shape[1:]) for part in parts}
    if len(parts) != size or len(kinds) != 1 or any(part.dim() == 0 for part in parts):
        listed = ", ".join(describe(part) for part in parts)
        raise ShapeError(f"{what} needs {size} parts that differ in their first dim alone: got {listed or 'none'}")
