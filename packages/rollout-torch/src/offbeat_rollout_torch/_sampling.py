"""Draws tokens for a whole batch at once.

Each token is drawn by inverting the distribution's running sum at one uniform number, which is a hash of (seed of the
sample, number of the token). So a sample depends on nothing but its own seed and logits: not on who is beside it in
the batch, nor on pauses or on having been computed again.

Shapes: B samples, V vocabulary, R rows with a cut distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_types import SamplingParams

CANDIDATES: Final = (64, 256, 2048)
"""So many largest are looked at before a whole vocabulary is sorted, which costs far more; each time only in the rows
that need more."""
BLOCK_TOKENS: Final = 64
"""Tokens of the vocabulary that are added up before a running sum is taken over the sums: for 32 rows of 49,152 tokens
that takes 0.39 ms where one running sum over all takes 1.70 ms (processor time, one thread)."""


def uniforms(seeds: Sequence[int], counts: Sequence[int]) -> Tensor:
    """[B] float32 in (0, 1): a hash of (seed, count).

    22 bits and half a step: never 0, which would draw the first token that is not quite impossible, and never so near
    to 1 that the number times a total is the total in float32.

    Source: SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64))
        bits = _mix(state ^ np.asarray(counts, np.uint64))
    steps = (bits >> np.uint64(42)).astype(np.float32) + np.float32(0.5)
    return torch.from_numpy(steps * np.float32(2.0**-22))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Drawn:
    ids: list[int]
    logprobs: list[float]


def draw(logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: Tensor) -> Drawn:
    """Choose a token for each row; see `SamplingParams` for the distribution and the log-probability.

    Args:
        logits_BV: [B, V] float32; overwritten.
        params: of each row.
        uniforms_B: [B] float32 in (0, 1).
    """
    greedy = [p.temperature == 0 for p in params]
    temperatures = [p.temperature or 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits_BV.div_(_column(temperatures, logits_BV))
    whole = probs = torch.softmax(logits_BV, -1)
    cut = [i for i, p in enumerate(params) if not greedy[i] and p.is_cut]
    if len(cut) == len(params):
        probs = cut_distribution(whole, params)
    elif cut:
        probs = whole.clone()
        probs[cut] = cut_distribution(whole[cut], [params[i] for i in cut])
    ids = probs.argmax(-1, keepdim=True) if any(greedy) else None
    if not all(greedy):
        drawn = invert(probs, uniforms_B.to(probs.device))
        ids = drawn if ids is None else torch.where(_column(greedy, probs).bool(), ids, drawn)
    assert ids is not None
    wants_whole = _column([p.whole_logprobs for p in params], probs).bool()
    logprobs = torch.where(wants_whole, whole.gather(-1, ids), probs.gather(-1, ids)).log_()[:, 0]
    return Drawn(ids[:, 0].tolist(), logprobs.tolist())


def invert(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B, 1] int64: the first token whose running sum passes uniform times total; never one of probability 0.

    The sum runs over blocks of the vocabulary first, and then over the tokens of the one block it stops in.
    """
    vocabulary = probs_BV.shape[-1]
    num_blocks, rest = divmod(vocabulary, BLOCK_TOKENS)
    sums = probs_BV[:, : num_blocks * BLOCK_TOKENS].view(len(probs_BV), num_blocks, BLOCK_TOKENS).sum(-1)
    if rest:
        sums = torch.cat((sums, probs_BV[:, -rest:].sum(-1, keepdim=True)), -1)
    running = torch.cumsum(sums, -1)
    target = running[:, -1:] * uniforms_B[:, None]
    # A distribution that is not finite has no such token; its log-probability says so.
    block = torch.searchsorted(running, target, right=True).clamp_(max=sums.shape[-1] - 1)
    target = target - (running.gather(-1, block) - sums.gather(-1, block))
    tokens = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=probs_BV.device)
    inside = probs_BV.gather(-1, tokens.clamp(max=vocabulary - 1)).masked_fill_(tokens >= vocabulary, 0.0)
    place = torch.searchsorted(torch.cumsum(inside, -1), target, right=True).clamp_(max=BLOCK_TOKENS - 1)
    ids = tokens.gather(-1, place).clamp_(max=vocabulary - 1)
    # The two sums of a block differ in their last bits, and CUDA's are not monotone: the token found may add nothing.
    impossible = probs_BV.gather(-1, ids)[:, 0] == 0
    if impossible.any():
        ids[impossible] = _nearest_possible(probs_BV[impossible], ids[impossible])
    return ids


def _nearest_possible(probs_RV: Tensor, ids_R1: Tensor) -> Tensor:
    """[R, 1] int64: the token nearest to each id that has a probability."""
    distance_RV = (torch.arange(probs_RV.shape[-1], device=probs_RV.device) - ids_R1).abs_()
    return distance_RV.masked_fill_(probs_RV == 0, probs_RV.shape[-1]).argmin(-1, keepdim=True)


def cut_distribution(probs_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Cut by top_k, then top_p of what is left, then min_p, and renormalise. [R, V] to [R, V]."""
    vocabulary = probs_RV.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    cut_RV, left = torch.zeros_like(probs_RV), list(range(len(params)))
    for some in (*CANDIDATES, vocabulary):
        candidates = min(some, max(top_k[i] for i in left))
        values, order = torch.topk(probs_RV if len(left) == len(params) else probs_RV[left], candidates)
        kept = _kept(values, [params[i] for i in left], [top_k[i] for i in left], vocabulary)
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


def _kept(values_RC: Tensor, params: Sequence[SamplingParams], top_k: Sequence[int], vocabulary: int) -> Tensor:
    """Which of the C largest probabilities, in falling order, stay. [R, C] bool; the first always does."""
    ranks = torch.arange(values_RC.shape[-1], device=values_RC.device)
    in_k = ranks < _column(top_k, values_RC)
    running = torch.cumsum(values_RC * in_k, -1)
    # The mass top_p is a share of: that of the k, all of them here; without top_k 1, even if not all are here.
    whole = _column([k == vocabulary for k in top_k], values_RC).bool()
    before = (running - values_RC * in_k) / running[:, -1:].masked_fill(whole, 1.0)
    top_p = [p.top_p if p.top_p < 1 else float("inf") for p in params]
    kept = in_k & (before < _column(top_p, values_RC))
    kept &= values_RC >= values_RC[:, :1] * _column([p.min_p for p in params], values_RC)
    kept[:, 0] = True
    return kept


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)[:, None]
