"""torch's variable-length attention on a CPU, as it documents it, and as one operation that `torch.compile` traces."""

import torch
from torch import Tensor


def documented(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch says that `varlen_attn` computes: [T, H, D], a sequence at a time."""
    parts = [
        torch.einsum("hqk,khd->qhd", weights, v)
        for *_, v, weights in sequences(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)
    ]
    return torch.cat(parts)


def sequences(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size):
    """Queries, keys and values of each sequence, by query head, and the attention's weights [H, Q, K]."""
    assert window_size[1] == 0, "causal"
    for n in range(len(cu_q) - 1):
        q, (k, v) = query[cu_q[n] : cu_q[n + 1]], (each[cu_k[n] : cu_k[n + 1]] for each in (key, value))
        assert len(q) <= max_q
        assert len(k) <= max_k
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        back = (torch.arange(len(q))[:, None] + len(k) - len(q)) - torch.arange(len(k))[None]
        seen = (back >= 0) & ((window_size[0] < 0) | (back <= window_size[0]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield q, k, v, scores.masked_fill(~seen, -torch.inf).softmax(-1)


@torch.library.custom_op("offbeat_tests::varlen", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, left: int
) -> Tensor:
    return documented(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(left, 0))


@_forward.register_fake
def _(q, k, v, cu_q, cu_k, max_q, max_k, scale, left):
    return torch.empty_like(q)


@torch.library.custom_op("offbeat_tests::varlen_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, sizes: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """An operation of one's own has no autograd inside, so this is the derivative by hand."""
    max_q, max_k, left = sizes
    parts = sequences(q, k, v, cu_q, cu_k, max_q, max_k, scale, (left, 0))
    grads = [torch.zeros_like(each) for each in (q, k, v)]
    for n, (q_n, k_n, v_n, weights) in enumerate(parts):
        queries, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        grad_n = grad[queries]
        through = torch.einsum("qhd,khd->hqk", grad_n, v_n)
        scores = weights * (through - (through * weights).sum(-1, keepdim=True)) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", scores, k_n)
        for whole, found in (
            (grads[1], torch.einsum("hqk,qhd->khd", scores, q_n)),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, grad_n)),
        ):
            whole[keys] += found.unflatten(1, (whole.shape[1], -1)).sum(2)
    return tuple(grads)


@_backward.register_fake
def _(grad, q, k, v, cu_q, cu_k, sizes, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output):
    *tensors, max_q, max_k, scale, left = inputs
    ctx.save_for_backward(*tensors)
    ctx.sizes, ctx.scale = [max_q, max_k, left], scale


def _gradients(ctx, grad):
    return *_backward(grad.contiguous(), *ctx.saved_tensors, ctx.sizes, ctx.scale), *(None,) * 6


_forward.register_autograd(_gradients, setup_context=_keep)


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Takes the place of torch.nn.attention.varlen.varlen_attn."""
    return _forward(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size[0])
