"""Loss functions over `LossTokens`: the policy loss of an `AlgorithmConfig`, and supervised fine-tuning.

loss = -aggregate(keep · mask · weight · objective) + kl_coefficient · aggregate(keep · w · KL to the reference)
       - entropy_coefficient · aggregate(keep · entropy)
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_core import DeferredMetrics, LossTokens, ShapeError, as_written, find_function
from offbeat_objectives._config.algorithm import DEFAULT_CAP, AlgorithmConfig, read_preset
from offbeat_objectives._config.options import LossOptions
from offbeat_objectives._correction import measure_correction, off_policy_mask
from offbeat_objectives._divergence import kl_per_token, weighted_kl
from offbeat_objectives._mismatch import measure_mismatch
from offbeat_objectives._packing import Measure, aggregate, defer_metrics, require_tokens
from offbeat_objectives._surrogates import OBJECTIVES, Objective, PolicyTokens, Surrogate

ADVANTAGES: Final = "advantages"
OLD: Final = "old_logprobs"
ROLLOUT: Final = "rollout_logprobs"
REFERENCE: Final = "ref_logprobs"
WEIGHTS: Final = "correction_weights"
KEEP: Final = "keep"
LAGGED: Final = "lagged"
ROUTES_DIFFER: Final = "routes_differ"


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one `AlgorithmConfig`; a `LossFunction` that can be pickled.

    Extras it reads, each [N] float32:
        advantages: as made by `compute_advantages`.
        old_logprobs: nats, recomputed by the trainer before the update (decoupled form); the
            loss takes its own, without gradient, where `AlgorithmConfig.needs_train_logprobs` says no.
        rollout_logprobs: nats, of the rollout engine; needed by the bypass form, where they are the old policy, by the
            option `off_policy_mask`, and by a KL penalty in the loss that is weighted (`kl_ratio_weight`).
        ref_logprobs: nats, of the reference policy; needed with a KL penalty in the loss, otherwise only measured.
        correction_weights, keep: as made by `correct_rollouts`; needed when `correction` has a weight or a rejection
            and `old_logprobs` is recomputed. Otherwise the loss makes them itself, from its own log-probabilities
            without gradient and `rollout_logprobs`.
        lagged: optional; 0 where the trainer's log-probability is of exactly the weights that sampled the token,
            else 1.
        routes_differ: optional; of engines that replay or compare routes, see `measure_mismatch`.

    With `rollout_logprobs` the mismatch to the trainer's log-probabilities is measured, whatever is corrected: those of
    `old_logprobs` where they are recomputed, otherwise its own; see `summarise_mismatch`.

    Rejected tokens add nothing to any term, and count in the totals it divides by. Correction weights and the
    off-policy mask act on the policy objective only. The KL penalty is about the policy of now and has a weight of its
    own, w: the ratio of that policy to the one that sampled (`weighted_kl`).
    """

    config: AlgorithmConfig
    single_step: bool = False

    @property
    def required_extras(self) -> tuple[str, ...]:
        """Names that `LossTokens.extras` must hold."""
        bypass = self.config.correction_form == "bypass"
        preset, corrected_before = read_preset(self.config), self.config.corrects and not self._corrects
        wanted = {
            ADVANTAGES: True,
            OLD: self._recomputes,
            ROLLOUT: bypass or self._corrects or self.config.weighs_kl or self._mask_bound is not None,
            REFERENCE: self.config.needs_reference and self.config.kl_in == "loss",
            WEIGHTS: corrected_before and preset.weight is not None,
            KEEP: corrected_before and preset.rejection is not None,
        }
        return tuple(name for name, needed in wanted.items() if needed)

    @property
    def _starts_at_old(self) -> bool:
        """Return whether the old policy is the one in training: ratio, clips and divergence then mean nothing."""
        return self.single_step and self.config.correction_form != "bypass"

    @property
    def _recomputes(self) -> bool:
        """Return whether `old_logprobs` holds the trainer's log-probabilities, recomputed before the update."""
        return self.config.needs_train_logprobs(single_step=self.single_step)

    @property
    def _corrects(self) -> bool:
        """Return whether the loss itself computes the correction: each sequence is whole in one micro-batch."""
        return self.config.corrects and not self._recomputes

    @property
    def _mask_bound(self) -> float | None:
        return self.config.read_options(LossOptions).off_policy_mask

    def __call__(self, tokens: LossTokens[Any]) -> tuple[Tensor, DeferredMetrics]:
        """Return one micro-batch's share of the update's loss.

        Returns:
            A scalar that carries gradient (0, with gradients of 0, when every token is rejected or there is none), and
            metrics under `loss/`, `policy/`, `objective/` and `mismatch_sums/`.

        Raises:
            ShapeError: an extra is missing or has another shape.
        """
        self._check(tokens)
        weights_N, keep_N, corrected = self._correct(tokens)
        old_N = self._old_logprobs(tokens)
        # A rejected token may hold an infinity, which no later 0 could take out of the gradient.
        rejected_N = keep_N == 0
        policy_tokens = PolicyTokens(
            logprobs_N=tokens.logprobs_N.masked_fill(rejected_N, 0.0),
            old_N=old_N.masked_fill(rejected_N, 0.0),
            advantages_N=tokens.extras[ADVANTAGES],
            keep_N=keep_N,
            sequence_N=tokens.sequence_N,
            num_sequences=tokens.num_sequences,
        )
        surrogate = self._mask(find_objective(self.config)(policy_tokens, self.config), policy_tokens, tokens)
        if weights_N is not None:
            # A constant factor: `correct_rollouts` runs without gradient.
            surrogate = replace(surrogate, objective_N=surrogate.objective_N * weights_N)
        terms = self._terms(tokens, policy_tokens, surrogate)
        loss = torch.stack(list(terms.values())).sum()
        measures: dict[str, Measure] = {**corrected, "loss/total": (loss, 1.0, "sum")}
        measures |= {f"loss/{name}": (term, 1.0, "sum") for name, term in terms.items()}
        measures |= _measures(tokens, policy_tokens, surrogate, has_ratio=not self._starts_at_old)
        return loss, defer_metrics(measures) | self._measure_mismatch(tokens)

    def _measure_mismatch(self, tokens: LossTokens[Any]) -> DeferredMetrics:
        """Over all loss tokens, rejected ones included."""
        if ROLLOUT not in tokens.extras:
            return defer_metrics({})
        train_N = tokens.extras[OLD] if self._recomputes else tokens.logprobs_N
        return measure_mismatch(
            train_N, tokens.extras[ROLLOUT], tokens.extras.get(LAGGED), tokens.extras.get(ROUTES_DIFFER)
        )

    def _old_logprobs(self, tokens: LossTokens[Any]) -> Tensor:
        if self.config.correction_form == "bypass":
            old_N: Tensor = tokens.extras[ROLLOUT]
        else:
            # With its own, the ratio is 1 in value and its gradient that of log π_θ.
            old_N = tokens.extras[OLD] if self._recomputes else tokens.logprobs_N.detach()
        return old_N

    def _check(self, tokens: LossTokens[Any]) -> None:
        missing = [name for name in self.required_extras if name not in tokens.extras]
        if missing:
            raise ShapeError(
                f"the loss {as_written(self.config.loss)} (correction {self.config.correction}, "
                f"{self.config.correction_form}) needs the extras {list(self.required_extras)}: {missing} missing"
            )
        require_tokens("the loss", tokens.sequence_N, tokens.logprobs_N, tokens.entropy_N, *tokens.extras.values())

    def _correct(self, tokens: LossTokens[Any]) -> tuple[Tensor | None, Tensor, dict[str, Measure]]:
        """Return [N] weights, or None for none, [N] keep, and what is measured where they are computed here."""
        weights_N = tokens.extras.get(WEIGHTS)
        keep_N = tokens.extras.get(KEEP, torch.ones_like(tokens.logprobs_N))
        if not self._corrects:
            return weights_N, keep_N, {}
        weights_N, corrected_N, measures = measure_correction(
            tokens.logprobs_N, tokens.extras[ROLLOUT], tokens.sequence_N, tokens.num_sequences, self.config
        )
        return weights_N, keep_N * corrected_N, measures

    def _mask(self, surrogate: Surrogate, policy: PolicyTokens, tokens: LossTokens[Any]) -> Surrogate:
        """Remove the objective of what the off-policy mask leaves out."""
        if self._mask_bound is None:
            return surrogate
        # The objective alone: the KL penalty acts on masked tokens too.
        masked_N = off_policy_mask(policy, tokens.extras[ROLLOUT], self._mask_bound) == 0
        return replace(
            surrogate,
            objective_N=surrogate.objective_N.masked_fill(masked_N, 0.0),
            metrics_N={**surrogate.metrics_N, "off_policy_mask": masked_N},
        )

    def _terms(self, tokens: LossTokens[Any], policy: PolicyTokens, surrogate: Surrogate) -> dict[str, Tensor]:
        keep_N = policy.keep_N
        terms = {"policy": self._aggregate(-surrogate.objective_N, tokens, keep_N)}
        if self.config.needs_reference and self.config.kl_in == "loss":
            kl_N = self._kl(policy.logprobs_N, tokens)
            terms["kl"] = self.config.kl_coefficient * self._aggregate(kl_N, tokens, keep_N)
        if self.config.entropy_coefficient:
            terms["entropy"] = -self.config.entropy_coefficient * self._aggregate(tokens.entropy_N, tokens, keep_N)
        return terms

    def _kl(self, logprobs_N: Tensor, tokens: LossTokens[Any]) -> Tensor:
        reference_N, estimator = tokens.extras[REFERENCE], self.config.resolved_kl_estimator
        if not self.config.weighs_kl:
            return kl_per_token(logprobs_N, reference_N, estimator)
        cap = self.config.tis_cap or DEFAULT_CAP
        return weighted_kl(logprobs_N, reference_N, tokens.extras[ROLLOUT], estimator, cap=cap)

    def _aggregate(self, losses_N: Tensor, tokens: LossTokens[Any], keep_N: Tensor) -> Tensor:
        return aggregate(
            # Not a product: 0 times an infinity is NaN. The totals below count rejected tokens as well.
            torch.where(keep_N > 0, losses_N, 0.0),
            tokens.sequence_N,
            tokens.num_sequences,
            how=self.config.resolved_aggregation,
            total_tokens=tokens.total_tokens,
            total_sequences=tokens.total_sequences,
            fixed_length=self.config.fixed_length,
        )


def find_objective(config: AlgorithmConfig) -> Objective:
    """Return the function that `config.loss` names."""
    return find_function("algorithm.loss", config.loss) if config.has_own_loss else OBJECTIVES[config.loss]


def build_loss(config: AlgorithmConfig, *, single_step: bool = False) -> PolicyLoss:
    """Return the `LossFunction` of a configuration that `check_algorithm` has passed.

    Args:
        config: what to compute.
        single_step: see `AlgorithmConfig.needs_train_logprobs`.
    """
    return PolicyLoss(config, single_step)


def sft_loss(tokens: LossTokens[Any]) -> tuple[Tensor, DeferredMetrics]:
    """Mean cross entropy over the loss tokens of the whole update, nats.

    Returns:
        This micro-batch's share, and `loss/total` (the shares add up) and `loss/nll` (mean per token).
    """
    num_tokens = len(tokens.logprobs_N)
    total = -tokens.logprobs_N.sum()
    loss = total / max(tokens.total_tokens, 1)
    return loss, defer_metrics(
        {"loss/total": (loss, 1.0, "sum"), "loss/nll": (total / max(num_tokens, 1), num_tokens, "mean")}
    )


@torch.no_grad()
def _measures(
    tokens: LossTokens[Any], policy: PolicyTokens, surrogate: Surrogate, *, has_ratio: bool
) -> dict[str, Measure]:
    """Means over the kept tokens, left out when there is none; those of new to old policy only with `has_ratio`."""
    kept_N = policy.keep_N > 0
    if not len(kept_N):  # the mean of no token is NaN
        return {}
    zeros_N = torch.zeros_like(policy.logprobs_N)
    num_kept = kept_N.sum()
    per_token = {
        "policy/entropy": tokens.entropy_N,
        **{f"objective/{name}": values_N for name, values_N in surrogate.metrics_N.items()},
    }
    if has_ratio:
        per_token |= {
            "policy/ratio_mean": surrogate.ratio_N,
            "policy/clip_low": surrogate.clipped_low_N,
            "policy/clip_high": surrogate.clipped_high_N,
            "policy/clip_dual": surrogate.clipped_dual_N,
            # The tokens were drawn from the old policy, so this is KL(old ‖ new).
            "policy/kl_old": kl_per_token(zeros_N, policy.log_ratio(), "k3"),
        }
    if REFERENCE in tokens.extras:
        per_token["policy/kl_reference"] = kl_per_token(policy.logprobs_N, tokens.extras[REFERENCE], "k3")
    measures: dict[str, Measure] = {"policy/share_kept": (policy.keep_N.mean(), len(kept_N), "mean")}
    # Not `values_N[kept_N]`: the host would wait to know how many there are.
    for name, values_N in per_token.items():
        if values_N is not None:
            total = values_N.to(zeros_N.dtype).where(kept_N, 0.0).sum()
            measures[name] = (total / num_kept.clamp(min=1), num_kept, "mean")
    if has_ratio:
        measures["policy/ratio_max"] = (surrogate.ratio_N.where(kept_N, -torch.inf).max(), num_kept, "max")
    return measures
