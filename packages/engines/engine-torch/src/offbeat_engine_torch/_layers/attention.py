"""Attention over packed sequences, registered with transformers under `ATTENTION_NAME`.

Three kernels, each exact; the device says which suits it (`Device.packed_attention`):
- `split`: attention to the own segment and attention to the shared prompt are two calls, joined by their
  log-sum-exps, as ring attention joins its blocks; the backward pass runs the same two calls with the joined
  statistics. No key is ever copied per completion or per query head, and only packed tensors are kept for the backward
  pass.
  Source: FlashAttention-2 (arXiv:2307.08691) for the backward by log-sum-exp, Ring Attention (arXiv:2310.01889).
- `varlen`: torch's variable-length flash attention, sliding windows too; a query's keys are its prompt's and its own,
  aligned at the end. It works on the tensors of a `VarlenKeys` alone, which differ in shape and not in kind from pack
  to pack: so that `torch.compile` makes one graph of a layer for all of them.
- `rows`: padded rows with a mask; every device, head size and sliding window.

Each is causal. Where the tokens of an image see each other (`AttentionPlan.blocks`), a second call, by `varlen` or with
a mask, gives the output of these tokens.

Shapes: T packed tokens, H query heads, J key heads, G = H / J query heads of each, D head size, R rows, L queries and
K keys of a row (padded).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offbeat_core import ModelError
from offbeat_device import exact_attention
from offbeat_engine_torch._layers.exchange import times_to_repeat
from offbeat_engine_torch._layers.plan import AttentionPlan, Rows, VarlenKeys
from offbeat_engine_torch._layers.sinks import add_sink_key, leave_to_sinks, sink_gradient, varlen_with_sinks
from offbeat_training import fits_varlen, varlen_attention

ATTENTION_NAME = "offbeat_packed"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_attention() -> None:
    """Make the packed attention known to transformers; doing it twice changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    plan: AttentionPlan | None = None,
    kernel: str = "rows",
    keys: VarlenKeys | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a pack: transformers' attention interface; `plan` takes the place of its mask.

    With `keys`, those of the plan, it attends by `varlen` where that takes the heads, and by `kernel` otherwise.
    `s_aux` are sinks [H], one of each query head.

    Context parallel ranks, which have a run of the pack's tokens each, exchange tokens and heads here.

    Returns:
        [1, T, H, D] of the tokens that are here, and None for the weights.

    Raises:
        ModelError: the model does not hand the plan on, or asks for a soft cap or a bias on the scores, or for a mask.
    """
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not pass arguments on to its attention: family not supported")
    if unused.get("softcap") is not None or unused.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} caps or biases attention scores: family not supported")
    if attention_mask is not None:  # transformers makes none for this function: the layer has made it itself
        raise ModelError(f"{type(module).__name__} makes its own attention mask: family not supported")
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    how = (plan, kernel, keys, scale, sliding_window)
    ranks = plan.ranks
    if ranks is None:
        return attend(query_1HTD, key_1KTD, value_1KTD, s_aux, *how), None
    if plan.run is not None:
        key_1KTD, value_1KTD = ranks.gather_tokens(key_1KTD), ranks.gather_tokens(value_1KTD)
        return attend(query_1HTD, key_1KTD, value_1KTD, s_aux, *how), None
    times = times_to_repeat(key_1KTD.shape[1], ranks.size)
    if times > 1:
        key_1KTD, value_1KTD = (x.repeat_interleave(times, 1) for x in (key_1KTD, value_1KTD))
    query, key, value = (ranks.take_heads(x) for x in (query_1HTD, key_1KTD, value_1KTD))
    sinks = None if s_aux is None else s_aux.chunk(ranks.size)[ranks.rank]
    return ranks.take_tokens(attend(query, key, value, sinks, *how)), None


def attend(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    kernel: str,
    keys: VarlenKeys | None,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Attend with what is here: [1, T, H, D]."""
    # `squeeze`, for the backward pass of `x[0]` fills a tensor with zeros first.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    both_ways = sliding_window is not None or not plan.in_windows_alone
    if keys is not None and fits_varlen(query.shape[-1], value.shape[-1], value.dtype):
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = _attend_in_line(query, key, value, sinks_H, keys, scale, sliding_window)
        if keys.blocks is not None and keys.blocks.token is not None and both_ways:
            block = query.index_select(0, keys.blocks.token)
            seen = _attend_in_line(block, key, value, sinks_H, keys.blocks, scale, sliding_window, causal=False)
            out = out.index_copy(0, keys.blocks.token, seen)
        return out.contiguous()[None]
    # A window that no sequence exceeds hides nothing, and `split` takes none.
    window = sliding_window if sliding_window is not None and sliding_window < plan.longest else None
    plain = window is None and query.shape[-1] == value.shape[-1]
    same = (query.to(value.dtype), key.to(value.dtype), value, sinks_H)
    if kernel == "split" and plain:
        out = _SplitAttention.apply(query, key, value, sinks_H, plan, scale)  # type: ignore[no-untyped-call]
    else:
        token, found = _masked_rows(*same, plan.joined(window), scale)
        out = found.index_select(0, token.argsort())  # back into the order of the pack
    if plan.blocks and both_ways:
        token, found = _masked_rows(*same, plan.both_ways(window), scale)
        out = out.index_copy(0, token, found.to(out.dtype))
    return out.to(value.dtype).contiguous()[None]  # some families cut it with `view`


def _attend_in_line(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    keys: VarlenKeys,
    scale: float,
    window: int | None,
    *,
    causal: bool = True,
) -> Tensor:
    """Attend by variable-length attention: [n, H, D] of the queries of `keys`."""
    if keys.index is not None:
        key, value = key.index_select(0, keys.index), value.index_select(0, keys.index)
    how: dict[str, Any] = {"scale": scale, "window": window, "causal": causal}
    if sinks_H is None:
        return varlen_attention(query, key, value, keys.bounds, **how)
    return varlen_with_sinks(query, key, value, sinks_H, keys.bounds, **how)


class _SplitAttention(torch.autograd.Function):
    """Own segment and shared prompt in separate flash calls, joined exactly."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TJD: Tensor,
        value_TJD: Tensor,
        sinks_H: Tensor | None,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        num_heads = key_TJD.shape[1]
        # The half-precision kernel for processors is 2 to 10 times slower than the float32 one (bench, docs).
        floats = query_THD.dtype if query_THD.dtype == torch.float64 else torch.float32
        query, key, value = (_by_head(x, num_heads, floats) for x in (query_THD, key_TJD, value_TJD))
        out = torch.empty_like(query)  # `own` writes every token once, before `cross` reads any
        total = out.new_empty(out.shape[:2])
        for rows in plan.own(num_heads):
            part, lse = _call(query, key, value, rows, scale, causal=True)
            out.index_copy_(0, rows.token, part)
            total.index_copy_(0, rows.token, lse)
        for rows in plan.cross(num_heads):
            part, lse = _call(query, key, value, rows, scale, causal=False)
            own_lse = total.index_select(0, rows.token)
            # Each part is a softmax over its own keys; its share in the joint one is exp(its lse - the joint lse).
            joined = torch.logaddexp(own_lse, lse)
            own = out.index_select(0, rows.token)
            own.mul_((own_lse - joined).exp_()[..., None]).add_(part.mul_((lse - joined).exp_()[..., None]))
            out.index_copy_(0, rows.token, own)
            total.index_copy_(0, rows.token, joined)
        sinks = None
        if sinks_H is not None:
            sinks = sinks_H.view(num_heads, 1, -1).expand(-1, plan.num_tokens, -1).flatten(0, 1)
            total = leave_to_sinks(out, total, sinks)
        ctx.save_for_backward(query, key, value, out, total, sinks)
        ctx.plan, ctx.scale, ctx.dtypes = plan, scale, [x.dtype for x in (query_THD, key_TJD, value_TJD)]
        return _by_token(out, num_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total, sinks = ctx.saved_tensors
        num_heads = len(query) // ctx.plan.num_tokens
        tensors = (query, key, value, _by_head(grads[0], num_heads, query.dtype), out, total)
        # Left open: `own` writes every row of them, and `cross` adds to that.
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for rows in ctx.plan.own(num_heads):
            query_part, *others = _call_backward(tensors, rows, ctx.scale, causal=True)
            grad_query.index_copy_(0, rows.token, _unpad(query_part, rows))
            for whole, part in zip((grad_key, grad_value), others, strict=True):
                # Summed over the query heads, which all read one key head.
                whole.index_copy_(0, rows.token, _unpad(part.sum(1, keepdim=True), rows))
        for rows in ctx.plan.cross(num_heads):
            query_part, *others = _call_backward(tensors, rows, ctx.scale, causal=False)
            grad_query.index_add_(0, rows.token, _unpad(query_part, rows))
            for whole, part in zip((grad_key, grad_value), others, strict=True):
                whole.index_add_(0, rows.key, part.sum(1).flatten(0, 1)[:, None])
        grad_sinks = None
        if sinks is not None:
            grad_by_token = sink_gradient(tensors[3], out, total, sinks).view(num_heads, ctx.plan.num_tokens, -1)
            grad_sinks = grad_by_token.sum(1).flatten().to(sinks.dtype)
        found = zip((grad_query, grad_key, grad_value), ctx.dtypes, strict=True)
        return *(_by_token(grad, num_heads).to(dtype) for grad, dtype in found), grad_sinks, None, None


def _by_head(x_THD: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """[T, H, D] to [J * T, G, D], contiguous."""
    x_JTGD = x_THD.reshape(len(x_THD), num_heads, -1, x_THD.shape[2]).transpose(0, 1)
    return x_JTGD.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(0, 1)


def _by_token(x: Tensor, num_heads: int) -> Tensor:
    """[J * T, G, D] to [T, H, D]."""
    return x.view(num_heads, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _repeat(x_TJD: Tensor, heads: int) -> Tensor:
    return x_TJD if heads == 1 else x_TJD.repeat_interleave(heads, 1)


def _gather(x_THD: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[T, H, D] and [R * L] to [R, H, L, D]."""
    return x_THD.index_select(0, index).view(num_rows, -1, *x_THD.shape[1:]).transpose(1, 2)


def _unpad(x_RHLD: Tensor, rows: Rows) -> Tensor:
    """[R, H, L, D] to the real queries' [n, H, D]."""
    flat = x_RHLD.transpose(1, 2).flatten(0, 1)
    return flat if rows.real is None else flat.index_select(0, rows.real)


def _gather_all(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, G, L, D] of rows, and keys and values [R, G, K, D], which all query heads of a key head read."""
    keys, values = (_gather(x, rows.key, rows.num_rows).expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return _gather(query, rows.query, rows.num_rows), keys, values


def _call(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Make one flash call: output [n, G, D] and log-sum-exp [n, G] of the real queries."""
    out, lse = _flash(*_gather_all(query, key, value, rows), 0.0, causal, scale=scale)
    return _unpad(out, rows), _unpad(lse[..., None], rows)[..., 0]


def _call_backward(
    tensors: tuple[Tensor, ...], rows: Rows, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [R, G, L, D] of one flash call, under the joined output and log-sum-exp."""
    query, key, value, grad, out, total = tensors
    grad_rows = _gather(grad, rows.query, rows.num_rows)
    if rows.real is not None:  # what padding computes has no gradient
        keep = grad.new_zeros(len(rows.query)).index_fill_(0, rows.real, 1.0)
        grad_rows = grad_rows * keep.view(rows.num_rows, 1, -1, 1)
    parts: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        grad_rows,
        *_gather_all(query, key, value, rows),
        _gather(out, rows.query, rows.num_rows),
        _gather(total[..., None], rows.query, rows.num_rows)[..., 0],
        0.0,
        causal,
        scale=scale,
    )
    return parts


def _masked_rows(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: list[Rows], scale: float
) -> tuple[Tensor, Tensor]:
    """Padded rows with a mask, differentiated by torch: packed index [n] and output [n, H, D] of all queries."""
    heads = query.shape[1] // key.shape[1]
    parts, tokens = [], []
    for rows in blocks:
        queries = _gather(query, rows.query, rows.num_rows)
        keys, values = (_repeat(_gather(x, rows.key, rows.num_rows), heads) for x in (key, value))
        mask = rows.mask
        if sinks is not None and mask is not None:
            queries, keys, values, mask = add_sink_key(queries, keys, values, mask, sinks, scale)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        parts.append(_unpad(out[..., : value.shape[-1]], rows))
        tokens.append(rows.token)
    return torch.cat(tokens), torch.cat(parts)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, scale: float) -> Tensor:
    """Attend as `exact_attention` does, [T, H, D] float32 without gradient, within each sequence of a pack."""
    out = torch.empty_like(query, dtype=torch.float32)
    for rows, starts in plan.aligned():
        queries = _gather(query, rows.query, rows.num_rows)
        keys, values = (_gather(x, rows.key, rows.num_rows) for x in (key, value))
        out.index_copy_(0, rows.token, _unpad(exact_attention(queries, keys, values, starts, scale), rows))
    return out
