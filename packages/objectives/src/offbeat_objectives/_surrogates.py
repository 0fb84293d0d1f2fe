"""The loss family: one function each, from ratios and advantages to an objective per token.

Every objective is to be maximised, and its gradient is that of the paper's. The sequence-level ones (gspo, gmpo) are
written per token as sg[x] · exp(l_t - sg[l_t]), sg being stop-gradient: the value at every token is the sequence's,
and the gradient of the mean over tokens is the sequence's too, so that weights and advantages
per token have a meaning.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from offbeat_objectives._config import DEFAULT_SAPO_TEMPERATURES, LOG_RATIO_BOUND, AlgorithmConfig
from offbeat_objectives._divergence import bounded_ratio
from offbeat_objectives._packing import segment_mean


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What an objective reads; all [N].

    Args:
        logprobs_N: log π_θ, nats, carries gradient; 0 for rejected tokens.
        old_N: log π_old, nats; 0 for rejected tokens.
        advantages_N: A.
        keep_N: 1 or 0; rejected tokens take no part in a sequence's ratio.
        sequence_N: int64, sorted.
        num_sequences: S.
    """

    logprobs_N: Tensor
    old_N: Tensor
    advantages_N: Tensor
    keep_N: Tensor
    sequence_N: Tensor
    num_sequences: int

    def log_ratio(self) -> Tensor:
        """[N]: log r_t = log π_θ - log π_old, cut at ±20."""
        return (self.logprobs_N - self.old_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """[N]: the mean over the kept tokens of each token's sequence."""
        return segment_mean(values_N, self.sequence_N, self.num_sequences, self.keep_N)[self.sequence_N]


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """An objective per token, and what became of its ratio.

    Args:
        objective_N: [N], carries gradient.
        ratio_N: [N], the ratio the objective is built on.
        clipped_low_N, clipped_high_N, clipped_dual_N: [N] bool: the bound took the token's gradient (cispo: bounded its
            weight). None where the objective has no such bound.
    """

    objective_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor | None = None
    clipped_high_N: Tensor | None = None
    clipped_dual_N: Tensor | None = None


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least dual_clip · A where A < 0.

    Source: PPO, 1707.06347, equation 7; dual clip, 1912.09729, section 3; clip-higher, DAPO, 2503.14476, section 3.1.
    """
    ratio_N = tokens.log_ratio().exp()
    surrogate = _clipped(ratio_N, tokens.advantages_N, config.clip_range())
    if config.dual_clip is None:
        return surrogate
    negative_N = tokens.advantages_N < 0
    floor_N = config.dual_clip * tokens.advantages_N
    objective_N = torch.where(negative_N, torch.maximum(surrogate.objective_N, floor_N), surrogate.objective_N)
    return replace(surrogate, objective_N=objective_N, clipped_dual_N=negative_N & (ratio_N > config.dual_clip))


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """min(s A, clip(s, 1 - low, 1 + high) A) with s = (Π r)^(1/T), one ratio for the sequence.

    Written as GSPO-token: s_t = sg[s] · π_θ / sg[π_θ]. Its gradient is GSPO's under sequence_mean.

    Source: GSPO, 2507.18071, sections 4.1 and 4.3.
    """
    log_s_N = tokens.sequence_mean(tokens.log_ratio()).detach()
    ratio_N = (log_s_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return _clipped(ratio_N, tokens.advantages_N, config.clip_range())


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """sg[clip(r, 1 - low, 1 + high)] A log π_θ: no token loses its gradient, its weight is bounded instead.

    Source: CISPO, MiniMax-M1, 2506.13585, equations 4 and 5.
    """
    low, high = config.clip_range()
    ratio_N = tokens.log_ratio().exp().detach()
    return Surrogate(
        objective_N=ratio_N.clamp(1 - low, 1 + high) * tokens.advantages_N * tokens.logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < 1 - low,
        clipped_high_N=ratio_N > 1 + high,
    )


def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """(4/τ) σ(τ (r - 1)) A, with τ by the advantage's sign: a soft gate whose slope is 1 at r = 1.

    Source: SAPO, 2511.20347, section 3.
    """
    positive, negative = config.sapo_tau or DEFAULT_SAPO_TEMPERATURES
    ratio_N = tokens.log_ratio().exp()
    tau_N = torch.full_like(ratio_N, negative).masked_fill(tokens.advantages_N > 0, positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return Surrogate(objective_N=gate_N * tokens.advantages_N, ratio_N=ratio_N)


def gmpo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """A · (Π c)^(1/T), c being min(r, exp(high)) where A > 0 and max(r, exp(-low)) where A < 0.

    Source: GMPO, 2507.20673, section 3 (clipping per token, in log space; default exp(±0.4)).
    """
    low, high = config.clip_range()
    log_N, advantages_N = tokens.log_ratio(), tokens.advantages_N
    one_sided_N = torch.where(advantages_N > 0, log_N.clamp(max=high), log_N.clamp(min=-low))
    mean_N = tokens.sequence_mean(one_sided_N).detach()
    return Surrogate(
        objective_N=advantages_N * (mean_N + one_sided_N - one_sided_N.detach()).exp(),
        ratio_N=bounded_ratio(mean_N),
        clipped_low_N=(advantages_N < 0) & (log_N < -low),
        clipped_high_N=(advantages_N > 0) & (log_N > high),
    )


def _clipped(ratio_N: Tensor, advantages_N: Tensor, clip_range: tuple[float, float]) -> Surrogate:
    """The pessimistic clip of PPO, on whatever ratio."""
    low, high = clip_range
    bounded_N = ratio_N.clamp(1 - low, 1 + high)
    return Surrogate(
        objective_N=torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N),
        ratio_N=ratio_N,
        clipped_low_N=(advantages_N < 0) & (ratio_N < 1 - low),
        clipped_high_N=(advantages_N > 0) & (ratio_N > 1 + high),
    )


Objective = Callable[[PolicyTokens, AlgorithmConfig], Surrogate]
OBJECTIVES: Final[dict[str, Objective]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
}
