"""Rollout correction: weights and rejections for tokens that another policy sampled.

The trainer's policy and the one that sampled differ: the weights are newer, the kernels and number formats are others.
With r_t = π_train(a_t) / π_rollout(a_t):

    weight     token_tis     w_t = min(r_t, C)
               sequence_tis  w_t = min(Π r, C), one for the whole sequence
               icepop        w_t = r_t inside [low, high], else 0
    rejection  token_rs      keep the token iff low <= r_t <= high
               sequence_rs   keep the sequence iff low <= Π r <= high
               geometric_rs  keep the sequence iff low <= (Π r)^(1/T) <= high

Sources: truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training", https://fengyao.notion.site/off-policy-rl; sequence weights and rejection: Liu, Li et al., "When speed kills
stability", https://richardli.xyz/rl-collapse, and 2512.23075; names: verl, docs/algo/rollout_corr.md;
icepop: Ling team, "Small leak can sink a great ship", https://ringtech.notion.site/icepop.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_core import Metrics
from offbeat_objectives._config.algorithm import LOG_RATIO_BOUND, AlgorithmConfig, Preset, read_preset
from offbeat_objectives._divergence import bounded_ratio, kl_per_token
from offbeat_objectives._packing import Measure, read_metrics, require_tokens, segment_sum
from offbeat_objectives._surrogates import PolicyTokens


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Correction of each token.

    Args:
        weights_N: [N] float, at least 0, factor of the token's policy objective; 1 where there is no weight.
            Give it to the loss as the extra `correction_weights`.
        keep_N: [N] float, 1 or 0; 0 takes the token out of the whole loss. The extra `keep`.
        metrics: under `correction/`.
    """

    weights_N: Tensor
    keep_N: Tensor
    metrics: Metrics


@torch.no_grad()
def correct_rollouts(
    train_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    config: AlgorithmConfig,
    group: "dist.ProcessGroup | None" = None,
) -> Correction:
    """Weights and rejections of one rank's tokens.

    Args:
        train_logprobs_N: [N] float32, nats: the trainer's policy before the update.
        rollout_logprobs_N: [N] float32, nats: as reported by the rollout engine.
        sequence_N: [N] int64 in [0, S), sorted.
        num_sequences: S.
        config: `correction`, `tis_cap`, `rs_low`, `rs_high`, `normalise_weights`.
        group: the ranks that share the global batch, for `normalise_weights`; every member must call,
            equally often, also one without tokens. None: this process holds the whole batch.

    Raises:
        ShapeError: the token tensors differ in shape.

    Source: see the module.
    """
    weights_N, keep_N, measures = measure_correction(
        train_logprobs_N, rollout_logprobs_N, sequence_N, num_sequences, config, group
    )
    return Correction(weights_N=weights_N, keep_N=keep_N, metrics=read_metrics(measures))


@torch.no_grad()
def measure_correction(
    train_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    config: AlgorithmConfig,
    group: "dist.ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor, dict[str, Measure]]:
    """Return weights, rejections and what is measured of them as `correct_rollouts` does, without a wait for them."""
    require_tokens("correct_rollouts", sequence_N, train_logprobs_N, rollout_logprobs_N)
    preset = read_preset(config)
    log_ratio_N = (train_logprobs_N - rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratios = _Ratios(log_ratio_N, sequence_N, num_sequences)
    keep_N = _keep(ratios, preset)
    weights_N, cut_N = _weights(ratios, preset)
    scale = torch.ones((), dtype=weights_N.dtype, device=weights_N.device)
    if config.normalise_weights:
        scale = _mean_weight(weights_N, keep_N, ratios, per_sequence=preset.weight == "sequence", group=group)
        weights_N = weights_N / scale
    measures = _measures(ratios, weights_N, keep_N, cut_N)
    if config.normalise_weights:
        measures["correction/mean_weight_before_normalising"] = (scale, 1.0, "last")
    return weights_N, keep_N, measures


@torch.no_grad()
def off_policy_mask(tokens: PolicyTokens, rollout_logprobs_N: Tensor, bound: float) -> Tensor:
    """0 for tokens of negative advantage in sequences that the policy of now has moved away from, else 1.

    Args:
        tokens: of one micro-batch.
        rollout_logprobs_N: [N] float32, nats: of the policy that sampled, as its engine reports them.
        bound: δ, nats per token, on the mean of log π_rollout - log π_θ over the kept tokens of a sequence.

    Returns:
        [N] in the dtype of the log-probabilities.

    Source: DeepSeek-V3.2, 2512.02556, equation 9 (off-policy sequence masking).
    """
    # Not left to the mean's weight of 0: a rejected token may hold an infinity.
    gap_N = (rollout_logprobs_N - tokens.logprobs_N).masked_fill(tokens.keep_N == 0, 0.0)
    is_near_N = tokens.sequence_mean(gap_N) <= bound
    return ((tokens.advantages_N >= 0) | is_near_N).to(tokens.logprobs_N.dtype)


class _Ratios:
    """r of each token, and of each sequence as product and as geometric mean; all [N]."""

    def __init__(self, log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int) -> None:
        self.sequence_N, self.num_sequences = sequence_N, num_sequences
        self.length_S = segment_sum(torch.ones_like(log_ratio_N), sequence_N, num_sequences)
        sum_S = segment_sum(log_ratio_N, sequence_N, num_sequences)
        self.log_N = log_ratio_N
        self.by_name = {
            "token": log_ratio_N.exp(),
            # Cut again: a sum of log ratios may lie beyond the bound of each. A mean of them cannot.
            "sequence": bounded_ratio(sum_S)[sequence_N],
            "geometric": (sum_S / self.length_S.clamp(min=1)).exp()[sequence_N],  # a sequence may have no tokens
        }


def _keep(ratios: _Ratios, preset: Preset) -> Tensor:
    if preset.rejection is None:
        return torch.ones_like(ratios.log_N)
    return _inside(ratios.by_name[preset.rejection], preset).to(ratios.log_N.dtype)


def _weights(ratios: _Ratios, preset: Preset) -> tuple[Tensor, Tensor]:
    """[N] weights, and [N] 1 where the weight is not r itself."""
    if preset.weight is None:
        return torch.ones_like(ratios.log_N), torch.zeros_like(ratios.log_N)
    if preset.weight == "icepop":
        ratio_N = ratios.by_name["token"]
        inside_N = _inside(ratio_N, preset)
        return torch.where(inside_N, ratio_N, 0.0), (~inside_N).to(ratio_N.dtype)
    ratio_N = ratios.by_name[preset.weight]
    if preset.cap is None:
        return ratio_N, torch.zeros_like(ratio_N)
    return ratio_N.clamp(max=preset.cap), (ratio_N > preset.cap).to(ratio_N.dtype)


def _inside(ratio_N: Tensor, preset: Preset) -> Tensor:
    return (ratio_N >= preset.low) & (ratio_N <= preset.high)


def _mean_weight(
    weights_N: Tensor, keep_N: Tensor, ratios: _Ratios, *, per_sequence: bool, group: "dist.ProcessGroup | None"
) -> Tensor:
    """Mean weight over all members' kept tokens, or sequences with a kept token; 1 where nothing is kept."""
    if per_sequence:
        # A sequence's tokens share one weight: spread one unit of vote over its kept tokens.
        kept_S = segment_sum(keep_N, ratios.sequence_N, ratios.num_sequences)
        vote_N = keep_N / kept_S.clamp(min=1)[ratios.sequence_N]
    else:
        vote_N = keep_N
    sums = torch.stack([(weights_N * vote_N).sum(), vote_N.sum()])
    if group is not None:
        # A rank without tokens comes here as well: the others wait for it.
        dist.all_reduce(sums, group=group)
    total, count = sums
    return torch.where(total > 0, total / count.clamp(min=1e-20), torch.ones_like(total))


def _measures(ratios: _Ratios, weights_N: Tensor, keep_N: Tensor, cut_N: Tensor) -> dict[str, Measure]:
    num_tokens = len(keep_N)
    if num_tokens == 0:
        return {}
    ratio_N = ratios.by_name["token"]
    used_N = weights_N * keep_N
    has_tokens_S = (ratios.length_S > 0).to(keep_N.dtype)
    rejected_S = has_tokens_S * (segment_sum(keep_N, ratios.sequence_N, ratios.num_sequences) == 0)
    num_sequences = has_tokens_S.sum()
    # k3 of KL(rollout ‖ train): the tokens were drawn from the rollout policy.
    kl_N = kl_per_token(torch.zeros_like(ratio_N), ratios.log_N, "k3")
    effective = used_N.sum().square() / used_N.square().sum().clamp(min=1e-20) / num_tokens
    return {
        "correction/ratio_mean": (ratio_N.mean(), num_tokens, "mean"),
        "correction/ratio_max": (ratio_N.max(), num_tokens, "max"),
        "correction/ratio_min": (ratio_N.min(), num_tokens, "min"),
        "correction/sequence_ratio_max": (ratios.by_name["sequence"].max(), num_tokens, "max"),
        "correction/weight_mean": (weights_N.mean(), num_tokens, "mean"),
        "correction/share_truncated": (cut_N.mean(), num_tokens, "mean"),
        "correction/share_tokens_rejected": (1 - keep_N.mean(), num_tokens, "mean"),
        "correction/share_sequences_rejected": (rejected_S.sum() / num_sequences, num_sequences, "mean"),
        "correction/kl_rollout_train": (kl_N.mean(), num_tokens, "mean"),
        "correction/effective_sample_share": (effective, num_tokens, "mean"),
    }
