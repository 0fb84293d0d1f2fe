"""Estimators of the Kullback-Leibler divergence from log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from typing import Final

import torch
from torch import Tensor

from offbeat_objectives._preset import LOG_RATIO_BOUND

K3_CAP: Final = 10.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Exponential of a log ratio cut at ±20: between 2e-9 and 5e8."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def kl_per_token(logprobs_N: Tensor, other_N: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p ‖ q) at each token, for tokens drawn from p.

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
