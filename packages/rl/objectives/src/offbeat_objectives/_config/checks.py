"""Refuses an algorithm that cannot work, and any setting that would silently do nothing."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from offbeat_core import METADATA_KEY, ConfigError, as_written, find_function, read_options
from offbeat_objectives._config.algorithm import (
    ADVANTAGES,
    AUTO,
    COMPARING_ADVANTAGES,
    GROUP_ADVANTAGES,
    LOG_RATIO_BOUND,
    LOSS_KINDS,
    REJECTIONS,
    AlgorithmConfig,
    Preset,
    read_preset,
)
from offbeat_objectives._config.options import (
    ADVANTAGE_OPTIONS,
    LOSS_OPTIONS,
    ClipCovOptions,
    LossOptions,
    PassAtKOptions,
)

LEAST_RATIO: Final = math.exp(-LOG_RATIO_BOUND)
LARGEST_RATIO: Final = math.exp(LOG_RATIO_BOUND)

Complaints = Iterator[str]


def check_algorithm(
    config: AlgorithmConfig, *, samples_per_prompt: int, max_tokens: int | None = None
) -> tuple[str, ...]:
    """Check a configuration before anything starts.

    Args:
        config: section "algorithm".
        samples_per_prompt: n, completions drawn for each prompt.
        max_tokens: longest completion, for the overlong buffer; None leaves that unchecked.

    Returns:
        Notices: choices that work and are probably not meant, one sentence each.

    Raises:
        ConfigError: a value out of bounds, a combination that cannot work, or a setting without effect; all of them in
            one text, a line each.
    """
    complaints = [*_out_of_bounds(config)]
    if not complaints:
        # The rest reads the values, so it waits until each of them is sane.
        complaints += [
            *_advantage(config, samples_per_prompt),
            *_loss(config),
            *_options(config, samples_per_prompt),
            *_penalties(config, max_tokens),
            *_distillation(config),
            *_correction(config),
        ]
    if complaints:
        raise ConfigError("\n".join(f"algorithm.{complaint}" for complaint in complaints))
    return tuple(f"algorithm.{notice}" for notice in _notices(config))


def _out_of_bounds(config: AlgorithmConfig) -> Complaints:
    for field in fields(config):
        value = getattr(config, field.name)
        required = field.metadata[METADATA_KEY].complaint(value)
        if isinstance(value, float) and not math.isfinite(value):
            required = "a finite number"
        if required:
            yield f"{field.name} must be {required}: got {value!r}"


def _advantage(config: AlgorithmConfig, samples_per_prompt: int) -> Complaints:
    name = as_written(config.advantage)
    if config.has_own_advantage:
        find_function("algorithm.advantage", config.advantage)
    elif name not in ADVANTAGES:
        yield _unknown("advantage", name, ADVANTAGES)
    if samples_per_prompt < 2 and name in COMPARING_ADVANTAGES:
        yield (
            f"advantage = {name} compares the samples of one prompt and needs at least 2: got {samples_per_prompt}; "
            "raise the samples per prompt, or choose reinforce_plus_plus or remax"
        )
    if samples_per_prompt < 2 and config.filter_groups:
        yield "filter_groups drops every prompt when there is one sample per prompt: no sample differs from itself"
    if config.gamma != 1 and name not in ("reinforce_plus_plus", "gae") and not config.has_own_advantage:
        yield f"gamma = {config.gamma:g} has no effect: {name} gives all tokens of a sample one advantage; leave it out"
    if config.gae_lambda is not None and name != "gae" and not config.has_own_advantage:
        yield f"gae_lambda has no effect with advantage = {name}; leave it out"
    if name == "gdpo":
        yield from _parts_alone(config)


def _parts_alone(config: AlgorithmConfig) -> Complaints:
    """GDPO sees the rewards by name, and nothing that is added to their sum."""
    if config.overlong_buffer_tokens:
        yield "overlong_buffer_tokens has no effect with advantage = gdpo: make the penalty one of reward.weights"
    if config.needs_reference and config.kl_in == "reward":
        yield "kl_in = reward has no effect with advantage = gdpo; use kl_in = loss"


def _unknown(key: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    advice = f"; nearest: {near[0]}" if near else ""
    return f"{key} must be one of {', '.join(known)}, or a function as module:function: got {name!r}{advice}"


def _options(config: AlgorithmConfig, samples_per_prompt: int) -> Complaints:
    """Options that neither reads, of another type, or out of bounds; a function of one's own may read any."""
    kinds = [LOSS_OPTIONS.get(config.loss, LossOptions), ADVANTAGE_OPTIONS.get(config.advantage)]
    known = [{each.name for each in fields(kind)} if kind else set() for kind in kinds]
    names = sorted(known[0] | known[1])
    for name in config.options:
        if name not in names and not config.has_own_loss and not config.has_own_advantage:
            chosen = f"loss = {config.loss} and advantage = {config.advantage}"
            yield f"options: {name} has no effect with {chosen}, which have {', '.join(names)}"
    for kind, own in zip(kinds, known, strict=True):
        if kind is not None:
            yield from _option_values(kind, {name: value for name, value in config.options.items() if name in own})
    k = config.options.get("k", PassAtKOptions().k)
    if config.advantage == "pass_at_k" and isinstance(k, int) and k > samples_per_prompt:
        yield f"options: k = {k} of pass_at_k is more than the {samples_per_prompt} samples of one prompt; lower it"
    elif config.advantage == "pass_at_k" and k == samples_per_prompt > 1:
        yield f"options: k = {k} of pass_at_k is all samples of a prompt, and every advantage is then 0; lower it"


def _option_values(kind: type[Any], given: dict[str, Any]) -> Complaints:
    try:
        options: Any = read_options("options", kind, given)
    except ConfigError as error:
        yield str(error)
        return
    if isinstance(options, ClipCovOptions) and options.cov_low >= options.cov_high:
        yield f"options: cov_low must be below cov_high: got {options.cov_low:g} and {options.cov_high:g}"


def _loss(config: AlgorithmConfig) -> Complaints:
    if config.has_own_loss:
        find_function("algorithm.loss", config.loss)
    elif config.loss not in LOSS_KINDS:
        yield _unknown("loss", config.loss, tuple(LOSS_KINDS))
    kind = LOSS_KINDS.get(config.loss)
    for name in ("clip_low", "clip_high"):
        if kind is not None and kind.clip is None and getattr(config, name) is not None:
            yield f"{name} has no effect: {config.loss} {kind.without_clip}"
    if config.loss in ("ppo_clip", "gspo", "cispo", "clip_cov") and config.clip_range()[0] > 1:
        yield f"clip_low must be at most 1, where the bound 1 - clip_low is 0: got {config.clip_low:g}"
    if config.loss == "dppo_tv" and max(config.clip_range()) >= 1:
        yield f"clip_low and clip_high bound a probability with dppo_tv, and must be below 1: got {config.clip_range()}"
    if config.dual_clip is not None and config.loss != "ppo_clip" and not config.has_own_loss:
        yield f"dual_clip has no effect with loss = {config.loss}: it belongs to ppo_clip"
    if config.resolved_aggregation == "fixed_length" and config.fixed_length is None:
        of = "" if config.aggregation else f", that of {config.loss},"
        yield f"aggregation = fixed_length{of} needs fixed_length, usually the longest completion allowed"
    if config.resolved_aggregation != "fixed_length" and config.fixed_length is not None:
        yield f"fixed_length has no effect with aggregation = {config.resolved_aggregation}"


def _penalties(config: AlgorithmConfig, max_tokens: int | None) -> Complaints:
    if not config.needs_reference:
        if config.kl_estimator is not None:
            yield "kl_estimator has no effect while kl_coefficient is 0"
        if config.kl_in != "loss":
            yield "kl_in has no effect while kl_coefficient is 0"
        if config.kl_ratio_weight is not None:
            yield "kl_ratio_weight has no effect while kl_coefficient is 0"
    elif config.kl_in == "reward" and config.kl_ratio_weight is not None:
        yield "kl_ratio_weight has no effect with kl_in = reward: it weighs the penalty in the loss"
    elif config.kl_in == "loss" and config.resolved_kl_estimator == "k1":
        yield (
            "kl_estimator = k1 in the loss has no effect: its gradient, that of log p, is 0 on average; "
            "use k2 or k3, or kl_in = reward"
        )
    if config.overlong_penalty_factor is not None and not config.overlong_buffer_tokens:
        yield "overlong_penalty_factor has no effect while overlong_buffer_tokens is 0"
    if max_tokens is not None and config.overlong_buffer_tokens > max_tokens:
        yield (
            f"overlong_buffer_tokens must be at most the longest completion, {max_tokens}: "
            f"got {config.overlong_buffer_tokens}"
        )


def _distillation(config: AlgorithmConfig) -> Complaints:
    if config.distillation_discount is not None and not config.needs_teacher:
        yield "distillation_discount has no effect while distillation_coefficient is 0"
    if config.needs_reward:
        return
    if not config.needs_teacher:
        yield "advantage = none learns from no reward and distillation_coefficient = 0 from no teacher: set one of them"
    if config.filter_groups:
        yield "filter_groups drops prompts by their rewards, which advantage = none does not learn from; leave it out"
    if config.overlong_buffer_tokens:
        yield "overlong_buffer_tokens has no effect with advantage = none: it changes rewards"
    if config.needs_reference and config.kl_in == "reward":
        yield "kl_in = reward has no effect with advantage = none; use kl_in = loss"


def _correction(config: AlgorithmConfig) -> Complaints:
    preset = read_preset(config)
    name = config.correction
    if config.correction_form == "bypass" and preset.weight:
        why = f"the ratio of {config.loss} is already against the rollout policy, and a weight would count r twice"
        if config.loss == "gpg":
            why = "the trainer's log-probabilities before the update, which the weights are made of, are not computed"
        yield (
            f"correction = {name} cannot be used with correction_form = bypass: {why}; use decoupled, "
            + (f"or correction = {preset.rejection}_rs" if preset.rejection else "or correction = none")
        )
    may_weigh = preset.weight or name == AUTO  # which of the two choices of auto it is, is known once it is resolved
    cuts = (may_weigh and preset.weight != "icepop") or config.weighs_kl
    if config.tis_cap is not None and not cuts:
        yield f"tis_cap has no effect with correction = {name}: only token_tis and sequence_tis cut their weight"
    if config.normalise_weights and not may_weigh:
        yield f"normalise_weights has no effect with correction = {name}, which has no weights"
    if preset.rejection or preset.weight == "icepop":
        yield from _bounds(preset, name)
    else:
        for key in ("rs_low", "rs_high"):
            if getattr(config, key) is not None:
                yield f"{key} has no effect with correction = {name}, which rejects nothing; {_with_bounds(preset)} do"
    if preset.cap is not None:
        yield from _cap(preset, preset.cap)


def _with_bounds(preset: Preset) -> str:
    prefix = f"{preset.weight}_tis_" if preset.weight else ""
    return ", ".join(prefix + rejection for rejection in REJECTIONS)


def _bounds(preset: Preset, name: str) -> Complaints:
    low, high = preset.low, preset.high
    if not low <= 1 <= high or low == high:
        yield (
            "rs_low and rs_high must enclose 1, the r of a token that trainer and rollout agree on: "
            f"got [{low:g}, {high:g}] (bounds are on r itself, not on log r)"
        )
    elif low <= LEAST_RATIO and high >= LARGEST_RATIO:
        yield f"correction = {name} has no effect: [{low:g}, {high:g}] holds every r (log r is cut at ±20)"


def _cap(preset: Preset, cap: float) -> Complaints:
    if cap >= LARGEST_RATIO:
        yield f"tis_cap = {cap:g} never cuts anything: r is at most {LARGEST_RATIO:.3g}; 2 is usual"
    elif cap <= LEAST_RATIO:
        yield f"tis_cap = {cap:g} makes every weight the same: r is at least {LEAST_RATIO:.3g}; 2 is usual"
    elif preset.weight == preset.rejection and cap >= preset.high:
        yield f"tis_cap = {cap:g} never cuts anything: rs_high = {preset.high:g} rejects all it would cut; omit it"


def _notices(config: AlgorithmConfig) -> Complaints:
    preset = read_preset(config)
    width = math.log(preset.high / max(preset.low, LEAST_RATIO))
    bounds = f"[{preset.low:g}, {preset.high:g}]"
    if preset.rejection == "geometric" and width > math.log(1.5):
        yield (
            f"rs_low and rs_high: {bounds} are wide for a geometric mean over a sequence, and will reject almost "
            "nothing in long ones; they are usual for token_rs"
        )
    if (preset.rejection in ("token", "sequence") or preset.weight == "icepop") and width < math.log(1.02):
        yield (
            f"rs_low and rs_high: {bounds} are narrow for r of a {preset.rejection or 'token'}, and may reject almost "
            "everything; they are usual for geometric_rs"
        )
    usual = LOSS_KINDS[config.loss].aggregation if config.loss in LOSS_KINDS else "token_mean"
    if usual != "token_mean" and config.resolved_aggregation != usual:
        yield f"aggregation: {config.loss} is defined with {usual}; {config.aggregation} is another weighting"
    if config.advantage == "dr_grpo" and config.resolved_aggregation != "fixed_length":
        how = config.resolved_aggregation
        yield f"aggregation: Dr. GRPO is defined with fixed_length; {how} brings its length bias back"
    judged_fully = (*GROUP_ADVANTAGES, "remax", "none")
    if config.filter_groups and config.advantage not in judged_fully and not config.has_own_advantage:
        yield f"filter_groups drops prompts of equal rewards, which {config.advantage} could still learn from"
    if config.filter_groups and config.needs_teacher:
        yield "filter_groups drops prompts of equal rewards, on which the teacher could still teach"
