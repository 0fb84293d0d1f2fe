"""The Kullback-Leibler divergence from log-probabilities of sampled tokens: its estimators, and a teacher's advantages.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from offbeat_core import Metrics
from offbeat_objectives._config.algorithm import DEFAULT_CAP, LOG_RATIO_BOUND, AlgorithmConfig
from offbeat_objectives._packing import read_metrics, require_tokens, reverse_scan, sequence_of_tokens

K3_CAP: Final = 10.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Exponential of a log ratio cut at ±20: between 2e-9 and 5e8."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def kl_per_token(logprobs_N: Tensor, other_N: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p ‖ q) at each token, for tokens drawn from p; `weighted_kl` is for tokens drawn from another policy.

    With ρ = q/p: k1 = -log ρ (unbiased, any sign), k2 = (log ρ)²/2 (biased, low variance, never negative),
    k3 = ρ - 1 - log ρ (unbiased, never negative). As a loss on samples of p itself, k2 has the gradient of KL(p ‖ q),
    k3 that of KL(q ‖ p), and k1 has none on average, since E[∇ log p] = 0.

    Args:
        logprobs_N: [N] log p, nats; may carry gradient.
        other_N: [N] log q, nats.
        estimator: k1, k2, k3, or k3_capped, which is at most 10 and has no gradient beyond.

    Returns:
        [N], nats.

    Source: http://joschu.net/blog/kl-approx.html; verl (verl/trainer/ppo/core_algos.py, low_var_kl) for
    the cap.
    """
    log_rho_N = (other_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return -log_rho_N
    if estimator == "k2":
        return log_rho_N.square() / 2
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where this estimator usually is.
    k3_N = torch.expm1(log_rho_N) - log_rho_N
    return k3_N.clamp(max=K3_CAP) if estimator == "k3_capped" else k3_N


def weighted_kl(
    logprobs_N: Tensor, other_N: Tensor, sampled_N: Tensor, estimator: str, *, cap: float = DEFAULT_CAP
) -> Tensor:
    """Estimate KL(p ‖ q) at each token, for tokens drawn from a policy m, with the gradient of KL(p ‖ q).

    The value is w · k with w = min(p/m, cap) and k the estimator. Its gradient is w · log(p/q) ∇log p, whichever the
    estimator: without the cap its mean over tokens of m is ∇KL(p ‖ q), as that of (p/m) · k3 is when p/m carries
    gradient, or that of w · k2 when it does not. The cap bounds the weight of a token that m hardly ever draws.

    Args:
        logprobs_N: [N] log p, nats; may carry gradient.
        other_N: [N] log q, nats.
        sampled_N: [N] log m, nats.
        estimator: as for `kl_per_token`; k3_capped has no gradient beyond its cap.
        cap: largest weight.

    Returns:
        [N], nats.

    Source: DeepSeek-V3.2, 2512.02556, section 3.1 (unbiased KL estimate), there (p/m) · k3 without a cap.
    """
    weight_N = bounded_ratio((logprobs_N - sampled_N).detach()).clamp(max=cap)
    value_N = kl_per_token(logprobs_N, other_N, estimator).detach()
    carrier_N = kl_per_token(logprobs_N, other_N, "k2")
    if estimator == "k3_capped":
        carrier_N = torch.where(value_N < K3_CAP, carrier_N, carrier_N.detach())
    return weight_N * (value_N + carrier_N - carrier_N.detach())


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Log-probabilities of a teacher for the samples of an update.

    Args:
        advantages_N: [N] float32, to be added to those of the rewards; the coefficient is in it.
        metrics: under `distillation/`.
    """

    advantages_N: Tensor
    metrics: Metrics


@torch.no_grad()
def distill(config: AlgorithmConfig, student_N: Tensor, teacher_N: Tensor, lengths_S: Tensor) -> Distillation:
    """A_t = c Σ_{u >= t} γ^(u - t) (log q_u - log π_u) within each sample, each term cut at ±20.

    With γ = 0 each token answers for itself: the gradient of the divergences at the states visited, as in GKD. With
    γ = 1 it answers for all that follows: the gradient of the divergence of whole sequences, as in MiniLLM.

    Args:
        config: `distillation_coefficient` is c, `distillation_discount` γ.
        student_N: [N] nats, of the policy that the loss's ratio is against, all samples end to end.
        teacher_N: [N] nats, at the same temperature.
        lengths_S: [S] int64, tokens of each sample.

    Raises:
        ShapeError: the tensors differ in shape.

    Source: GKD, 2306.13649, section 3 (λ = 1, reverse KL; here estimated from the sampled token); MiniLLM, 2306.08543,
    section 2.2 (the policy gradient, without its single-step decomposition and length normalisation).
    """
    sequence_N = sequence_of_tokens(lengths_S)
    require_tokens("distill", sequence_N, student_N, teacher_N)
    gain_N = (teacher_N.double() - student_N.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    returns_N = reverse_scan(gain_N, config.distillation_discount or 0.0, sequence_N, len(lengths_S))
    num_tokens = len(gain_N)
    measures = {
        "distillation/kl": kl_per_token(student_N, teacher_N, "k1"),
        "distillation/kl_k3": kl_per_token(student_N, teacher_N, "k3"),
        "distillation/teacher_logprob": teacher_N,
    }
    return Distillation(
        advantages_N=(config.distillation_coefficient * returns_N).float(),
        metrics=read_metrics({name: (values.mean(), num_tokens, "mean") for name, values in measures.items()})
        if num_tokens
        else {},
    )
