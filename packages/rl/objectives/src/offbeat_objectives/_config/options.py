"""Numbers that belong to one loss or one advantage, given in `algorithm.options` as keys would be many."""

from dataclasses import dataclass
from typing import Final

from offbeat_core import setting


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of every loss."""

    off_policy_mask: float | None = setting(
        None,
        "δ of the off-policy sequence mask: tokens of negative advantage are left out of the policy objective where "
        "mean(log π_rollout - log π_θ) over their sequence is above it. Off if not given.",
        "nats per token",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class SapoOptions(LossOptions):
    """Options of `loss = "sapo"`."""

    tau_positive: float = setting(1.0, "Steepness of the gate where the advantage is positive.", gt=0)
    tau_negative: float = setting(1.05, "Steepness of the gate elsewhere.", gt=0)


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(LossOptions):
    """Options of `loss = "clip_cov"`."""

    cov_share: float = setting(2e-4, "Share of a micro-batch's tokens that lose their gradient.", gt=0, le=1)
    cov_low: float = setting(1.0, "Covariance above which a token may lose it.", "nats x advantage")
    cov_high: float = setting(5.0, "Covariance below which a token may lose it.", "nats x advantage")


@dataclass(frozen=True, kw_only=True)
class KlCovOptions(LossOptions):
    """Options of `loss = "kl_cov"`."""

    cov_share: float = setting(2e-4, "Share of a micro-batch's tokens that are held back.", gt=0, le=1)
    kl_weight: float = setting(1.0, "Weight of |log r| at those tokens.", "per nat", gt=0)


@dataclass(frozen=True, kw_only=True)
class DppoOptions(LossOptions):
    """Options of `loss = "dppo_tv"` and `"dppo_kl"`."""

    ratio_cap: float = setting(20.0, "Largest weight that the ratio gives a token.", "ratio", gt=1)


@dataclass(frozen=True, kw_only=True)
class GrpoPasskOptions:
    """Options of `advantage = "grpo_passk"`."""

    divide_by_std: bool = setting(True, "Divide by the standard deviation of the group's rewards.")


@dataclass(frozen=True, kw_only=True)
class PassAtKOptions:
    """Options of `advantage = "pass_at_k"`."""

    k: int = setting(4, "Samples; the best of them counts.", "samples", ge=1)


@dataclass(frozen=True, kw_only=True)
class GaeOptions:
    """Options of `advantage = "gae"`."""

    normalise: bool = setting(True, "Subtract the mean over the tokens of the update, and divide by their deviation.")


LOSS_OPTIONS: Final[dict[str, type[LossOptions]]] = {
    "sapo": SapoOptions,
    "clip_cov": ClipCovOptions,
    "kl_cov": KlCovOptions,
    "dppo_tv": DppoOptions,
    "dppo_kl": DppoOptions,
}
"""Options of the losses that have some of their own."""
ADVANTAGE_OPTIONS: Final[dict[str, type]] = {
    "grpo_passk": GrpoPasskOptions,
    "pass_at_k": PassAtKOptions,
    "gae": GaeOptions,
}
