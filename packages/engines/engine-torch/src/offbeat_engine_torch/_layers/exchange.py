"""Exchanges of ranks within a layer: tensor parallel ranks add up, context parallel ranks swap tokens for heads.

`experts` has those of expert parallel ranks, which are not compiled: how many tokens travel is known when they do.

Each is an operation of torch's, so that `torch.compile` makes one call of it in the graph of a layer. All ranks come to
the same operations in the same order, compiled too: they compute the same packs, their parts of a layer have the same
shapes, and of the rank a layer depends for its share of sinks alone, so that graphs are compiled for the same calls.
Compiling exchanges nothing: where one rank compiles for longer, the others wait in their next exchange.

Shapes: C context parallel ranks, T tokens of a pack, t = T / C of them on a rank, H heads, D head size.
"""

import threading
from dataclasses import dataclass
from typing import Any, Final, Literal, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat_mesh import Group, Mesh

Axis = Literal["tp", "cp", "ep"]


def here(parameter: Any) -> Any:
    """Return the part of a parameter that this rank computes with; anything else as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class LayerRanks:
    """The ranks along an axis that meet in each layer, in the thread of the forward pass and in that of the backward
    pass.

    Args:
        mesh: of all ranks.
        axis: along which they are.
    """

    def __init__(self, mesh: Mesh, axis: Axis) -> None:
        self._thread = threading.get_ident()
        self._here = mesh.group(axis, channel="forward")
        # On a GPU torch runs the backward pass in its own thread.
        self._elsewhere = mesh.group(axis, channel="backward")
        self.rank, self.size = self._here.rank, self._here.size
        self.name: Final[str] = self._here.process_group.group_name
        _BY_NAME[self.name] = self

    @classmethod
    def of(cls, mesh: Mesh, axis: Axis) -> Self:
        """Return those of a mesh, so that policies of one mesh share compiled layers: their graphs hold the name."""
        group = mesh.group(axis, channel="forward")
        found = _BY_NAME.get(group.process_group.group_name)
        return found if isinstance(found, cls) and found._here is group else cls(mesh, axis)

    @staticmethod
    def named(name: str) -> "LayerRanks":
        """Return those whose group has this name."""
        return _BY_NAME[name]

    @property
    def group(self) -> Group:
        """Their group in this thread."""
        return self._here if threading.get_ident() == self._thread else self._elsewhere


_BY_NAME: Final[WeakValueDictionary[str, LayerRanks]] = WeakValueDictionary()
"""Ranks by the name of their group: an operation takes no other objects than tensors, numbers and text."""


class TensorParallel(LayerRanks):
    """The ranks that share each layer. Megatron-LM's f and g are `enter` and `leave` here."""

    def add(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        return self.group.all_reduce(tensor)

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the largest over the ranks, in place."""
        return self.group.all_reduce(tensor, "max")

    def enter(self, x: Tensor) -> Tensor:
        """Use what all ranks hold for this rank's columns: its gradient is the sum of all columns'."""
        entered: Tensor = _Enter.apply(x, self.name)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, part: Tensor) -> Tensor:
        """Add up what each rank has computed from its rows."""
        whole: Tensor = _Leave.apply(part, self.name)  # type: ignore[no-untyped-call]
        return whole


@dataclass(frozen=True)
class SharedTokens:
    """The context parallel ranks, as graphs know them.

    Attention needs whole sequences. Where C divides the query heads, the ranks swap: each gets all tokens of its share
    of the heads, and attends as one rank does. Else each gathers the keys and values of all tokens for its own queries.
    Source: DeepSpeed-Ulysses (arXiv:2309.14509); gathered keys as in Llama 3 (arXiv:2407.21783, section 3.3.2).

    Args:
        name: of their group.
        rank: of this one among them.
        size: C.
    """

    name: str
    rank: int
    size: int

    def take_heads(self, x_1HtD: Tensor) -> Tensor:
        """[1, H, t, D] of this rank's tokens to [1, H / C, T, D] of its heads."""
        _, num_heads, length, width = x_1HtD.shape
        swapped = self._swap(x_1HtD.reshape(self.size, num_heads // self.size, length, width))
        return swapped.transpose(0, 1).reshape(1, num_heads // self.size, self.size * length, width)

    def take_tokens(self, x_1THD: Tensor) -> Tensor:
        """[1, T, H / C, D] of this rank's heads to [1, t, H, D] of its tokens."""
        _, num_tokens, num_heads, width = x_1THD.shape
        swapped = self._swap(x_1THD.reshape(self.size, num_tokens // self.size, num_heads, width))
        return swapped.transpose(0, 1).reshape(1, num_tokens // self.size, self.size * num_heads, width)

    def gather_tokens(self, x_1HtD: Tensor) -> Tensor:
        """[1, H, t, D] of this rank's tokens to [1, H, T, D]."""
        gathered: Tensor = _Gather.apply(x_1HtD[0], self.name, self.size)  # type: ignore[no-untyped-call]
        return gathered.transpose(0, 1).flatten(1, 2)[None]

    def _swap(self, x: Tensor) -> Tensor:
        swapped: Tensor = _Swap.apply(x, self.name)  # type: ignore[no-untyped-call]
        return swapped


class ContextParallel(LayerRanks):
    """The ranks that share the tokens of each pack."""

    @property
    def tokens(self) -> SharedTokens:
        """Return what a layer is given of them."""
        return SharedTokens(self.name, self.rank, self.size)

    def join(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks, [C, ...], of which they all make the same use: each gets its row's gradient."""
        rows: Tensor = _Join.apply(row, self)  # type: ignore[no-untyped-call]
        return rows


def times_to_repeat(num_key_heads: int, size: int) -> int:
    """Return how often to repeat each key head so that ranks which share the query heads have the key heads of theirs.

    Args:
        num_key_heads: of a model whose query heads `size` divides.
        size: number of ranks.
    """
    times = 1
    while num_key_heads * times % size:  # `math.gcd` takes no number that a tracer stands in for
        times += 1
    return times


@torch.library.custom_op("offbeat_engine_torch::add_up", mutates_args=())
def _add_up(part: Tensor, name: str) -> Tensor:
    """Return the sum over the ranks of this name."""
    # A copy: ranks add up in place, and a gradient that autograd hands over is not ours to change.
    return _BY_NAME[name].group.all_reduce(part.clone(memory_format=torch.contiguous_format))


@_add_up.register_fake
def _like_the_sum(part: Tensor, name: str) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


@torch.library.custom_op("offbeat_engine_torch::swap_rows", mutates_args=())
def _swap_rows(rows: Tensor, name: str) -> Tensor:
    """Give row i to rank i; return the rows that all have for this one."""
    return _BY_NAME[name].group.all_to_all_rows(rows)


@_swap_rows.register_fake
def _like_the_rows(rows: Tensor, name: str) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@torch.library.custom_op("offbeat_engine_torch::gather_rows", mutates_args=())
def _gather_rows(row: Tensor, name: str, size: int) -> Tensor:
    """Return the rows of all ranks, [size, ...]."""
    return _BY_NAME[name].group.all_gather(row)


@_gather_rows.register_fake
def _like_all_rows(row: Tensor, name: str, size: int) -> Tensor:
    return row.new_empty((size, *row.shape))


@torch.library.custom_op("offbeat_engine_torch::add_up_rows", mutates_args=())
def _add_up_rows(rows: Tensor, name: str) -> Tensor:
    """Return the sum over the ranks of this rank's row."""
    return _BY_NAME[name].group.reduce_scatter(rows)


@_add_up_rows.register_fake
def _like_one_row(rows: Tensor, name: str) -> Tensor:
    return rows.new_empty(rows.shape[1:])


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _add_up(grads[0], ctx.name), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, name: str) -> Tensor:
        whole: Tensor = _add_up(part, name)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Swap(torch.autograd.Function):
    """Rows swapped with the other ranks; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str) -> Tensor:
        ctx.name = name
        swapped: Tensor = _swap_rows(rows, name)
        return swapped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _swap_rows(grads[0], ctx.name), None


class _Gather(torch.autograd.Function):
    """The rows of all ranks; each rank has a part of each row's gradient."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, name: str, size: int) -> Tensor:
        ctx.name = name
        gathered: Tensor = _gather_rows(row, name, size)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _add_up_rows(grads[0], ctx.name), None, None


class _Join(torch.autograd.Function):
    """The rows of all ranks, which all ranks use alike: each has the whole gradient of its row."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, ranks: ContextParallel) -> Tensor:
        ctx.rank = ranks.rank
        return ranks.group.all_gather(row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None
