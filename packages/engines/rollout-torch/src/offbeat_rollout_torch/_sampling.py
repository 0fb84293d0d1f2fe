"""Draws tokens for a whole batch at once.

Each token is drawn by inverting the distribution's running sum at one uniform number, which is a hash of (seed of the
sample, number of the token). So a sample depends on nothing but its own seed and logits: not on the other samples of
the batch, nor on pauses or on having been computed again.

Shapes: B samples, V vocabulary, C blocks of it (or candidates), R rows with a cut distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import SamplingParams
from offbeat_device import exact_logsumexp

CANDIDATES: Final = (64, 256, 2048)
"""So many largest are looked at before a whole vocabulary is sorted, which costs far more; each time only in the rows
that need more."""
BLOCK_TOKENS: Final = 64
"""Tokens of the vocabulary that are added up before the running sum over these sums: for 32 rows of 49,152 tokens
that takes 0.39 ms where one running sum over all takes 1.70 ms (processor time, one thread)."""


def uniforms(seeds: Sequence[int], counts: Sequence[int]) -> Tensor:
    """[B] float32 in (0, 1): a hash of (seed, count).

    22 bits and half a step: never 0, which would draw the first token that is not quite impossible, and never so near
    to 1 that the number times a total is the total in float32.

    Source: SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    bits = _mix(_mix(_unsigned(seeds)) ^ np.asarray(counts, np.uint64))
    steps = (bits >> np.uint64(42)).astype(np.float32) + np.float32(0.5)
    return torch.from_numpy(steps * np.float32(2.0**-22))


def seed_states(seeds: Sequence[int]) -> list[int]:
    """Return what `uniforms` makes of seeds before the counts come in, as signed numbers of 64 bits."""
    states: list[int] = _mix(_unsigned(seeds)).view(np.int64).tolist()
    return states


def device_uniforms(states_B: Tensor, counts_B: Tensor) -> Tensor:
    """[B] float32: the numbers of `uniforms`, made where states and counts [B] int64 lie."""
    bits = states_B ^ counts_B
    # The constants of `_mix` as int64 holds them: sums and products wrap round to the same bits.
    bits = bits + (0x9E3779B97F4A7C15 - 2**64)
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return (_shifted(bits ^ _shifted(bits, 31), 42).float() + 0.5) * 2.0**-22


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifted to the right with zeros coming in: torch's own shift of a signed number repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _unsigned(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.asarray([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class SampledTokens:
    ids: list[int]
    logprobs: list[float]


def draw(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: Tensor, *, exact: bool = False
) -> SampledTokens:
    """Choose a token for each row; see `SamplingParams` for the distribution and the log-probability.

    Args:
        logits_BV: [B, V] float32; overwritten.
        params: of each row.
        uniforms_B: [B] float32 in (0, 1).
        exact: log-probabilities before a cut have the bits that `exact_logsumexp` gives them.
    """
    greedy = [p.temperature == 0 for p in params]
    temperatures = [p.temperature or 1.0 for p in params]  # 1 where the likeliest is chosen
    if any(t != 1.0 for t in temperatures):
        logits_BV = scaled(logits_BV, temperatures, exact=exact)
    whole = probs = torch.softmax(logits_BV, -1)
    cut = [i for i, p in enumerate(params) if not greedy[i] and p.is_cut]
    if len(cut) == len(params):
        probs = cut_distribution(whole, params)
    elif cut:
        probs = whole.clone()  # `whole` is read below for log-probabilities before the cut
        probs[cut] = cut_distribution(whole[cut], [params[i] for i in cut])
    ids = probs.argmax(-1, keepdim=True) if any(greedy) else None
    if not all(greedy):
        drawn = invert(probs, block_sums(probs), uniforms_B.to(probs.device))
        ids = drawn if ids is None else torch.where(_column(greedy, probs).bool(), ids, drawn)
    assert ids is not None
    wants_whole = _column([p.whole_logprobs for p in params], probs).bool()
    logprobs = torch.where(wants_whole, whole.gather(-1, ids), probs.gather(-1, ids)).log_()[:, 0]
    if exact:
        is_cut = torch.tensor([p.is_cut and not p.whole_logprobs for p in params], device=probs.device)
        logprobs = torch.where(is_cut, logprobs, exact_logprobs(logits_BV, ids[:, 0]))
    return SampledTokens(ids[:, 0].tolist(), logprobs.tolist())


def scaled(logits_BV: Tensor, temperatures: Sequence[float], *, exact: bool) -> Tensor:
    """Divide logits by their rows' temperatures, in place; `exact`: multiply by the reciprocal, as trainers do."""
    if exact:
        return logits_BV.mul_(_column([1 / t for t in temperatures], logits_BV))
    return logits_BV.div_(_column(temperatures, logits_BV))


def exact_logprobs(logits_BV: Tensor, ids_B: Tensor) -> Tensor:
    """[B] log-probabilities of tokens, with the bits that a trainer finds."""
    return logits_BV.gather(-1, ids_B[:, None])[:, 0] - exact_logsumexp(logits_BV)


class Cutoffs(NamedTuple):
    """Columns [R, 1] float32: how far each row is cut. Of one that is not: the vocabulary, inf, 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class RowParams(NamedTuple):
    """Columns [B, 1] float32 of rows that are drawn where they lie, see `SamplingParams`.

    Args:
        temperature: 1 where the likeliest token is chosen.
        is_greedy: 1 or 0.
        wants_whole: 1 or 0: report the log-probability before the cut.
        cuts: none where the likeliest token is chosen.
    """

    temperature: Tensor
    is_greedy: Tensor
    wants_whole: Tensor
    cuts: Cutoffs

    @classmethod
    def of(cls, numbers_6B: Tensor) -> Self:
        """View what `row_numbers` gave for each row, one below the other."""
        temperature, is_greedy, wants_whole, *cuts = numbers_6B[..., None].unbind()
        return cls(temperature, is_greedy, wants_whole, Cutoffs(*cuts))


def row_numbers(params: SamplingParams, vocabulary: int) -> list[float]:
    """Return the numbers of `RowParams` for one row, in its order."""
    flags = [float(params.temperature == 0), float(params.whole_logprobs)]
    if params.temperature == 0:
        return [1.0, *flags, vocabulary, float("inf"), 0.0]
    return [params.temperature, *flags, _top_k(params, vocabulary), _top_p(params), params.min_p]


def draw_rows(logits_BV: Tensor, params: RowParams, uniforms_B: Tensor, *, is_cut: bool) -> tuple[Tensor, Tensor]:
    """Choose a token for each row as `draw` does, without a look at what was computed: nothing waits for the device.

    Args:
        logits_BV: [B, V] float32.
        params: of each row.
        uniforms_B: [B] float32 in (0, 1).
        is_cut: some row is, and every row's vocabulary is sorted.

    Returns:
        Tokens [B] int64, and their log-probabilities [B] float32.
    """
    logits_BV = logits_BV / params.temperature
    largest, likeliest = logits_BV.max(-1, keepdim=True)
    # Multiples of the probabilities: their sum is known only from the sums that the draw needs anyhow.
    weights = (logits_BV - largest).exp_()
    sums = block_sums(weights)
    total = sums.sum(-1, keepdim=True)
    chosen_from = _cut_rows(weights / total, params.cuts) if is_cut else weights
    drawn = invert(chosen_from, block_sums(chosen_from) if is_cut else sums, uniforms_B, asks=False)
    ids = torch.where(params.is_greedy.bool(), likeliest, drawn)
    logprobs = logits_BV.gather(-1, ids) - largest - total.log()
    if is_cut:
        logprobs = torch.where(params.wants_whole.bool(), logprobs, chosen_from.gather(-1, ids).log_())
    return ids[:, 0], logprobs[:, 0]


def _cut_rows(probs_BV: Tensor, cuts: Cutoffs) -> Tensor:
    """Cut each row as `cut_distribution` does, by a sort of the whole vocabulary; others stay as they are."""
    vocabulary = probs_BV.shape[-1]
    values, order = torch.sort(probs_BV, -1, descending=True)
    values = values * _kept(values, cuts, vocabulary)
    values /= values.sum(-1, keepdim=True)
    has_cut = (cuts.top_k < vocabulary) | (cuts.top_p < 1) | (cuts.min_p > 0)
    return torch.where(has_cut, torch.zeros_like(probs_BV).scatter_(-1, order, values), probs_BV)


def block_sums(probs_BV: Tensor) -> Tensor:
    """[B, ceil(V / BLOCK_TOKENS)]: sums over blocks of the vocabulary."""
    num_blocks, rest = divmod(probs_BV.shape[-1], BLOCK_TOKENS)
    sums = probs_BV[:, : num_blocks * BLOCK_TOKENS].view(len(probs_BV), num_blocks, BLOCK_TOKENS).sum(-1)
    return torch.cat((sums, probs_BV[:, -rest:].sum(-1, keepdim=True)), -1) if rest else sums


def invert(probs_BV: Tensor, sums_BC: Tensor, uniforms_B: Tensor, *, asks: bool = True) -> Tensor:
    """[B, 1] int64: the first token whose running sum passes uniform times total; never one of probability 0.

    The sum runs over blocks of the vocabulary first, and then over the tokens of the one block it stops in. The two
    sums of a block differ in their last bits, and CUDA's are not monotone: the token found may add nothing; then the
    nearest one that adds something is chosen.

    Args:
        probs_BV: [B, V], need not add up to 1.
        sums_BC: their `block_sums`.
        uniforms_B: [B] float32 in (0, 1).
        asks: look whether that is needed at all, which on a CPU takes less time; elsewhere it waits for the device.
    """
    asks = asks and probs_BV.is_cpu
    vocabulary = probs_BV.shape[-1]
    running = torch.cumsum(sums_BC, -1)
    target = running[:, -1:] * uniforms_B[:, None]
    block = _nearest_possible(sums_BC, torch.searchsorted(running, target, right=True), asks=asks)
    target = target - (running.gather(-1, block) - sums_BC.gather(-1, block))
    tokens = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=probs_BV.device)
    # The last block may reach beyond the vocabulary.
    inside = probs_BV.gather(-1, tokens.clamp(max=vocabulary - 1)).masked_fill_(tokens >= vocabulary, 0.0)
    place = _nearest_possible(inside, torch.searchsorted(torch.cumsum(inside, -1), target, right=True), asks=asks)
    return tokens.gather(-1, place)


def _nearest_possible(probs_RC: Tensor, places_R1: Tensor, *, asks: bool) -> Tensor:
    """[R, 1] int64: the place nearest to each that has a probability, or none that is finite."""
    if asks:
        places_R1 = places_R1.clamp(max=probs_RC.shape[-1] - 1)
        if bool((probs_RC.gather(-1, places_R1) > 0).all()):
            return places_R1
    distance_RC = (torch.arange(probs_RC.shape[-1], device=probs_RC.device) - places_R1).abs_()
    # Without a probability a place is farther away than any with one.
    return distance_RC.masked_fill_(probs_RC == 0, 2 * probs_RC.shape[-1]).argmin(-1, keepdim=True)


def cut_distribution(probs_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Cut by top_k, then top_p of what is left, then min_p, and renormalise. [R, V] to [R, V]."""
    vocabulary = probs_RV.shape[-1]
    top_k = [_top_k(p, vocabulary) for p in params]
    cut_RV, left = torch.zeros_like(probs_RV), list(range(len(params)))
    for some in (*CANDIDATES, vocabulary):
        candidates = min(some, max(top_k[i] for i in left))
        values, order = torch.topk(probs_RV if len(left) == len(params) else probs_RV[left], candidates)
        kept = _kept(values, _cuts([params[i] for i in left], values, vocabulary), vocabulary)
        # Enough where all k are here, or where there is no k and the smallest candidate is refused.
        refused = (~kept[:, -1]).tolist()
        is_done = [
            top_k[i] <= candidates or (top_k[i] == vocabulary and no_more)
            for i, no_more in zip(left, refused, strict=True)
        ]
        values = values * kept
        values /= values.sum(-1, keepdim=True)
        if all(is_done) and len(left) == len(params):
            return cut_RV.scatter_(-1, order, values)
        if any(is_done):
            done = [at for at, it_is in enumerate(is_done) if it_is]
            rows = torch.tensor([left[at] for at in done], device=probs_RV.device)[:, None]
            cut_RV[rows, order[done]] = values[done]
        left = [i for i, it_is in zip(left, is_done, strict=True) if not it_is]
        if not left:
            break
    return cut_RV


def _kept(values_RC: Tensor, cuts: Cutoffs, vocabulary: int) -> Tensor:
    """Return which of the C largest probabilities, in falling order, stay. [R, C] bool; the first always does."""
    ranks = torch.arange(values_RC.shape[-1], device=values_RC.device)
    in_k = ranks < cuts.top_k
    running = torch.cumsum(values_RC * in_k, -1)
    # The mass top_p is a share of: that of the k, all of them here; without top_k 1, even if not all are here.
    before = (running - values_RC * in_k) / running[:, -1:].masked_fill(cuts.top_k == vocabulary, 1.0)
    kept = in_k & (before < cuts.top_p) & (values_RC >= values_RC[:, :1] * cuts.min_p)
    kept[:, 0] = True
    return kept


def _cuts(params: Sequence[SamplingParams], like: Tensor, vocabulary: int) -> Cutoffs:
    columns = [_top_k(p, vocabulary) for p in params], [_top_p(p) for p in params], [p.min_p for p in params]
    return Cutoffs(*(_column(column, like) for column in columns))


def _top_k(params: SamplingParams, vocabulary: int) -> int:
    return params.top_k if 0 < params.top_k < vocabulary else vocabulary


def _top_p(params: SamplingParams) -> float:
    # Rounding may lift the running sum to 1 before the last token, which `< 1` would then cut.
    return params.top_p if params.top_p < 1 else float("inf")


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)[:, None]
