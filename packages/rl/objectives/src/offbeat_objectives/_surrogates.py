"""The loss family: one function each, from ratios and advantages to an objective per token.

Every objective is to be maximised, and its gradient is that of the paper's. The sequence-level ones (gspo, gmpo) are
written per token as sg[x] · exp(l_t - sg[l_t]), sg being stop-gradient: the value at every token is the sequence's,
and the gradient of the mean over tokens is the sequence's too, so that weights and advantages
per token have a meaning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from offbeat_objectives._config.algorithm import LOG_RATIO_BOUND, LOSS_KINDS, AlgorithmConfig
from offbeat_objectives._config.options import ClipCovOptions, DppoOptions, KlCovOptions, SapoOptions
from offbeat_objectives._divergence import bounded_ratio
from offbeat_objectives._packing import segment_mean

TINY_PROBABILITY: Final = 1e-8
"""Keeps the logarithm of what is left beside a certain token finite."""


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Inputs of an objective: the N loss tokens of S sequences, which are one micro-batch of one rank. N may be 0.

    Args:
        logprobs_N: [N] float32, log π_θ, nats, carries gradient; 0 for rejected tokens.
        old_N: [N] float32, log π_old, nats; 0 for rejected tokens.
        advantages_N: [N] float32, A.
        keep_N: [N] float32, 1 or 0; rejected tokens take no part in a sequence's ratio, nor in any mean.
        sequence_N: [N] int64 in [0, S), sorted: the sequence of each token.
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

    def mean(self, values_N: Tensor) -> Tensor:
        """Return a scalar: the mean over all kept tokens; 0 where there is none."""
        return (values_N * self.keep_N).sum() / self.keep_N.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """An objective per token, and what became of its ratio.

    Args:
        objective_N: [N] float32, to be maximised, carries gradient; what it says of rejected tokens is left out.
        ratio_N: [N] float32, the ratio the objective is built on, or of what is measured where it has none.
        clipped_low_N, clipped_high_N, clipped_dual_N: [N] bool: the bound took the token's gradient (cispo: bounded its
            weight). None where the objective has no such bound.
        metrics_N: [N] float or bool each, by name: a run shows the mean over the kept tokens as `objective/NAME`.
    """

    objective_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor | None = None
    clipped_high_N: Tensor | None = None
    clipped_dual_N: Tensor | None = None
    metrics_N: Mapping[str, Tensor] = field(default_factory=dict)


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
    # sg[s] · π_θ / sg[π_θ], in logarithms.
    ratio_N = (log_s_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return _clipped(ratio_N, tokens.advantages_N, config.clip_range())


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """sg[clip(r, 1 - low, 1 + high)] A log π_θ: no token loses its gradient, its weight is bounded instead.

    Source: CISPO, MiniMax-M1, 2506.13585, equations 4 and 5.
    """
    low, high = config.clip_range()
    ratio_N = tokens.log_ratio().exp().detach()  # sg: the gradient comes through log π_θ alone
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
    options = config.read_options(SapoOptions)
    ratio_N = tokens.log_ratio().exp()
    tau_N = torch.full_like(ratio_N, options.tau_negative)
    tau_N = tau_N.masked_fill(tokens.advantages_N > 0, options.tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N  # σ has the slope 1/4 at 0
    return Surrogate(objective_N=gate_N * tokens.advantages_N, ratio_N=ratio_N)


def gmpo(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """Return a · (Π c)^(1/T), c being min(r, exp(high)) where A > 0 and max(r, exp(-low)) where A < 0.

    Source: GMPO, 2507.20673, section 3 (clipping per token, in log space; default exp(±0.4)).
    """
    low, high = config.clip_range()
    log_N, advantages_N = tokens.log_ratio(), tokens.advantages_N
    one_sided_N = torch.where(advantages_N > 0, log_N.clamp(max=high), log_N.clamp(min=-low))
    mean_N = tokens.sequence_mean(one_sided_N).detach()
    return Surrogate(
        # The sequence's value with each token's gradient: see the module.
        objective_N=advantages_N * (mean_N + one_sided_N - one_sided_N.detach()).exp(),
        ratio_N=bounded_ratio(mean_N),
        clipped_low_N=(advantages_N < 0) & (log_N < -low),
        clipped_high_N=(advantages_N > 0) & (log_N > high),
    )


def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """Return that of ppo_clip, without some of the tokens that lower the entropy most.

    Of the tokens that the clip leaves alone and whose covariance lies between `cov_low` and `cov_high`, `cov_share` of
    all tokens, drawn at random and at least one, have an objective of 0. The covariance and the share are those of one
    micro-batch, as in the implementations. The draw depends on the number of tokens alone: ranks that hold the same
    tokens draw the same.

    Source: Clip-Cov, 2505.22617, section 4.2; verl, verl/trainer/ppo/core_algos.py, for the ratio's clip beside it.
    """
    options = config.read_options(ClipCovOptions)
    ratio_N = tokens.log_ratio().exp()
    surrogate = _clipped(ratio_N, tokens.advantages_N, config.clip_range())
    cov_N = _covariance(tokens)
    # Smaller where the minimum has taken the bounded side.
    is_clipped_N = surrogate.objective_N < ratio_N * tokens.advantages_N
    within_N = (cov_N > options.cov_low) & (cov_N < options.cov_high) & (tokens.keep_N > 0) & ~is_clipped_N
    candidates = within_N.nonzero()[:, 0]
    num_kept = int(tokens.keep_N.sum())
    # Drawn on the CPU, so that it is the same on every device.
    draw = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(num_kept))
    chosen = candidates[draw[: max(int(options.cov_share * num_kept), 1)].to(candidates.device)]
    chosen_N = torch.zeros_like(within_N).index_fill(0, chosen, value=True)
    return replace(
        surrogate,
        objective_N=surrogate.objective_N.masked_fill(chosen_N, 0.0),
        metrics_N={"covariance": cov_N, "clip_cov": chosen_N},
    )


def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """Return r · A, less kl_weight |log r| at the `cov_share` of tokens of largest covariance, at least one.

    The covariance and the share are those of one micro-batch, as in the implementations.

    Source: KL-Cov, 2505.22617, section 4.2; verl, verl/trainer/ppo/core_algos.py, for |log r|.
    """
    options = config.read_options(KlCovOptions)
    log_N, ratio_N = tokens.log_ratio(), tokens.log_ratio().exp()
    cov_N = _covariance(tokens)
    num_kept = int(tokens.keep_N.sum())
    num_chosen = min(max(int(options.cov_share * num_kept), 1), num_kept)
    # Rejected tokens are never among the largest.
    chosen = cov_N.masked_fill(tokens.keep_N == 0, -torch.inf).topk(num_chosen).indices
    chosen_N = torch.zeros_like(cov_N, dtype=torch.bool).index_fill(0, chosen, value=True)
    penalty_N = (options.kl_weight * log_N.abs()).masked_fill(~chosen_N, 0.0)
    return Surrogate(
        objective_N=ratio_N * tokens.advantages_N - penalty_N,
        ratio_N=ratio_N,
        metrics_N={"covariance": cov_N, "kl_cov": chosen_N},
    )


def _covariance(tokens: PolicyTokens) -> Tensor:
    """[N]: (A_t - mean A) (log π_t - mean log π), means over the kept tokens, without gradient."""
    logprobs_N, advantages_N = tokens.logprobs_N.detach(), tokens.advantages_N
    return (advantages_N - tokens.mean(advantages_N)) * (logprobs_N - tokens.mean(logprobs_N))


def gpg(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """Return a log π_θ: the policy gradient itself, without ratio and clip. The old policy is only measured against.

    Source: GPG, 2504.02546.
    """
    return Surrogate(objective_N=tokens.advantages_N * tokens.logprobs_N, ratio_N=tokens.log_ratio().exp().detach())


def dppo_tv(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """M sg[min(r, ratio_cap)] A log π_θ, where M is 0 for a token that has left the trust region and would go further.

    The divergence is the total variation between old and new policy over two outcomes, the token and any other:
    |π_θ - π_old|. Where A > 0 it is bounded above π_old, by clip_high; elsewhere below it, by clip_low.

    Source: DPPO with the binary total variation, 2602.04879, section 5.4 for the cap; verl,
    verl/trainer/ppo/core_algos.py.
    """
    # Without gradient: the divergence only decides the mask M.
    old_N, new_N = tokens.old_N.exp(), tokens.logprobs_N.detach().exp()
    return _within_region(tokens, config, (new_N - old_N).abs())


def dppo_kl(tokens: PolicyTokens, config: AlgorithmConfig) -> Surrogate:
    """Return that of dppo_tv, with KL(π_old ‖ π_θ) over the same two outcomes as the divergence.

    Source: DPPO with the binary Kullback-Leibler divergence, 2602.04879; verl, verl/trainer/ppo/core_algos.py.
    """
    old_N, new_N = tokens.old_N.exp(), tokens.logprobs_N.detach().exp()
    others_N = ((1 - old_N + TINY_PROBABILITY) / (1 - new_N + TINY_PROBABILITY)).log()
    return _within_region(tokens, config, -old_N * tokens.log_ratio().detach() + (1 - old_N) * others_N)


def _within_region(tokens: PolicyTokens, config: AlgorithmConfig, divergence_N: Tensor) -> Surrogate:
    low, high = config.clip_range()
    cap = config.read_options(DppoOptions).ratio_cap
    log_N = tokens.log_ratio().detach()
    rises_N = tokens.advantages_N > 0
    # Out of the region on the side that A pushes towards; a way back is left open.
    left_high_N = rises_N & (log_N > 0) & (divergence_N > high)
    left_low_N = ~rises_N & (log_N < 0) & (divergence_N > low)
    ratio_N = log_N.exp()
    objective_N = ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.logprobs_N
    return Surrogate(
        objective_N=objective_N.masked_fill(left_high_N | left_low_N, 0.0),
        ratio_N=ratio_N,
        clipped_low_N=left_low_N,
        clipped_high_N=left_high_N,
        metrics_N={"divergence": divergence_N, "ratio_capped": ratio_N > cap},
    )


def _clipped(ratio_N: Tensor, advantages_N: Tensor, clip_range: tuple[float, float]) -> Surrogate:
    """Return the pessimistic clip of PPO, on whatever ratio."""
    low, high = clip_range
    bounded_N = ratio_N.clamp(1 - low, 1 + high)
    return Surrogate(
        objective_N=torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N),
        ratio_N=ratio_N,
        clipped_low_N=(advantages_N < 0) & (ratio_N < 1 - low),
        clipped_high_N=(advantages_N > 0) & (ratio_N > 1 + high),
    )


Objective = Callable[[PolicyTokens, AlgorithmConfig], Surrogate]
OBJECTIVES: Final[dict[str, Objective]] = {name: globals()[name] for name in LOSS_KINDS}
"""Functions above, by the name of their loss."""
