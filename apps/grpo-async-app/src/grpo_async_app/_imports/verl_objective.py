"""verl's algorithm, loss, KL penalty and rollout correction in our words."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from offbeat_core import ConfigError
from offbeat_recipes import Entry, RecipeBuilder, is_number, is_open

_ACTOR: Final = "actor_rollout_ref.actor."
_CORRECTION: Final = "algorithm.rollout_correction."
_ADVANTAGES: Final = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "gae": "gae",
}
_LOSSES: Final = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gpg": "gpg",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
_WITHOUT_CLIP: Final = ("sapo", "kl_cov", "gpg")
_OPTIONS: Final[Mapping[str, Mapping[str, tuple[str, float]]]] = {
    "sapo": {"tau_positive": (f"{_ACTOR}tau_pos", 1.0), "tau_negative": (f"{_ACTOR}tau_neg", 1.05)},
    "clip_cov": {
        "cov_share": (f"{_ACTOR}policy_loss.clip_cov_ratio", 0.0002),
        "cov_low": (f"{_ACTOR}policy_loss.clip_cov_lb", 1.0),
        "cov_high": (f"{_ACTOR}policy_loss.clip_cov_ub", 5.0),
    },
    "kl_cov": {
        "cov_share": (f"{_ACTOR}policy_loss.kl_cov_ratio", 0.0002),
        "kl_weight": (f"{_ACTOR}policy_loss.ppo_kl_coef", 0.1),
    },
    "dppo_tv": {"ratio_cap": (f"{_ACTOR}clip_ratio_c", 3.0)},
    "dppo_kl": {"ratio_cap": (f"{_ACTOR}clip_ratio_c", 3.0)},
}
"""Options of a loss here, with the option there and its default (verl/trainer/config/actor/actor.yaml)."""

_OF_SEQUENCES: Final = ("gspo", "sapo", "gmpo")
"""Losses for which verl takes the mean over sequences, whatever loss_agg_mode says (core_algos, agg_loss)."""
_ESTIMATORS: Final = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3_capped", "k3": "k3_capped"}
_FILTERED_HERE: Final = "groups are dropped whose rewards, as scored, are all the same: before the overlong penalty"
_FILTERED_BY: Final = {
    "acc": _FILTERED_HERE,
    "score": _FILTERED_HERE,
    "seq_reward": f"counts the overlong penalty there; {_FILTERED_HERE}",
    "seq_final_reward": f"counts the overlong penalty and the KL penalty there; {_FILTERED_HERE}",
}
"""By the name of verl's metric. Source: recipe/dapo/dapo_ray_trainer.py and verl/workers/reward_manager/dapo.py, in
which `acc` and `score` are of the reward function and the penalty is added to the reward tensor."""
_NO_LIMIT: Final = 10**6
_LEVELS: Final = {
    "token": "token",
    "token_k1": "token",
    "sequence": "sequence",
    "seq_sum_k1": "sequence",
    "geometric": "geometric",
    "seq_mean_k1": "geometric",
}
"""Names of the statistic that rejects, those up to 2025 and those after."""
_PRESET: Final = re.compile(
    r"(token|sequence)_tis(_(token|sequence|geometric)_rs)?|(token|sequence|geometric)_rs|icepop"
)
"""Names of corrections, here and in texts about verl."""


def write_objective(draft: RecipeBuilder, *, bypasses: bool) -> None:
    """`bypasses`: the configuration it begins with takes the ratio against the rollout's log-probabilities."""
    _write_advantage(draft)
    _write_loss(draft)
    _write_penalty(draft)
    _write_rewards(draft)
    _write_correction(draft, bypasses=bypasses)


def _write_advantage(draft: RecipeBuilder) -> None:
    name = "algorithm.adv_estimator"
    wanted = draft.text(name, default="gae")
    by_spread = draft.take("algorithm.norm_adv_by_std_in_grpo", default=True)
    advantage = _ADVANTAGES.get(wanted, "grpo")
    if wanted not in _ADVANTAGES:
        draft.lose(name, f"{wanted} is not supported: using grpo instead")
    if advantage == "grpo" and not by_spread:
        advantage = "dr_grpo"
    by_group = ("algorithm.norm_adv_by_std_in_grpo",) if advantage in ("grpo", "dr_grpo") else ()
    draft.put("algorithm.advantage", advantage, name, *by_group)
    if advantage == "grpo_passk" and not by_spread:
        _add_options(draft, {"divide_by_std": False}, "algorithm.norm_adv_by_std_in_grpo")
    elif advantage == "gdpo":
        _write_gdpo(draft)
    elif advantage == "gpg":
        draft.change(name, "scaled there by samples / non-zero rewards, here by samples / those of groups that differ")
    gamma = draft.take("algorithm.gamma")
    if gamma is not None and advantage in ("reinforce_plus_plus", "gae"):
        draft.put("algorithm.gamma", gamma, "algorithm.gamma")
    if advantage == "gae":
        _write_critic(draft)
    elif draft.take("algorithm.lam") is not None:
        draft.ignore("algorithm.lam", "belongs to gae")


def _write_critic(draft: RecipeBuilder) -> None:
    """Source: verl/trainer/config/critic/critic.yaml and ppo_trainer.yaml."""
    draft.copy("algorithm.gae_lambda", "algorithm.lam", default=1.0)
    draft.copy("critic.path", "critic.model.path")
    if "critic.path" not in draft.entries:
        draft.change("critic.model.path", "a model of 7B that need not be yours there; here it starts as the policy")
    draft.copy("critic.learning_rate", "critic.optim.lr", default=1e-5)
    draft.copy("critic.clip", "critic.cliprange_value", default=0.5)
    draft.copy("critic.warmup_updates", "trainer.critic_warmup", default=0)


def _write_gdpo(draft: RecipeBuilder) -> None:
    """Parts of one function's answer there; here each is a reward of its own."""
    names = ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
    keys, weights = draft.take(names[0]), draft.take(names[1])
    if not isinstance(keys, list):
        draft.change(names[0], "unknown here: name two rewards or more in reward.weights")
        return
    module, colon, _ = draft.entries.pop("reward.name").value.partition(":")
    shares = weights if isinstance(weights, list) else [1.0] * len(keys)
    named = [f"{module if colon else 'my_rewards'}:{key}" for key in keys]
    draft.put("reward.weights", dict(zip(named, map(float, shares), strict=False)), *names)
    draft.change(
        names[0], "keys of one function's answer there, here a function each: write them, returning one number"
    )


def _add_options(draft: RecipeBuilder, options: Mapping[str, Any], *names: str) -> None:
    """Into `algorithm.options`, beside those that are there."""
    before = draft.entries.get("algorithm.options")
    draft.put("algorithm.options", {**(before.value if before else {}), **options}, *names)
    if before:
        both = draft.entries["algorithm.options"]
        draft.entries["algorithm.options"] = Entry(both.value, f"{before.source} and {both.source}")


def _write_loss(draft: RecipeBuilder) -> None:
    name = f"{_ACTOR}policy_loss.loss_mode"
    wanted = draft.text(name, default="vanilla")
    loss = _LOSSES.get(wanted, "ppo_clip")
    if wanted not in _LOSSES:
        draft.lose(name, f"{wanted} is not supported: using ppo_clip instead")
    draft.put("algorithm.loss", loss, name)
    _write_clips(draft, loss)
    bound = draft.take(f"{_ACTOR}clip_ratio_c", default=3.0)
    if loss == "ppo_clip":
        draft.put("algorithm.dual_clip", bound, f"{_ACTOR}clip_ratio_c")
    draft.take(*(there for options in _OPTIONS.values() for there, _ in options.values()))
    if loss in _OPTIONS:
        values = {ours: draft.number(there, default=usual) for ours, (there, usual) in _OPTIONS[loss].items()}
        _add_options(draft, values, *(there for there, _ in _OPTIONS[loss].values()))
    _write_share(draft, loss)
    _write_aggregation(draft, loss)
    draft.copy("algorithm.entropy_coefficient", f"{_ACTOR}entropy_coeff")


def _write_share(draft: RecipeBuilder, loss: str) -> None:
    """Source: PRIME-RL/Entropy-Mechanism-of-RL 8850579, verl/trainer/ppo/core_algos.py: a percentage of the tokens."""
    name = f"{_ACTOR}k_percent"
    percent = draft.number(name, default=0)
    if percent and loss == "kl_cov":
        _add_options(draft, {"cov_share": percent / 100.0}, name)
    elif percent:
        draft.ignore(name, "belongs to kl_cov")


def _write_clips(draft: RecipeBuilder, loss: str) -> None:
    """Bounds of the ratio; verl/trainer/config/actor/actor.yaml sets both sides to 0.2, whatever clip_ratio says."""
    both, names = draft.take(f"{_ACTOR}clip_ratio"), [f"{_ACTOR}clip_ratio_{side}" for side in ("low", "high")]
    sides = [draft.number(name, default=0.2) for name in names]
    if loss in _WITHOUT_CLIP:
        return
    if both not in (None, 0.2) and not all(map(draft.has, names)):
        draft.change(f"{_ACTOR}clip_ratio", "has no effect there, where the low and high bounds have defaults of 0.2")
    if loss == "cispo" and sides[0] > 1.0:
        draft.change(names[0], "1 - 1 = 0 is the least ratio there is: 1 means the same")
        sides[0] = 1.0
    for side, value, name in zip(("low", "high"), sides, names, strict=True):
        draft.put(f"algorithm.clip_{side}", value, name)


def _write_aggregation(draft: RecipeBuilder, loss: str) -> None:
    name, scale_name = f"{_ACTOR}loss_agg_mode", f"{_ACTOR}loss_scale_factor"
    mode = draft.text(name, default="token-mean")
    if draft.has(scale_name) and (loss in _OF_SEQUENCES or mode != "seq-mean-token-sum-norm"):
        draft.take(scale_name)
        draft.ignore(scale_name, "has an effect with seq-mean-token-sum-norm alone")
    if loss in _OF_SEQUENCES:
        draft.put("algorithm.aggregation", "sequence_mean", f"{_ACTOR}policy_loss.loss_mode")
        if draft.has(name) and mode != "seq-mean-token-mean":
            draft.change(name, f"verl takes no notice of it with {loss}: the mean over sequences, as there")
        return
    if mode == "token-sum":
        draft.change(
            name, "a sum over all tokens there; their mean is used here, which differs by a factor in the learning rate"
        )
        mode = "token-mean"
    if mode.startswith("seq-mean-token-sum"):
        draft.put("algorithm.aggregation", "fixed_length", name)
        _write_fixed_length(draft, mode, name, scale_name)
        return
    draft.put("algorithm.aggregation", "token_mean" if mode == "token-mean" else "sequence_mean", name)


def _write_fixed_length(draft: RecipeBuilder, mode: str, name: str, scale_name: str) -> None:
    """Write the number that the sum over a sequence's tokens is divided by, before the mean over sequences.

    Source: verl at 1dda039, verl/trainer/ppo/core_algos.py, agg_loss: with -norm loss_scale_factor, or else the width
    of the batch's answers, which are filled up to the longest; without it nothing.
    """
    if mode != "seq-mean-token-sum-norm":
        draft.put("algorithm.fixed_length", 1, name)
        return
    scale = draft.number(scale_name, default=draft.entries["rollout.max_tokens"].value)
    length = max(round(scale), 1)
    if length != scale:
        draft.change(scale_name, f"a whole number of tokens here: {length}")
    names = (scale_name,) if draft.has(scale_name) else (name, "data.max_response_length")
    draft.put("algorithm.fixed_length", length, *names)
    draft.change(name, "the mean over sequences, as in verl since early 2026; there it was the sum before")


def _write_penalty(draft: RecipeBuilder) -> None:
    in_loss, in_reward = draft.take(f"{_ACTOR}use_kl_loss"), draft.take("algorithm.use_kl_in_reward")
    of_loss = (
        draft.take(f"{_ACTOR}kl_loss_coef", default=0.001),
        draft.text(f"{_ACTOR}kl_loss_type", default="low_var_kl"),
    )
    of_reward = draft.take("algorithm.kl_ctrl.kl_coef", default=0.001), draft.text("algorithm.kl_penalty", default="kl")
    if in_loss and in_reward:
        draft.change("algorithm.use_kl_in_reward", "the penalty is applied once: in the loss")
    if in_loss:
        names = (f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type", f"{_ACTOR}use_kl_loss")
        _put_penalty(draft, "loss", of_loss, names)
    elif in_reward:
        names = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.use_kl_in_reward")
        _put_penalty(draft, "reward", of_reward, names)


def _put_penalty(draft: RecipeBuilder, place: str, setting: tuple[Any, str], names: tuple[str, str, str]) -> None:
    coefficient, wanted = setting
    switch = names[2:] if draft.given(names[2]) is True else ()  # one that is open is reported as a guess
    if not coefficient:
        draft.put("algorithm.kl_coefficient", 0.0, names[0], *switch)
        return
    draft.put("algorithm.kl_coefficient", coefficient, names[0])
    draft.put("algorithm.kl_in", place, names[0], *switch)
    estimator = _ESTIMATORS.get(wanted)
    if estimator is None or (place == "loss" and estimator == "k1"):
        draft.lose(names[1], "its gradient is 0 on average, or it is not supported: using k3 instead")
        estimator = "k3"
    draft.put("algorithm.kl_estimator", estimator, names[1])
    if place == "loss":
        draft.put("algorithm.kl_ratio_weight", False, names[1])


def _write_rewards(draft: RecipeBuilder) -> None:
    draft.copy("algorithm.filter_groups", "algorithm.filter_groups.enable")
    name = "algorithm.filter_groups.metric"
    if metric := draft.take(name):
        draft.change(name, _FILTERED_BY.get(str(metric), f"{metric} is not known here; {_FILTERED_HERE}"))
    _write_most_filtered(draft)
    for prefix in ("reward_model.reward_kwargs.", "reward_model.", "reward.reward_kwargs."):
        buffer = f"{prefix}overlong_buffer_cfg." if "kwargs" in prefix else f"{prefix}overlong_buffer."
        enabled, length = draft.take(f"{buffer}enable"), draft.take(f"{buffer}len")
        factor = draft.take(f"{buffer}penalty_factor")
        if enabled and length:
            draft.put("algorithm.overlong_buffer_tokens", length, f"{buffer}len", f"{buffer}enable")
            _write_overlong_factor(draft, factor, f"{buffer}penalty_factor")
        elif enabled:
            draft.ignore(f"{buffer}enable", f"there is no penalty without {buffer}len")


def _write_most_filtered(draft: RecipeBuilder) -> None:
    """Source: verl/trainer/config/algorithm.py, FilterGroupsConfig: no limit where it is not positive, its default."""
    name = "algorithm.filter_groups.max_num_gen_batches"
    most = draft.number(name, default=0)
    if most > 0:
        draft.put("async.max_filtered_batches", most, name)
    elif (filters := draft.entries.get("algorithm.filter_groups")) and filters.value is True:
        draft.put("async.max_filtered_batches", _NO_LIMIT, name)
        draft.change(name, "no limit there; here a run that learns nothing ends after async.max_filtered_batches")


def _write_overlong_factor(draft: RecipeBuilder, factor: Any, name: str) -> None:
    """math_dapo of verl gives 1 or -1 and our rewards 1 or 0: the same penalty is half as large here."""
    if is_open(factor):
        draft.change(name, f"{factor} is unknown here: using 1")
    size = float(factor) if factor and not is_open(factor) else 1.0
    if "reward.name" in draft.entries and draft.entries["reward.name"].value == "math_verify":
        size /= 2.0
        draft.change(name, "against rewards of 1 and -1 there (math_dapo), of 1 and 0 here: half of it")
    draft.put("algorithm.overlong_penalty_factor", size, name)


def _write_correction(draft: RecipeBuilder, *, bypasses: bool) -> None:
    name = "async_training.rollout_correction"
    if (preset := draft.take(name)) is not None:
        if _PRESET.fullmatch(str(preset)):
            draft.put("algorithm.correction", preset, name)
            _write_form(draft, has_weight="tis" in preset, usual=bypasses)
            return
        draft.lose(name, "algorithm.correction names a weight and a rejection, such as sequence_tis_geometric_rs")
    weight_name, reject_name = f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_rs"
    weight, rejection = draft.take(weight_name), draft.take(reject_name)
    cap_name, bound_name = f"{_CORRECTION}rollout_is_threshold", f"{_CORRECTION}rollout_rs_threshold"
    cap = _known(draft, cap_name, 2.0)
    upper, lower = _known(draft, bound_name, cap), draft.take(f"{_CORRECTION}rollout_rs_threshold_lower")
    if weight and weight not in ("token", "sequence"):
        draft.lose(weight_name, "weights of a token or a sequence are there")
        weight = None
    level, bounds = _find_rejection(draft, rejection, upper, lower) if rejection else (None, (0.0, 0.0))
    if weight and isinstance(cap, str):
        draft.put("algorithm.correction", "icepop", weight_name)
        _put_bounds(draft, _bounds(cap, None), cap_name)
        if level:
            draft.lose(reject_name, "icepop rejects by itself, and stands alone here")
    elif weight or level:
        _write_preset(draft, weight, level, cap, bounds)
    else:
        draft.put("algorithm.correction", "none", weight_name, reject_name)
    if draft.take(f"{_CORRECTION}rollout_is_batch_normalize") and weight:
        draft.put("algorithm.normalise_weights", True, f"{_CORRECTION}rollout_is_batch_normalize")
    _write_form(draft, has_weight=bool(weight), usual=bypasses)


def _known(draft: RecipeBuilder, name: str, default: Any) -> Any:
    value = draft.take(name, default=default)
    if is_open(value):
        draft.change(name, f"{value} is unknown here: using {default}")
        return default
    return value


def _find_rejection(
    draft: RecipeBuilder, wanted: Any, upper: Any, lower: Any
) -> tuple[str | None, tuple[float, float]]:
    """Return the level of the first statistic that is supported, and its bounds on r.

    Source: verl at 1dda039, verl/trainer/ppo/rollout_corr_helper.py: of several statistics all must hold, each with a
    threshold of its own or all with one. `*_k1` is -log r, and "0.6_1.6" bounds it by the logarithms: r is kept from
    1 / 1.6 to 1 / 0.6. token_k2 is log(r)² / 2, with an upper bound. The older names bound r itself.
    """
    name = f"{_CORRECTION}rollout_rs"
    statistics = [each.strip() for each in str(wanted).split(",")]
    given = [each.strip() for each in upper.split(",")] if isinstance(upper, str) else [upper]
    thresholds = given if len(given) == len(statistics) else given[:1] * len(statistics)
    chosen: tuple[str | None, tuple[float, float]] = (None, (0.0, 0.0))
    for statistic, threshold in zip(statistics, thresholds, strict=True):
        if chosen[0] or statistic not in (*_LEVELS, "token_k2"):
            draft.lose(name, f"{statistic}: one statistic of token, sequence or geometric rejects")
        elif statistic == "token_k2":
            width = math.sqrt(2.0 * _bounds(threshold, None)[1])
            chosen = "token", (math.exp(-width), math.exp(width))
        else:
            low, high = _bounds(threshold, lower)
            chosen = _LEVELS[statistic], (1.0 / high, 1.0 / low) if statistic.endswith("_k1") else (low, high)
    return chosen


def _write_preset(
    draft: RecipeBuilder, weight: str | None, level: str | None, cap: float, bounds: tuple[float, float]
) -> None:
    names = {f"{_CORRECTION}rollout_is": weight, f"{_CORRECTION}rollout_rs": level}
    parts = [f"{weight}_tis"] * bool(weight) + [f"{level}_rs"] * bool(level)
    draft.put("algorithm.correction", "_".join(parts), *(name for name, part in names.items() if part))
    if level:
        _put_bounds(draft, bounds, f"{_CORRECTION}rollout_rs_threshold")
    if weight and weight == level and cap >= bounds[1]:
        draft.change(f"{_CORRECTION}rollout_is_threshold", "never cuts: the rejection at the upper bound comes first")
    elif weight:
        draft.put("algorithm.tis_cap", cap, f"{_CORRECTION}rollout_is_threshold")


def _bounds(upper: Any, lower: Any) -> tuple[float, float]:
    """Bounds on r: "0.5_2.0", or an upper one whose inverse is the lower one where that is not given."""
    try:
        if isinstance(upper, str) and "_" in upper:
            low, _, high = upper.partition("_")
            return float(low), float(high)
        return float(lower) if lower else 1.0 / float(upper), float(upper)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{_CORRECTION}rollout_rs_threshold must be a number, or two as in 0.5_2.0: got {upper!r}, {lower!r}"
        ) from error


def _put_bounds(draft: RecipeBuilder, bounds: tuple[float, float], name: str) -> None:
    draft.put("algorithm.rs_low", bounds[0], name)
    draft.put("algorithm.rs_high", bounds[1], name)


def _write_form(draft: RecipeBuilder, *, has_weight: bool, usual: bool) -> None:
    names = [f"{_CORRECTION}bypass_mode", f"{_CORRECTION}bypass_old_logprob_for_rollout"]
    names += ["async_training.use_rollout_log_probs", f"{_ACTOR}use_rollout_log_probs"]
    bypasses = draft.take(*names, default=usual)
    computes = "async_training.compute_prox_log_prob"
    if draft.take(computes):
        bypasses = False
    if bypasses and has_weight:
        draft.change(
            draft.named(*names),
            "in the bypass form the loss's ratio is r already, so a weight has no effect or counts it twice: using the "
            "decoupled form instead",
        )
        bypasses = False
    draft.put("algorithm.correction_form", "bypass" if bypasses else "decoupled", *names, computes)


_SECTION: Final = "distillation."
_LOSS: Final = f"{_SECTION}distillation_loss."
_TEACHERS: Final = f"{_SECTION}teacher_models."


def write_teacher(draft: RecipeBuilder) -> None:
    """Write the teacher, its place and its weight in the loss; reward and advantage are already written."""
    if not draft.take(f"{_SECTION}enabled"):
        return
    paths = [name for name in draft.left if name.startswith(_TEACHERS) and name.endswith(".model_path")]
    if not paths:
        draft.lose(f"{_SECTION}enabled", "no teacher is named: set teacher.path")
        return
    draft.copy("teacher.path", paths[0], f"{_SECTION}enabled")
    for name in paths[1:]:
        draft.lose(name, "one teacher is learned from: the first")
    inference = f"{paths[0].removesuffix('model_path')}inference."
    backend = draft.take(f"{inference}name", default=draft.entries["rollout.backend"].value)
    draft.put("teacher.backend", backend if backend in ("vllm", "trtllm") else "vllm", f"{inference}name")
    draft.put("teacher.dtype", draft.take(f"{inference}dtype", default="bfloat16"), f"{inference}dtype")
    width = draft.count(f"{inference}tensor_model_parallel_size", default=2)
    draft.put("teacher.tensor_parallel", width, f"{inference}tensor_model_parallel_size")
    share_name = f"{inference}gpu_memory_utilization"
    if is_number(share := draft.take(share_name)):
        draft.put("teacher.options", {"gpu_memory_utilization": share}, share_name)
    names = (f"{_SECTION}nnodes", f"{_SECTION}n_gpus_per_node")
    devices = draft.count(names[0], default=1) * draft.count(names[1], default=8)
    draft.put("teacher.num_replicas", max(devices // width, 1), *names)
    _write_distillation(draft)


def _write_distillation(draft: RecipeBuilder) -> None:
    name, uses_rewards = f"{_LOSS}distillation_loss_coef", draft.take(f"{_LOSS}use_task_rewards", default=True)
    weight = draft.number(name, default=1.0)
    draft.put("algorithm.distillation_coefficient", float(weight) if uses_rewards else 1.0, name)
    if not uses_rewards:
        draft.put("algorithm.advantage", "none", f"{_LOSS}use_task_rewards")
        draft.drop("reward")
        draft.lost.pop("reward_model.reward_manager", None)
        if draft.entries.pop("eval.every_updates", Entry(0, "")).value:
            draft.lose("trainer.test_freq", "validation needs a reward: set reward.name and eval.every_updates")
    mode = draft.take(f"{_LOSS}loss_mode", default="k3")
    if mode not in ("k1", "kl"):
        draft.lose(f"{_LOSS}loss_mode", "KL(policy, teacher) at the sampled tokens is used instead")
