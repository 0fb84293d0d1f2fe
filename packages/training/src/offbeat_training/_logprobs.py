"""Log-probability and entropy of chosen tokens, without ever holding [tokens, vocabulary].

The vocabulary head runs over a few hundred tokens at a time; the backward pass computes each chunk's logits again
(unless there was one chunk only), so memory is bounded by the chunk whatever the batch and the vocabulary.
Source: the idea of Cut Cross-Entropy (arXiv:2411.09009) and Liger's fused linear cross-entropy, for any loss; the
vocabulary cut over ranks is that of Megatron-LM (arXiv:1909.08053).

Shapes: N loss tokens, C of them in a chunk, E hidden size, V vocabulary (of this rank, where it is cut).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """The rows of the head that this rank holds, when ranks share the vocabulary in equal parts.

    All of these ranks have the same hidden states and targets.

    Args:
        first: id of the first row.
        add: adds a tensor up over the ranks, in place, and returns it.
        largest: takes the largest over the ranks, in place.
        adds_gradient: add up the gradient of the hidden states; False where the caller's layers do that.
    """

    first: int
    add: Callable[[Tensor], Tensor]
    largest: Callable[[Tensor], Tensor]
    adds_gradient: bool = True


def token_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    *,
    scale: float = 1.0,
    matmul_dtype: torch.dtype | None = torch.float32,
    entropy_gradient: bool = False,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(scale * (hidden @ weight.T + bias)), and that softmax's entropy.

    Of the whole softmax, whatever a sampler has cut: see `SamplingParams.whole_logprobs`.

    Args:
        hidden_NE: hidden states, floating point; gradient flows to them and to weight and bias.
        weight_VE: the head's weight.
        bias_V: the head's bias, or None.
        target_N: int64 in [0, V).
        scale: factor on the logits: 1 / temperature, times any scale of the model's own.
        matmul_dtype: format to which factors and results of matrix products are rounded; everything after them is
            float32 (float64 for float64). None for factors as they are, and products added up in float32: logits are
            not rounded.
        entropy_gradient: let gradient flow through the entropy too.
        part: which rows of the head `weight_VE` and `bias_V` are; None for all.

    Returns:
        [N] log-probabilities and [N] entropies, nats, float32 (float64 when the products are), alike on all ranks.
    """
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, weight_VE, bias_V, target_N, scale, matmul_dtype, part
    )
    return logprobs, entropy if entropy_gradient else entropy.detach()


def logprobs_of_logits(logits_NV: Tensor, target_N: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """[N] log-probability of each target, without gradient, where all logits of a few tokens are in memory.

    Args:
        logits_NV: of this rank's part of the vocabulary, floating point.
        target_N: int64 ids in the whole vocabulary.
        part: which columns they are; None for all.
    """
    column_N, here_N = _columns(target_N, logits_NV.shape[1], part)
    chosen_N, lse_N = logits_NV.gather(1, column_N[:, None])[:, 0], logits_NV.logsumexp(1)
    if part is not None and here_N is not None:
        top_N = part.largest(lse_N.clone())
        chosen_N, total_N = part.add(torch.stack([chosen_N * here_N, (lse_N - top_N).exp()]))
        lse_N = total_N.log() + top_N
    return chosen_N - lse_N


class _HeadLogprobs(torch.autograd.Function):
    """The head in chunks. Autocast does not reach inside: formats are chosen here."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        matmul: torch.dtype | None,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        floats = torch.float64 if (matmul or hidden.dtype) == torch.float64 else torch.float32
        chosen, lse, mean = (hidden.new_empty(len(hidden), dtype=floats) for _ in range(3))
        chunks, kept = _chunks(len(hidden), len(weight)), None
        column, here_N = _columns(target, len(weight), part)
        with _without_autocast(hidden):
            cast = weight.to(matmul or weight.dtype)
            for here in chunks:
                logits_CV = _logits(hidden[here], cast, bias, scale, floats, rounded=matmul is not None)
                chosen_C = logits_CV.gather(1, column[here, None])[:, 0]
                top_C1 = logits_CV.amax(1, keepdim=True)
                if part is not None:
                    part.largest(top_C1)
                logits_CV -= top_C1
                odds_CV = logits_CV.exp()
                total_C, weighted_C = odds_CV.sum(1), torch.linalg.vecdot(odds_CV, logits_CV)
                if part is not None and here_N is not None:
                    sums = torch.stack([total_C, weighted_C, chosen_C * here_N[here]])
                    total_C, weighted_C, chosen_C = part.add(sums)
                chosen[here] = chosen_C
                lse[here] = total_C.log() + top_C1[:, 0]
                mean[here] = weighted_C / total_C + top_C1[:, 0]
                if len(chunks) == 1:  # small enough to keep: the backward pass need not compute it again
                    kept = logits_CV.sub_(total_C.log()[:, None])
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, bias, target, lse, entropy, kept)
        ctx.scale, ctx.matmul, ctx.rounded, ctx.part = scale, matmul or weight.dtype, matmul is not None, part
        ctx.set_materialize_grads(False)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse, entropy, kept = ctx.saved_tensors
        column, here_N = _columns(target, len(weight), ctx.part)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        with _without_autocast(hidden):
            cast = weight.to(ctx.matmul)
            for here in _chunks(len(hidden), len(weight)):
                if kept is None:
                    logp_CV = _logits(hidden[here], cast, bias, ctx.scale, lse.dtype, rounded=ctx.rounded)
                    logp_CV.sub_(lse[here, None])
                else:
                    logp_CV = kept.clone()
                pieces = [None if grad is None else grad[here] for grad in grads]
                found = None if here_N is None else here_N[here]
                grad_CV = _grad_logits(logp_CV, column[here], found, entropy[here], *pieces)
                grad_CV = grad_CV.mul_(ctx.scale).to(ctx.matmul)
                if grad_hidden is not None:
                    grad_hidden[here] = grad_CV @ cast
                if grad_weight is not None:
                    _add_product(grad_weight, grad_CV.T, hidden[here].to(ctx.matmul))
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
            if ctx.part is not None and ctx.part.adds_gradient and grad_hidden is not None:
                ctx.part.add(grad_hidden)  # each rank has it through its own rows
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _columns(target_N: Tensor, num_rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """Column of each target among this rank's logits, and which targets are there at all (None: all)."""
    if part is None:
        return target_N, None
    column_N = target_N - part.first
    here_N = (column_N >= 0) & (column_N < num_rows)
    return column_N.where(here_N, 0), here_N


def _without_autocast(like: Tensor) -> Any:
    return torch.autocast(like.device.type, enabled=False)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _logits(
    hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, scale: float, dtype: torch.dtype, *, rounded: bool
) -> Tensor:
    """[C, V] scaled logits in `dtype`: a fresh tensor, free to be overwritten."""
    if rounded:
        logits_CV = (hidden_CE.to(weight_VE.dtype) @ weight_VE.T).to(dtype)
    elif hidden_CE.is_cuda and hidden_CE.dtype != dtype:
        logits_CV = torch.mm(hidden_CE, weight_VE.T, out_dtype=dtype)
    else:  # a wider result of a product is known to GPUs alone
        logits_CV = hidden_CE.to(dtype) @ weight_VE.to(dtype).T
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV if scale == 1.0 else logits_CV.mul_(scale)


def _grad_logits(
    logp_CV: Tensor,
    column_C: Tensor,
    here_C: Tensor | None,
    entropy_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient of the scaled logits, from log-probabilities (overwritten).

    d logp[y] / d l_j = [j = y] - p_j and d entropy / d l_j = -p_j (log p_j + entropy).
    """
    minus = torch.zeros_like(entropy_C) if grad_logp_C is None else -grad_logp_C
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_().mul_(minus[:, None])
    else:
        shift_C1 = (minus - grad_entropy_C * entropy_C)[:, None]
        grad_CV = logp_CV.exp().mul_(logp_CV.mul_(-grad_entropy_C[:, None]).add_(shift_C1))
    if grad_logp_C is not None:
        chosen_C = grad_logp_C if here_C is None else grad_logp_C * here_C
        grad_CV.scatter_add_(1, column_C[:, None], chosen_C[:, None])
    return grad_CV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which may be of a wider format than they are."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
