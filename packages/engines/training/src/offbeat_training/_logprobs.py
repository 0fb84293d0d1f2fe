"""Log-probability and entropy of chosen tokens, without ever holding [tokens, vocabulary] in float32.

The vocabulary head runs over a few hundred tokens at a time, on a GPU over a few thousand. Of the first tokens the
forward pass keeps what the products of the backward pass need, up to `KEPT_BYTES`; of all others the backward pass
computes the logits again. So memory is bounded whatever the batch and the vocabulary.
Source: the idea of Cut Cross-Entropy (arXiv:2411.09009) and Liger's fused linear cross-entropy, for any loss; the
vocabulary cut over ranks is that of Megatron-LM (arXiv:1909.08053).

Shapes: N loss tokens, C of them in a chunk, B of them in a block, E hidden size, V vocabulary (of this rank, where it
is cut).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offbeat_device import compiled, exact_head, exact_product, row_sum

CHUNK_BYTES = 64 * 2**20
"""Size of a chunk's logits, on a processor."""
DEVICE_CHUNK_BYTES = 512 * 2**20
"""The same on a device with memory of its own, which a product of few tokens does not fill."""
MIN_CHUNK_TOKENS = 16
KEPT_BYTES = 256 * 2**20
"""Size of what the forward pass keeps for the backward pass: 2,730 tokens of a vocabulary of 49,152 in bfloat16."""
DEVICE_KEPT_BYTES = 2 * 2**30
"""The same on a device with memory of its own: 7,067 tokens of a vocabulary of 151,936."""
BLOCK_BYTES = 4 * 2**20
"""Size of the logits that a processor passes over at a time, one operation after the other: they stay in its cache."""
PRODUCT_ROWS = 8192
"""Rows of the weight's gradient that are multiplied at a time, where it is of a wider format than its factors."""


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
    cap: float | None = None,
    matmul_dtype: torch.dtype | None = torch.float32,
    gradient_dtype: torch.dtype | None = None,
    entropy_gradient: bool = False,
    part: VocabularyPart | None = None,
    fused: bool = False,
    exact: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(scale * (hidden @ weight.T + bias)), and that softmax's entropy.

    Of the whole softmax, whatever a sampler has cut: see `SamplingParams.whole_logprobs`.

    Args:
        hidden_NE: hidden states, floating point; gradient flows to them and to weight and bias.
        weight_VE: the head's weight.
        bias_V: the head's bias, or None.
        target_N: int64 in [0, V).
        scale: factor on the logits: 1 / temperature, times any scale of the model's own.
        cap: the model's logits x are cap * tanh(x / cap), before the factor; None: as they are. Gemma's soft cap.
        matmul_dtype: format to which factors of matrix products are rounded, and their results too where products on
            the device give that format alone (CUDA's give float32); everything after them is float32 (float64 for
            float64). None for factors as they are, and products added up in float32: logits are not rounded.
        gradient_dtype: format of the factors of the products that gradients are; None for that of the factors above.
            Gradients of several chunks are added up in float32.
        entropy_gradient: let gradient flow through the entropy too.
        part: which rows of the head `weight_VE` and `bias_V` are; None for all.
        fused: compile what is done to a chunk of logits to one or two kernels, see `compiled`; not with `part`, whose
            ranks exchange in between.
        exact: log-probabilities have the bits that `exact_head` and `exact_logsumexp` of offbeat-device give them, with
            the weight rounded to this format; neither with `part` nor `fused`. None: `matmul_dtype` says how.

    Returns:
        [N] log-probabilities and [N] entropies, nats, float32 (float64 when the products are), alike on all ranks.
    """
    formats = replace(_Formats.of(hidden_NE, weight_VE, matmul_dtype, gradient_dtype), exact=exact)
    wants_gradient = torch.is_grad_enabled() and (hidden_NE.requires_grad or weight_VE.requires_grad)
    # What can be kept serves the gradient of the log-probability alone.
    most_bytes = KEPT_BYTES if hidden_NE.is_cpu else DEVICE_KEPT_BYTES
    kept_bytes = most_bytes if wants_gradient and not entropy_gradient else 0
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, weight_VE, bias_V, target_N, scale, cap, formats, part, kept_bytes, fused and part is None
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


@dataclass(frozen=True)
class _Formats:
    """Formats of the logits' factors, rounded results included or (None) not; of the gradients'; of all else; of the
    weight in exact numerics, if they are meant.
    """

    matmul: torch.dtype | None
    gradient: torch.dtype
    sums: torch.dtype
    exact: torch.dtype | None = None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, matmul: torch.dtype | None, gradient: torch.dtype | None) -> "_Formats":
        sums = torch.float64 if (matmul or hidden.dtype) == torch.float64 else torch.float32
        return cls(matmul, gradient or matmul or weight.dtype, sums)


class _HeadLogprobs(torch.autograd.Function):
    """The head in chunks. Autocast does not reach inside: formats are chosen here.

    The gradient of a token's logits is `factor · apart_V`, where apart is its probabilities, less 1 at the target, and
    factor is -grad · scale. Of logits with a soft cap, apart is also times the slope of the cap. The factor goes onto
    rows of E numbers, so that what the forward pass keeps of `apart` enters the products of the backward pass as it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        cap: float | None,
        formats: _Formats,
        part: VocabularyPart | None,
        kept_bytes: int,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        chosen, lse, mean = (hidden.new_empty(len(hidden), dtype=formats.sums) for _ in range(3))
        column, here_N = _columns(target, len(weight), part)
        with _without_autocast(hidden):
            head = _Head(weight, bias, scale, formats, fused=fused, cap=cap)
            chunks = head.chunks(0, len(hidden))  # alike whatever is kept, and so are the bits of what is found
            most = kept_bytes // (formats.gradient.itemsize * len(weight))
            # Whole chunks: the backward pass computes again from where one begins.
            num_kept = max((rows.stop for rows in chunks if rows.stop <= most), default=0)
            kept_KV = hidden.new_empty((num_kept, len(weight)), dtype=formats.gradient)
            for rows in chunks:
                logits_CV, together = head.logits(hidden[rows]), fused or part is not None
                for block, logits_BV in [(rows, logits_CV)] if together else _blocks(rows, logits_CV):
                    found = None if here_N is None else here_N[block]
                    keep_BV = kept_KV[block] if block.stop <= num_kept else None
                    if fused:
                        results = _reduce_fused(logits_BV, column[block], keep_BV, head.limit)
                    else:
                        add_up = row_sum if formats.exact else _sum
                        results = _reduce(logits_BV, column[block], found, part, keep_BV, head.limit, add_up)
                    chosen[block], lse[block], mean[block] = results
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, bias, target, lse, entropy, kept_KV)
        ctx.scale, ctx.cap, ctx.formats, ctx.part, ctx.fused = scale, cap, formats, part, fused
        ctx.set_materialize_grads(False)  # None tells the backward pass that the entropy has no gradient
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, _, lse, *_ = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None  # chunks add up in it
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if wants_bias else None
        with _without_autocast(hidden):
            cast_VE = weight.to(ctx.formats.gradient) if wants_hidden else None
            for rows, apart_CV, factor_C1 in _apart_chunks(ctx, grads):
                if grad_hidden is not None and cast_VE is not None:
                    grad_hidden[rows] = (apart_CV @ cast_VE) * factor_C1
                if grad_weight is not None:
                    _add_product(grad_weight, apart_CV.T, (hidden[rows] * factor_C1).to(apart_CV.dtype))
                if grad_bias is not None:
                    grad_bias += (factor_C1.T.to(apart_CV.dtype) @ apart_CV)[0]
            if ctx.part is not None and ctx.part.adds_gradient and grad_hidden is not None:
                ctx.part.add(grad_hidden)  # each rank has it through its own rows
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 7


def _apart_chunks(ctx: Any, grads: tuple[Tensor | None, ...]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, `apart` [C, V] in the gradients' format and `factor` [C, 1]: what was kept, then the rest computed again.

    A chunk is overwritten by the next.
    """
    hidden, weight, bias, target, lse, entropy, kept_KV = ctx.saved_tensors
    grad_logp, grad_entropy = grads
    column, here_N = _columns(target, len(weight), ctx.part)
    factor = torch.full_like(lse, -ctx.scale)[:, None]
    if grad_entropy is None:
        assert grad_logp is not None
        factor *= grad_logp[:, None]
    if len(kept_KV):
        rows = slice(0, len(kept_KV))
        yield rows, kept_KV, factor[rows]
    head = _Head(weight, bias, ctx.scale, ctx.formats, fused=ctx.fused, cap=ctx.cap)
    cast = None
    for rows in head.chunks(len(kept_KV), len(hidden)):
        logits_CV = head.logits(hidden[rows])
        if ctx.fused and grad_entropy is None:
            inputs = (logits_CV, lse[rows].clone(), column[rows].clone(), kept_KV.dtype, head.limit)
            yield rows, _fused(_apart)(*inputs), factor[rows]
            continue
        if cast is None:
            cast = logits_CV if logits_CV.dtype == kept_KV.dtype else torch.empty_like(logits_CV, dtype=kept_KV.dtype)
        for block, logp_BV in _blocks(rows, logits_CV):
            slope_BV = _slope(logp_BV, head.limit)
            logp_BV.sub_(lse[block, None])
            found = None if here_N is None else here_N[block]
            if grad_entropy is None:
                apart_BV = _less_at(logp_BV.exp_(), column[block], found)
            else:
                piece = None if grad_logp is None else grad_logp[block]
                apart_BV = _both_apart(logp_BV, column[block], found, entropy[block], piece, grad_entropy[block])
            cast[block.start - rows.start : block.stop - rows.start].copy_(_times(apart_BV, slope_BV))
        yield rows, cast[: len(logits_CV)], factor[rows]


class _Head:
    """Logits of one chunk of tokens after the other, in the same memory unless the chunks go to compiled code.

    Attributes:
        limit: beyond which a soft cap lets no scaled logit go; None without one.
    """

    def __init__(
        self,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        scale: float,
        formats: _Formats,
        *,
        fused: bool,
        cap: float | None = None,
    ) -> None:
        self.limit, self._cap = None if cap is None else scale * cap, cap
        factors = formats.matmul or weight_VE.dtype
        # A wider result of a product than its factors is known to CUDA alone.
        self._wider = factors != formats.sums and weight_VE.is_cuda
        matmul = formats.matmul or (factors if self._wider else formats.sums)
        self._exact = None if formats.exact is None else exact_head(weight_VE, formats.exact)
        self._weight_VE, self._bias_V = weight_VE if formats.exact else weight_VE.to(matmul), bias_V
        self._scale, self._formats = scale, formats
        chunk_bytes = CHUNK_BYTES if weight_VE.is_cpu else DEVICE_CHUNK_BYTES
        self._chunk_tokens = max(MIN_CHUNK_TOKENS, chunk_bytes // (4 * len(weight_VE)))
        self._buffer_CV: Tensor | None = None
        self._fused = fused

    def chunks(self, start: int, stop: int) -> list[slice]:
        """Tokens from `start` on, a chunk at a time."""
        size = self._chunk_tokens
        return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]

    def logits(self, hidden_CE: Tensor) -> Tensor:
        """[C, V] scaled logits, free to be overwritten; the next call overwrites them."""
        # Compiled code tells what is cut out of a larger tensor from what is not, and would be compiled for both.
        if self._fused or self._buffer_CV is None or len(self._buffer_CV) < len(hidden_CE):
            shape = (len(hidden_CE), len(self._weight_VE))
            self._buffer_CV = torch.empty(shape, dtype=self._formats.sums, device=hidden_CE.device)
        logits_CV = self._buffer_CV if self._fused else self._buffer_CV[: len(hidden_CE)]
        weight_EV = self._weight_VE.T
        if self._exact is not None:
            logits_CV.copy_(exact_product(hidden_CE, self._exact, wide=True))
        elif self._wider:
            torch.mm(hidden_CE.to(weight_EV.dtype), weight_EV, out_dtype=logits_CV.dtype, out=logits_CV)
        elif weight_EV.dtype == logits_CV.dtype:
            torch.mm(hidden_CE.to(weight_EV.dtype), weight_EV, out=logits_CV)
        else:
            logits_CV.copy_(hidden_CE.to(weight_EV.dtype) @ weight_EV)
        if self._bias_V is not None:
            logits_CV += self._bias_V
        if self._cap is not None and self.limit is not None:
            return logits_CV.div_(self._cap).tanh_().mul_(self.limit)
        return logits_CV if self._scale == 1.0 else logits_CV.mul_(self._scale)


def _slope(logits_BV: Tensor, limit: float | None) -> Tensor | None:
    """Return the slope of a soft cap at each of its values; None where there is no cap."""
    return None if limit is None else 1 - (logits_BV / limit).square_()


def _times(apart_BV: Tensor, slope_BV: Tensor | None) -> Tensor:
    return apart_BV if slope_BV is None else apart_BV.mul_(slope_BV)


def _sum(x_BV: Tensor) -> Tensor:
    return x_BV.sum(1)


def _reduce(
    logits_BV: Tensor,
    column_B: Tensor,
    here_B: Tensor | None,
    part: VocabularyPart | None,
    keep_BV: Tensor | None,
    limit: float | None,
    add_up: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """[B] each: the target's logit, log-sum-exp and mean of all logits (overwritten); fills `keep_BV` with `apart`."""
    slope_BV = None if keep_BV is None else _slope(logits_BV, limit)
    chosen_B = logits_BV.gather(1, column_B[:, None])[:, 0]
    top_B1 = logits_BV.amax(1, keepdim=True)
    if part is not None:
        # All ranks subtract the same, so that their sums can be added up.
        part.largest(top_B1)
    # The largest becomes 0, so no exponential overflows.
    logits_BV -= top_B1
    odds_BV = logits_BV.exp()
    total_B, weighted_B = add_up(odds_BV), torch.linalg.vecdot(odds_BV, logits_BV)
    if part is not None and here_B is not None:
        total_B, weighted_B, chosen_B = part.add(torch.stack([total_B, weighted_B, chosen_B * here_B]))
    if keep_BV is not None:
        odds_BV *= total_B.reciprocal()[:, None]
        keep_BV.copy_(_times(_less_at(odds_BV, column_B, here_B), slope_BV))
    top_B = top_B1[:, 0]
    return chosen_B, total_B.log() + top_B, weighted_B / total_B + top_B


def _reduce_fused(
    logits_BV: Tensor, column_B: Tensor, keep_BV: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_reduce` does, by compiled code."""
    dtype = None if keep_BV is None else keep_BV.dtype
    *results, apart_BV = _fused(_reduce_at_once)(logits_BV, column_B.clone(), dtype, limit)
    if keep_BV is not None:
        keep_BV.copy_(apart_BV)
    return tuple(results)


@cache
def _fused(function: Any) -> Any:
    return compiled(function)


def _reduce_at_once(
    logits_BV: Tensor, column_B: Tensor, dtype: torch.dtype | None, limit: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what `_reduce` does, and `apart` in the format asked for, without writing to the logits."""
    top_B1 = logits_BV.amax(1, keepdim=True)
    below_BV = logits_BV - top_B1
    odds_BV = below_BV.exp()
    total_B, top_B = odds_BV.sum(1), top_B1[:, 0]
    lse_B, mean_B = total_B.log() + top_B, (odds_BV * below_BV).sum(1) / total_B + top_B
    apart_BV = None if dtype is None else _apart(logits_BV, lse_B, column_B, dtype, limit)
    return logits_BV.gather(1, column_B[:, None])[:, 0], lse_B, mean_B, apart_BV


def _apart(logits_BV: Tensor, lse_B: Tensor, column_B: Tensor, dtype: torch.dtype, limit: float | None) -> Tensor:
    """Probabilities, less 1 at the target, times the slope of a soft cap."""
    is_target_BV = torch.arange(logits_BV.shape[1], device=logits_BV.device) == column_B[:, None]
    apart_BV = (logits_BV - lse_B[:, None]).exp() - is_target_BV.to(logits_BV.dtype)
    return _times(apart_BV, _slope(logits_BV, limit)).to(dtype)


def _less_at(values_BV: Tensor, column_B: Tensor, here_B: Tensor | None, less_B: Tensor | None = None) -> Tensor:
    """Take 1, or `less_B`, away from one number of each row, in place, where that column is here."""
    less_B = values_BV.new_ones(len(values_BV)) if less_B is None else less_B
    less_B = less_B if here_B is None else less_B * here_B
    return values_BV.scatter_add_(1, column_B[:, None], -less_B[:, None])


def _both_apart(
    logp_BV: Tensor,
    column_B: Tensor,
    here_B: Tensor | None,
    entropy_B: Tensor,
    grad_logp_B: Tensor | None,
    grad_entropy_B: Tensor,
) -> Tensor:
    """Minus the gradient of the scaled logits through log-probability and entropy (`logp_BV` is overwritten).

    d logp[y] / d l_j = [j = y] - p_j and d entropy / d l_j = -p_j (log p_j + entropy).
    """
    weight_B = torch.zeros_like(entropy_B) if grad_logp_B is None else grad_logp_B
    shift_B1 = (weight_B + grad_entropy_B * entropy_B)[:, None]
    apart_BV = logp_BV.exp().mul_(logp_BV.mul_(grad_entropy_B[:, None]).add_(shift_B1))
    return _less_at(apart_BV, column_B, here_B, weight_B)


def _columns(target_N: Tensor, num_rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """Column of each target among this rank's logits, and which targets are there at all (None: all)."""
    if part is None:
        return target_N, None
    column_N = target_N - part.first
    here_N = (column_N >= 0) & (column_N < num_rows)
    # Any column will do for a target of another rank: `here_N` takes it out of every sum.
    return column_N.where(here_N, 0), here_N


def _without_autocast(like: Tensor) -> Any:
    return torch.autocast(like.device.type, enabled=False)


def _blocks(rows: slice, values_CV: Tensor) -> list[tuple[slice, Tensor]]:
    """Rows of a chunk and their values, a few at a time; all together on what is no processor."""
    size = len(values_CV)
    if values_CV.is_cpu:
        size = max(1, BLOCK_BYTES // (values_CV.element_size() * values_CV.shape[1]))
    starts = range(0, len(values_CV), size)
    return [(slice(rows.start + s, min(rows.start + s + size, rows.stop)), values_CV[s : s + size]) for s in starts]


def _add_product(total_VE: Tensor, left_VC: Tensor, right_CE: Tensor) -> None:
    """Add left @ right to `total_VE`, which may be of a wider format than they are."""
    if total_VE.dtype == left_VC.dtype:
        total_VE.addmm_(left_VC, right_CE)
        return
    for start in range(0, len(total_VE), PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        total_VE[rows] += left_VC[rows] @ right_CE
