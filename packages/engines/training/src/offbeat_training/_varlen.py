"""Attention over sequences of different lengths that lie one after the other: torch's variable-length flash attention.

Shapes: T queries and K keys of all sequences, H query heads, G key heads, D head size, S sequences.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor

MAX_FLASH_HEAD_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True)
class VarlenBounds:
    """Bounds of the sequences in a pack.

    Args:
        queries: [S + 1] int32, cumulative numbers of queries.
        keys: [S + 1] int32, cumulative numbers of keys.
        longest_query: most queries of a sequence.
        longest_key: most keys of a sequence.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


def fits_varlen(head_size: int, value_size: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes heads of this size in this format.

    Source: torch 2.11 to 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd.
    """
    fits_size = head_size == value_size and head_size % 8 == 0 and head_size <= MAX_FLASH_HEAD_SIZE
    return fits_size and dtype in (torch.float16, torch.bfloat16)


def window_size(window: int | None, *, causal: bool) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees, as torch's kernel wants it; -1: all.

    Args:
        window: most keys up to the query's own, that one included; None: all of them.
        causal: none after its own; else all of its sequence.
    """
    return -1 if window is None else window - 1, 0 if causal else -1


def varlen_attention(
    query_THD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    bounds: VarlenBounds,
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Attention within each sequence, its last query aligned with its last key. Needs a GPU.

    Args:
        query_THD: float16 or bfloat16, like the others.
        key_KGD: H is a multiple of G.
        value_KGD: like the keys.
        bounds: of the sequences.
        scale: factor on the scores.
        window: most keys up to the query's own that it sees, that one included; None: all of them.
        causal: no keys after the query's own.

    Returns:
        [T, H, D].
    """
    from torch.nn.attention import varlen

    more: dict[str, Any] = {}
    if _takes_enable_gqa():
        more["enable_gqa"] = query_THD.shape[1] != key_KGD.shape[1]
    out = varlen.varlen_attn(
        query_THD.contiguous(),
        key_KGD,
        value_KGD,
        bounds.queries,
        bounds.keys,
        bounds.longest_query,
        bounds.longest_key,
        scale=scale,
        window_size=window_size(window, causal=causal),
        **more,
    )
    assert isinstance(out, Tensor)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_enable_gqa() -> bool:
    """Before torch 2.13 there is no such argument, and fewer key heads are accepted without it."""
    from torch.nn.attention import varlen

    return "enable_gqa" in _arguments(varlen.varlen_attn)


@cache
def _arguments(function: Any) -> frozenset[str]:
    return frozenset(signature(function).parameters)
