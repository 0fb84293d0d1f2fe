"""A linear map with its weight plain or packed.

On x86 MKL's float32 product packs the weight anew on each call, which for the few rows of a decoding step costs more
than the product. oneDNN takes a weight packed once: measured 2 to 3 times as fast for 8 to 64 rows (see README), and
it fuses SwiGLU and the residual addition into the products. These are the operators torch.compile emits for the CPU.
"""

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_device import exact_head, exact_product, pack_matrix
from offbeat_rollout_torch._parameters import Arena

PACK_FROM_ELEMENTS: Final = 1 << 15
"""Below this a plain product is as fast: the fixed cost of the packed operator is about 15 µs."""


def is_worth_packing(out_size: int, in_size: int) -> bool:
    return out_size * in_size >= PACK_FROM_ELEMENTS


class Linear:
    """y = x W^T + b, with the weight held plain [out, in] or packed, never both for long.

    Args:
        out_size: of y.
        in_size: of x.
        bias: whether there is one.
        like: format and device of the weight.
        pack: whether it may be packed.
        shared: the plain weight, where something else reads it, too.
        packed_dtype: format in which it is packed; None for its own.
        exact: it serves exact numerics, whose products are packed whatever their size.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        *,
        bias: bool,
        like: Tensor | Arena,
        pack: bool,
        shared: Tensor | None = None,
        packed_dtype: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        self.size, self._like, self._shared = (out_size, in_size), like, shared is not None
        self.in_size = in_size
        self._pack = pack and (exact or is_worth_packing(out_size, in_size))
        self.input_dtype = packed_dtype if self._pack and packed_dtype else like.dtype
        self._plain: Tensor | None = like.new_empty(*self.size) if shared is None else shared
        self._packed: Tensor | None = None
        self.bias: Tensor | None = like.new_empty(out_size) if bias else None

    def weight(self) -> Tensor:
        if self._plain is None:
            packed = self._packed
            self._plain = self._like.new_empty(*self.size) if packed is None else packed.to_dense().to(self._like.dtype)
        if not self._shared:
            self._packed = None
        return self._plain

    def discard(self) -> None:
        """Forget the packed weight: all of it will be written anew, and need not be unpacked."""
        if not self._shared:
            self._packed = None

    def freeze(self) -> None:
        """Pack, and drop the plain weight unless it is shared. Exact: the packed format is no narrower."""
        if self._pack and self._plain is not None:
            self._packed = pack_matrix(self._plain.to(self.input_dtype))
            self._plain = self._plain if self._shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] to [M, out], both in `input_dtype`."""
        if self._packed is None:
            assert self._plain is not None
            return F.linear(x, self._plain, self.bias)
        return _packed_product(x, self._packed, self.bias, "none")

    def exact(self, x: Tensor) -> Tensor:
        """[M, in] to [M, out], a row of which depends on no other; see `exact_product`."""
        weight = self._plain if self._packed is None else self._packed
        assert weight is not None
        return exact_product(x, weight, self.bias)

    def exact_in_float32(self, x: Tensor) -> Tensor:
        """Return what `exact` gives, and sums of products are not rounded; see `exact_head`."""
        if self._packed is not None:
            return exact_product(x, self._packed)
        assert self._plain is not None
        return exact_product(x, exact_head(self._plain, self._plain.dtype), wide=True)

    def in_float32(self, x: Tensor) -> Tensor:
        """[M, in] in `input_dtype` to [M, out] in float32; on CUDA sums of products in bfloat16 are not rounded."""
        if self._plain is not None and x.is_cuda and x.dtype != torch.float32:
            assert self.bias is None
            return torch.mm(x, self._plain.t(), out_dtype=torch.float32)
        return self(x).float()

    def silu(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.silu(self(x), inplace=True)
        return _packed_product(x, self._packed, self.bias, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        if self._packed is None:
            return self(x).mul_(other)
        return _packed_product_with(x, other, self._packed, self.bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if self._packed is not None:
            return _packed_product_with(x, other, self._packed, self.bias, "add")
        if self.bias is not None:
            return self(x).add_(other)
        assert self._plain is not None
        return torch.addmm(other, x, self._plain.t())


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, then, [], "")
    return y


def _packed_product_with(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, then)
    return y
