"""Attention sinks: one more logit of each query head, a weight, that takes a share of the softmax and gives no value.

With L the log-sum-exp of a query's scores, the sink s leaves them the share sigmoid(L - s) = exp(L - logaddexp(L, s)).
- `split` and `varlen` return L: they attend without sinks, and their output is scaled. Their backward pass is exact
  when it is given the scaled output and logaddexp(L, s): it makes probabilities by the log-sum-exp, and subtracts the
  dot product of output and gradient, to which a sink adds nothing.
- torch's attention under a mask returns no L. For `rows` the sink is the score of one more key, whose value is zero.

Shapes: T packed tokens, H query heads, J key heads, D and E head sizes of keys and values, R rows, L queries and K keys
of a row.
Source: gpt-oss model card (arXiv:2508.10925); FlashAttention-2 (arXiv:2307.08691) for the backward pass.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen as _varlen  # noqa: F401  registers the operations

from offbeat_training import VarlenBounds, window_size

SINK_CHANNELS: Final = 8
"""Numbers by which `add_sink_key` lengthens a head, of which one is used: kernels take head sizes that 8 divides."""


def leave_to_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale attention without sinks, in place, to what it is with them; return the log-sum-exp with them.

    Args:
        out: [..., E].
        lse: [...], of the scores.
        sinks: broadcast to [...].
    """
    joined = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - joined).exp_()[..., None])
    return joined


def sink_gradient(grad: Tensor, out: Tensor, joined: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of each query's sink, [...].

    Args:
        grad: [..., E], of `out`.
        out: [..., E], attention with sinks.
        joined: [...], log-sum-exp with them.
        sinks: broadcast to [...].
    """
    share = (sinks.to(joined.dtype) - joined).exp_()
    return share.mul_((grad.to(joined.dtype) * out.to(joined.dtype)).sum(-1)).neg_()


def add_sink_key(
    query_RHLD: Tensor, key_RHKD: Tensor, value_RHKE: Tensor, mask: Tensor, sinks_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and mask with one more key in each row, whose score is the sink.

    Heads are `SINK_CHANNELS` longer: in the first of these numbers queries hold the sink, the new key 1 and the others
    0. (A mask of numbers could hold it too, but most kernels give a mask no gradient.)
    """
    sink = (sinks_H / scale).to(query_RHLD.dtype)[:, None, None].expand(*query_RHLD.shape[:3], 1)
    query = functional.pad(torch.cat([query_RHLD, sink], -1), (0, SINK_CHANNELS - 1))
    key = functional.pad(key_RHKD, (0, SINK_CHANNELS, 0, 1))
    key[..., -1, key_RHKD.shape[-1]] = 1.0
    return query, key, functional.pad(value_RHKE, (0, SINK_CHANNELS, 0, 1)), functional.pad(mask, (0, 1), value=True)


def varlen_with_sinks(
    query_THD: Tensor,
    key_KJD: Tensor,
    value_KJD: Tensor,
    sinks_H: Tensor,
    bounds: VarlenBounds,
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Return [T, H, D]: `offbeat_training.varlen_attention` with sinks."""
    longest, seen = (bounds.longest_query, bounds.longest_key), window_size(window, causal=causal)
    out: Tensor = _VarlenWithSinks.apply(  # type: ignore[no-untyped-call]
        query_THD.contiguous(), key_KJD, value_KJD, sinks_H, bounds.queries, bounds.keys, *longest, scale, seen
    )
    return out


class _VarlenWithSinks(torch.autograd.Function):
    """torch's operations themselves, for `varlen_attn` has no gradient of the log-sum-exp that it returns."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor,
        queries: Tensor,
        keys: Tensor,
        longest_query: int,
        longest_key: int,
        scale: float,
        seen: tuple[int, int],
    ) -> Tensor:
        is_causal = seen == (-1, 0)
        bounds, more = (queries, keys, longest_query, longest_key, is_causal), (scale, list(seen))
        out, lse_HT, state = torch.ops.torch_attn._varlen_attn(query, key, value, *bounds, *more)
        joined_HT = torch.logaddexp(lse_HT, sinks_H.float()[:, None])
        scaled: Tensor = out * (lse_HT - joined_HT).exp().T[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, scaled, joined_HT, queries, keys, state)
        ctx.longest, ctx.more, ctx.causal = (longest_query, longest_key), more, is_causal
        return scaled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out, joined_HT, queries, keys, state = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = torch.ops.torch_attn._varlen_attn_backward(
            grad, query, key, value, out, joined_HT, queries, keys, *ctx.longest, ctx.causal, state, *ctx.more
        )
        grad_sinks = sink_gradient(grad, out, joined_HT.T, sinks_H).sum(0)
        return *found, grad_sinks.to(sinks_H.dtype), *[None] * 6
