"""Log-probability and entropy of chosen tokens, from a head whose rows tensor parallel ranks share.

The head runs over a few hundred tokens at a time, so [tokens, vocabulary] is never held; the backward pass computes
each chunk's logits again, unless there was one chunk only.
Source: Cut Cross-Entropy (arXiv:2411.09009) for the chunks, Megatron-LM (arXiv:1909.08053) for the cut vocabulary.

Shapes: N loss tokens, C of them in a chunk, E hidden size, V rows of the head on this rank.
"""

from typing import Any

import torch
from torch import Tensor

from offbeat_mesh import Group

CHUNK_BYTES = 64 * 2**20
MIN_CHUNK_TOKENS = 16


def token_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    target_N: Tensor,
    tp: Group,
    *,
    scale: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(scale · hidden @ weight.T), and that softmax's entropy.

    Args:
        hidden_NE: the same on all ranks of `tp`; its gradient is this rank's part, to be added up over them. In
            bfloat16 products are added up in float32, and logits are not rounded.
        weight_VE: rows rank · V to (rank + 1) · V of the head.
        target_N: int64, ids of the whole vocabulary.
        tp: the ranks that share the head.
        scale: factor on the logits: 1 / temperature.
        entropy_gradient: let gradient flow through the entropy too.

    Returns:
        [N] log-probabilities and [N] entropies, nats, float32 (float64 when the hidden states are), alike on all ranks.
    """
    logprobs, entropy = _HeadLogprobs.apply(hidden_NE, weight_VE, target_N, tp, scale)  # type: ignore[no-untyped-call]
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, tp: Group, scale: float
    ) -> tuple[Tensor, Tensor]:
        floats = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        chosen, lse, mean = (hidden.new_empty(len(hidden), dtype=floats) for _ in range(3))
        chunks, kept = _chunks(len(hidden), len(weight)), None
        column, here = _columns(target, len(weight), tp.rank)
        for rows in chunks:
            logits_CV = _logits(hidden[rows], weight, scale, floats)
            chosen_C = logits_CV.gather(1, column[rows, None])[:, 0]
            top_C1 = logits_CV.amax(1, keepdim=True)
            tp.all_reduce(top_C1, "max")
            logits_CV -= top_C1
            odds_CV = logits_CV.exp()
            sums = torch.stack([odds_CV.sum(1), torch.linalg.vecdot(odds_CV, logits_CV), chosen_C * here[rows]])
            total_C, weighted_C, chosen[rows] = tp.all_reduce(sums)
            lse[rows] = total_C.log() + top_C1[:, 0]
            mean[rows] = weighted_C / total_C + top_C1[:, 0]
            if len(chunks) == 1:
                kept = logits_CV.sub_(total_C.log()[:, None])
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, column, here, lse, entropy, kept)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, column, here, lse, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(hidden), len(weight)):
            logp_CV = kept
            if kept is None:
                logp_CV = _logits(hidden[rows], weight, ctx.scale, lse.dtype).sub_(lse[rows, None])
            pieces = [None if grad is None else grad[rows] for grad in grads]
            grad_CV = _grad_logits(logp_CV, column[rows], here[rows], entropy[rows], *pieces)
            grad_CV = grad_CV.mul_(ctx.scale).to(weight.dtype)
            grad_hidden[rows] = grad_CV @ weight
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(grad_CV.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += grad_CV.T @ hidden[rows]
        return grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _columns(target_N: Tensor, num_rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Column of each target among this rank's logits, and which targets are there at all."""
    column_N = target_N - rank * num_rows
    here_N = (column_N >= 0) & (column_N < num_rows)
    return column_N.where(here_N, 0), here_N


def _chunks(num_tokens: int, num_rows: int) -> list[slice]:
    size = max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * num_rows))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _logits(hidden_CE: Tensor, weight_VE: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[C, V] scaled logits: a fresh tensor, free to be overwritten."""
    if hidden_CE.is_cuda and hidden_CE.dtype != dtype:
        logits_CV = torch.mm(hidden_CE, weight_VE.T, out_dtype=dtype)
    else:  # a wider result of a product is known to GPUs alone
        logits_CV = hidden_CE.to(dtype) @ weight_VE.to(dtype).T
    return logits_CV if scale == 1.0 else logits_CV.mul_(scale)


def _grad_logits(
    logp_CV: Tensor,
    column_C: Tensor,
    here_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient of the scaled logits.

    d logp[y] / d l_j = [j = y] - p_j and d entropy / d l_j = -p_j (log p_j + entropy).
    """
    odds_CV = logp_CV.exp()
    factor_C = torch.zeros_like(entropy_C) if grad_logp_C is None else -grad_logp_C
    if grad_entropy_C is None:
        grad_CV = odds_CV.mul_(factor_C[:, None])
    else:
        shift_C = factor_C - grad_entropy_C * entropy_C
        grad_CV = odds_CV.mul_(shift_C[:, None] - logp_CV * grad_entropy_C[:, None])
    if grad_logp_C is not None:
        grad_CV.scatter_add_(1, column_C[:, None], (grad_logp_C * here_C)[:, None])
    return grad_CV


def gather_values(values_n: Tensor, place_N: Tensor, width: int, cp: Group) -> Tensor:
    """What context parallel ranks found for the tokens they hold, in the order of the pack.

    Every rank goes on to compute the whole loss, so the gradient of its own values is that of the result, not a sum.

    Args:
        values_n: [..., n] of this rank, n at most `width`.
        place_N: see `LocalPack`.
        width: see `LocalPack`.
        cp: the ranks that share the pack.

    Returns:
        [..., N], alike on all ranks.
    """
    gathered: Tensor = _Gathered.apply(values_n, place_N, width, cp)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, width: int, cp: Group) -> Tensor:
        ctx.save_for_backward(place)
        ctx.own = cp.rank * width, values.shape[-1], cp.size * width
        rows = values.new_zeros(*values.shape[:-1], width)
        rows[..., : values.shape[-1]] = values
        everywhere = cp.all_gather(rows)  # [cp, ..., width]
        return everywhere.movedim(0, -2).flatten(-2).index_select(-1, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        start, count, size = ctx.own
        everywhere = grads[0].new_zeros(*grads[0].shape[:-1], size)
        everywhere.index_copy_(-1, place, grads[0])
        return everywhere[..., start : start + count], None, None, None
