"""Kernels for processors of torch's variable-length attention, which has them for GPUs alone: what it documents.

Importing this adds them in this process. What checks, traces and differentiates the operation stays torch's own.
"""

import torch
from torch.nn.attention import varlen


def documented(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Compute what torch says of `varlen_attn`: [T, H, D], a sequence at a time."""
    return _attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)[0]


def _attend(query, *rest):
    """[T, H, D], and the log-sum-exp of the scores, [H, T]."""
    parts = [
        (torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1))
        for *_, v, scores in sequences(query, *rest)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], -1).float()


def sequences(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size):
    """Queries, keys and values of each sequence, by query head, and the scores [H, Q, K]."""
    assert window_size[1] in (0, -1), "causal, or everything that comes later"
    for n in range(len(cu_q) - 1):
        q, (k, v) = query[cu_q[n] : cu_q[n + 1]], (each[cu_k[n] : cu_k[n + 1]] for each in (key, value))
        assert len(q) <= max_q
        assert len(k) <= max_k
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        back = (torch.arange(len(q))[:, None] + len(k) - len(q)) - torch.arange(len(k))[None]
        seen = ((back >= 0) | (window_size[1] < 0)) & ((window_size[0] < 0) | (back <= window_size[0]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield q, k, v, scores.masked_fill(~seen, -torch.inf)


@varlen._varlen_attn.register_kernel("cpu")
def _forward(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *_):
    assert is_causal == (list(window_size) == [-1, 0])
    out, lse = _attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, state, scale, window_size):
    """An operation has no autograd inside, so this is the derivative by hand, from output and log-sum-exp.

    Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
    """
    parts = sequences(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    for n, (q_n, k_n, v_n, raw) in enumerate(parts):
        queries, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        grad_n = grad[queries]
        weights = (raw - lse[:, queries, None]).exp().to(raw.dtype)
        through = torch.einsum("qhd,khd->hqk", grad_n, v_n)
        common = torch.einsum("qhd,qhd->hq", grad_n, out[queries])[..., None]
        scores = weights * (through - common) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", scores, k_n)
        for whole, found in (
            (grads[1], torch.einsum("hqk,qhd->khd", scores, q_n)),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, grad_n)),
        ):
            whole[keys] += found.unflatten(1, (whole.shape[1], -1)).sum(2)
    return tuple(grads)
