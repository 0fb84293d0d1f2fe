"""Frozen matrices held in NF4: 4 bits for each weight, and a scale for 64 of them, itself in 8 bits.

A code is the number of a quantile of the normal distribution; the largest magnitude of a block scales it. From the
scales their mean is taken, and what is left is held in 8 bits of the dynamic code, scaled by the largest of 256. Codes
and scales of a row lie together, so that ranks cut and gather them by rows. Blocks are those of the whole matrix, and
so are values on any number of ranks.

Source: QLoRA (arXiv:2305.14314, sections 2 and 3); table and order of bitsandbytes 0.50 (`quantize_nf4` with
`compress_statistics`), whose values these are.

Shapes: R rows of a matrix, or of all matrices of a stack; C columns; B blocks of a row; P bytes of a row; G groups of
scales; T tokens.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat_training import dynamic_codes

BLOCK: Final = 64
"""Weights of a row that share a scale."""
_GROUP: Final = 256
"""Scales that share a range."""
_CHUNK_WEIGHTS: Final = 2**24
NF4_BYTES: Final = 0.5 + 1 / BLOCK + 4 / (BLOCK * _GROUP)
"""Bytes of one weight."""

# fmt: off
_LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_SMALLEST: Final = 1e-38
"""A divisor instead of 0."""


class Nf4Weight:
    """One frozen matrix, or stack of matrices: how the bytes of its parameter stand for numbers.

    Args:
        shape: of the numbers; the last dimension is a multiple of `BLOCK`.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        *rows, self._num_columns = self.shape
        self._row_size = math.prod(rows[1:])  # rows of R that an index of the first dimension has
        self.packed_shape = (*rows, self._num_columns // 2 + self._num_columns // BLOCK)
        self._ranges_G, self._mean = torch.empty(0), torch.empty(0)

    @torch.no_grad()
    def pack(self, whole: Tensor) -> Tensor:
        """Return the bytes of numbers, rounded to bfloat16 first, and keep what scales their scales."""
        rows_RC = whole.reshape(-1, self._num_columns)
        packed_RP = torch.empty(len(rows_RC), self.packed_shape[-1], dtype=torch.uint8, device=whole.device)
        scales_RB = rows_RC.new_empty(len(rows_RC), self._num_columns // BLOCK, dtype=torch.float32)
        edges, scale_edges, *_ = _tables(whole.device)
        for start, stop in _chunks(rows_RC):
            blocks_RBK = rows_RC[start:stop].bfloat16().float().view(stop - start, -1, BLOCK)
            largest_RB = scales_RB[start:stop] = blocks_RBK.abs().amax(2)
            scaled = blocks_RBK * (1 / largest_RB.clamp(min=_SMALLEST))[..., None]
            codes_RC = torch.bucketize(scaled.flatten(1), edges, out_int32=True)
            packed_RP[start:stop, : self._num_columns // 2] = codes_RC[:, ::2] << 4 | codes_RC[:, 1::2]
        self._mean = scales_RB.mean()
        padding = -scales_RB.numel() % _GROUP
        groups_GN = functional.pad(scales_RB.flatten() - self._mean, (0, padding)).view(-1, _GROUP)
        self._ranges_G = groups_GN.abs().amax(1)
        scaled = groups_GN * (1 / self._ranges_G.clamp(min=_SMALLEST))[:, None]
        numbers = torch.bucketize(scaled, scale_edges, out_int32=True).flatten()[: scales_RB.numel()]
        packed_RP[:, self._num_columns // 2 :] = numbers.view_as(scales_RB)
        return packed_RP.view(self.packed_shape)

    @torch.no_grad()
    def unpack(self, packed: Tensor, first: int = 0) -> Tensor:
        """Return the numbers of some bytes, in bfloat16.

        Args:
            packed: of rows along the first dimension of the shape.
            first: index of the first of these in the whole.
        """
        packed_RP, half = packed.reshape(-1, packed.shape[-1]), self._num_columns // 2
        _, _, pairs, scale_codes = _tables(packed.device)
        out_RC = torch.empty(len(packed_RP), self._num_columns, dtype=torch.bfloat16, device=packed.device)
        num_blocks = self._num_columns // BLOCK
        for start, stop in _chunks(out_RC):
            rows_RP = packed_RP[start:stop]
            place = (first * self._row_size + start) * num_blocks
            index = torch.arange(place, place + (stop - start) * num_blocks, device=packed.device) // _GROUP
            ranges_RB = self._ranges_G[index].view(-1, num_blocks)
            scales_RB = functional.embedding(rows_RP[:, half:].int(), scale_codes)[..., 0] * ranges_RB + self._mean
            levels = functional.embedding(rows_RP[:, :half].int(), pairs).view(stop - start, num_blocks, BLOCK)
            out_RC[start:stop] = (levels * scales_RB[..., None]).flatten(1)
        return out_RC.view(len(packed), *self.shape[1:])


def _chunks(rows_RC: Tensor) -> Iterator[tuple[int, int]]:
    """Iterate over the rows that are packed or unpacked at a time, so that what lies between the two stays small."""
    size = max(1, _CHUNK_WEIGHTS // rows_RC.shape[1])
    return ((start, min(start + size, len(rows_RC))) for start in range(0, len(rows_RC), size))


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the edges of codes and of scales' codes, the two levels of each byte [256, 2], and scales' codes [256, 1].

    The 8-bit code of moments has -1 in place of the smallest negative number, which the code of the paper has.
    """
    levels, held = torch.tensor(_LEVELS), dynamic_codes(signed=True)
    codes = torch.cat([held[1:], -held[held > 0][:1]]).sort().values
    byte = torch.arange(256)
    pairs = torch.stack([levels[byte >> 4], levels[byte & 15]], 1)
    edges = [(each[1:] + each[:-1]) / 2 for each in (levels, codes)]
    one, other, pairs, codes = (each.to(device) for each in (*edges, pairs, codes[:, None]))
    return one, other, pairs, codes


class Nf4Linear(nn.Linear):
    """A frozen linear layer whose weight is held in NF4. Made by `hold_in_nf4`."""

    nf4: dict[str, Nf4Weight]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] bfloat16."""
        out: Tensor = _Product.apply(x.bfloat16(), self.weight, self.nf4["weight"], 0, None, True)  # type: ignore[no-untyped-call]
        bias: Any = self.bias  # None, whatever torch's types say
        return out if bias is None else out + bias.bfloat16()


class Nf4Stack:
    """Weights of fused experts, one matrix each, as far as transformers' grouped products ask.

    Args:
        packed: bytes of the stack.
        weight: what they stand for.
        first: index of the first of these matrices in the whole stack.
        transposes: the product is with the transposed matrices.
    """

    def __init__(self, packed: Tensor, weight: Nf4Weight, *, first: int = 0, transposes: bool = False) -> None:
        self.packed, self.weight, self.first, self.transposes = packed, weight, first, transposes
        self.device, self.dtype = packed.device, torch.bfloat16

    def transpose(self, dim: int, other: int) -> "Nf4Stack":
        """Transpose each matrix."""
        assert {dim, other} == {-2, -1}
        return Nf4Stack(self.packed, self.weight, first=self.first, transposes=not self.transposes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """Multiply by it; `functional.grouped_mm` is all that is called with it."""
        assert func in (functional.grouped_mm, torch._grouped_mm), func
        x, stack = args
        numbers = stack.packed, stack.weight, stack.first
        out: Tensor = _Product.apply(x, *numbers, kwargs["offs"], stack.transposes)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """A product with frozen matrices, which are unpacked for it, and once more for the backward pass: never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, weight: Nf4Weight, first: int, ends: Tensor | None, transposes: bool
    ) -> Tensor:
        """Multiply [T, .] by a matrix, or by those of a stack, each from where the one before it `ends`."""
        ctx.weight, ctx.first, ctx.ends, ctx.transposes = weight, first, ends, transposes
        ctx.save_for_backward(packed)
        numbers = weight.unpack(packed, first)
        return _multiply(x, numbers.mT if transposes else numbers, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (packed,) = ctx.saved_tensors
        numbers = ctx.weight.unpack(packed, ctx.first)
        grad = _multiply(grads[0].contiguous(), numbers if ctx.transposes else numbers.mT, ctx.ends)
        return grad, None, None, None, None, None


def _multiply(x: Tensor, matrix: Tensor, ends: Tensor | None) -> Tensor:
    return x @ matrix if ends is None else functional.grouped_mm(x, matrix, offs=ends)


def packed_weights(whole: nn.Module) -> dict[str, Nf4Weight]:
    """Return what a model holds in NF4, by the name of its parameter."""
    return {
        f"{path}.{name}": weight
        for path, module in whole.named_modules()
        for name, weight in module.__dict__.get("nf4", {}).items()
    }


def hold_in_nf4(module: nn.Module, name: str) -> None:
    """Hold a parameter, of a linear layer or of fused experts, in bytes that are open until it is packed."""
    parameter: Any = getattr(module, name)
    weight = Nf4Weight(parameter.shape)
    packed = torch.empty(weight.packed_shape, dtype=torch.uint8, device=parameter.device)
    module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
    module.__dict__.setdefault("nf4", {})[name] = weight
    if isinstance(module, nn.Linear):
        module.__class__ = Nf4Linear
