"""TRL's GRPOConfig in our words.

Source: trl at f2cd577 (2026-07), trl/trainer/grpo_config.py and base_config.py, with transformers' TrainingArguments;
names of its scripts (`model_name_or_path`, `dataset_name`) from trl/scripts/utils.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from offbeat_recipes import (
    Entry,
    RecipeBuilder,
    finish_training_arguments,
    is_number,
    write_processes,
    write_rhythm,
    write_sources,
    write_training_arguments,
)

_AGGREGATIONS: Final = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "fixed_length",
}
_OWN_LOSSES: Final = {"cispo": "cispo", "sapo": "sapo"}
_CAPS: Final = ("clip_max", "cap")
"""The newer and the older name."""
_MAX_COMPLETION: Final = 512
_MAX_PROMPT: Final = 1024
"""Ours, where nothing bounds a prompt there."""
_OF_ENGINE: Final = ("gpu_memory_utilization", "model_impl", "enforce_eager", "enable_prefix_caching")
"""Arguments of vLLM, each with vllm_ before it; the last two were fields until 2025."""
_LONGEST: Final = ("vllm_max_model_length", "vllm_max_model_len")
_DATA: Final = ("dataset_name", "dataset_id_or_path", "data_file_paths", "dataset_path")
"""TRL's own name, and those of scripts around it."""
_LEAST: Final = "vllm_importance_sampling_clip_min"
_SINCE: Final = {
    "beta": "since TRL 0.19; before, 0.04",
    "temperature": "since TRL 0.18; before, 0.9 with top_k 50",
    "max_completion_length": "since TRL 1.10; before, 256",
    "loss_type": "since TRL 0.22; before, bnpo",
    "vllm_importance_sampling_mode": "since TRL 0.26; before, token_truncate, and no correction before 0.23",
    "vllm_importance_sampling_clip_max": "since TRL 0.26; before, 2.0",
    "vllm_mode": "since TRL 1.0; before, server",
    "bf16": "since TRL 0.19; before, float32",
}
"""Defaults that have changed: a script that leaves them out may have been written for the older one.

Source: trl/trainer/grpo_config.py of the wheels of TRL 0.14 to 1.14.1.
"""


def import_trl(options: Mapping[str, Any]) -> RecipeBuilder:
    """Translate fields of GRPOConfig, and of the script that makes one."""
    draft = RecipeBuilder(options, since=_SINCE)
    _write_data(draft)
    _write_rollout(draft, options)
    write_training_arguments(draft, learning_rate=1e-6, roles=("engine", "rollout"))
    _write_objective(draft)
    _write_correction(draft)
    _write_batches(draft)
    passes = draft.entries["algorithm.num_passes"].value
    write_rhythm(draft, steps_per_update=draft.entries["async.require_batches"].value * passes)
    finish_training_arguments(draft, __package__, "trl")
    return draft


def _write_data(draft: RecipeBuilder) -> None:
    write_sources(draft, *_DATA)
    draft.copy("data.split", "dataset_train_split")
    draft.copy("data.prompt_column", "dataset_prompt_column")
    draft.copy("data.answer_column", "dataset_solution_column")
    draft.copy("data.system_prompt", "system_prompt")
    _write_prompt_length(draft)
    draft.copy("data.shuffle", "shuffle_dataset")
    draft.copy("data.template_options", "chat_template_kwargs")
    functions, weights = draft.take("reward_funcs"), draft.take("reward_weights")
    names = functions if isinstance(functions, list) else [functions] if functions else []
    if names:
        given = [float(share) for share in weights if is_number(share)] if isinstance(weights, list) else []
        if weights is not None and len(given) != len(names):
            draft.lose("reward_weights", f"{len(given)} for {len(names)} functions: those without one weigh 1")
        shares = [*given, *[1.0] * len(names)]
        draft.put("reward.weights", dict(zip(map(str, names), shares, strict=False)), "reward_funcs", "reward_weights")
        draft.put("reward.signature", "trl", "reward_funcs")
        draft.change("reward_funcs", "each is named as module:function or file.py:function")
    elif path := draft.take("reward_model_name_or_path"):
        draft.put("reward.name", "reward_model", "reward_model_name_or_path")
        draft.put("reward.reward_model.path", path, "reward_model_name_or_path")
    else:
        draft.put("reward.name", "math_verify", "reward_funcs")
        draft.lose("reward_funcs", "is given in code there; here set reward.name to your function")


def _write_prompt_length(draft: RecipeBuilder) -> None:
    """TRL has no limit of its own since 2026: what the engine's length leaves beside the completion, or our default."""
    if draft.has("max_prompt_length"):
        note = "longer prompts were truncated there; here they are left out and counted"
        draft.copy("data.max_prompt_tokens", "max_prompt_length", note=note)
        return
    room = draft.number(*_LONGEST, default=0) - draft.number("max_completion_length", default=_MAX_COMPLETION)
    names = _LONGEST if room > 0 else ()
    draft.put("data.max_prompt_tokens", room if room > 0 else _MAX_PROMPT, "max_prompt_length", *names)
    if room <= 0:
        text = f"no limit there; here prompts of more than {_MAX_PROMPT} tokens are left out and counted"
        draft.change("max_prompt_length", text)


def _write_completion_length(draft: RecipeBuilder, options: Mapping[str, Any]) -> None:
    """Null is no limit there: a completion takes what a prompt leaves of the engine's length."""
    name = "max_completion_length"
    room = draft.number(*_LONGEST, default=0) - draft.entries["data.max_prompt_tokens"].value
    is_unbounded = options.get(name, 0) is None
    usual = room if is_unbounded and room > 0 else _MAX_COMPLETION
    draft.put("rollout.max_tokens", draft.number(name, default=usual), name)
    if is_unbounded:
        draft.change(name, f"no limit there; here completions end after {usual} tokens")


def _write_rollout(draft: RecipeBuilder, options: Mapping[str, Any]) -> None:
    uses_vllm, mode = draft.take("use_vllm", default=False), draft.take("vllm_mode", default="colocate")
    draft.put("rollout.backend", "vllm" if uses_vllm else "torch", "use_vllm")
    if uses_vllm:
        draft.put("cluster.colocate", mode == "colocate", "vllm_mode")
    draft.copy("rollout.tensor_parallel", "vllm_tensor_parallel_size")
    if uses_vllm:
        found = {name: draft.take(f"vllm_{name}") for name in _OF_ENGINE}
        if options := {name: value for name, value in found.items() if value is not None}:
            draft.put("rollout.options", options, *(f"vllm_{name}" for name in options))
    draft.put("rollout.samples_per_prompt", draft.count("num_generations", default=8), "num_generations")
    _write_completion_length(draft, options)
    longest = draft.entries["data.max_prompt_tokens"].value + draft.entries["rollout.max_tokens"].value
    draft.copy("rollout.max_model_len", *_LONGEST, default=longest)
    draft.copy("rollout.temperature", "temperature", default=1.0)
    for name in ("top_p", "min_p"):
        draft.copy(f"rollout.{name}", name)
    draft.copy("rollout.top_k", "top_k", convert=lambda k: max(k, 0))
    if (sampled := draft.text("vllm_dtype", default="auto")) in ("bfloat16", "float32"):
        draft.put("rollout.dtype", sampled, "vllm_dtype")
    if turns := draft.number("max_tool_calling_iterations", default=0):
        draft.put("environment.max_turns", turns + 1, "max_tool_calling_iterations")
        draft.lose("max_tool_calling_iterations", "tools are given in code there: set environment.name")
    draft.copy("log.train_generations", "num_completions_to_print")


def _write_objective(draft: RecipeBuilder) -> None:
    wanted, level = draft.take("loss_type", default="dapo"), draft.text("importance_sampling_level", default="token")
    if isinstance(wanted, list):
        if len(wanted) > 1:
            draft.lose("loss_type", "one loss is trained with: the first")
        wanted = wanted[0] if wanted else "dapo"
    wanted = str(wanted)
    scale = draft.take("scale_rewards", default="group")
    is_plain = scale in (False, "none")
    apart = draft.take("multi_objective_aggregation") == "normalize_then_sum"
    if apart and len(draft.entries.get("reward.weights", Entry({}, "")).value) > 1:
        draft.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
    else:
        draft.put("algorithm.advantage", "dr_grpo" if is_plain else "grpo", "scale_rewards")
    if not is_plain and scale not in (True, "group"):
        draft.lose("scale_rewards", f"{scale} is not supported: using the spread within each group instead")
    loss = _OWN_LOSSES.get(wanted, "ppo_clip" if level == "token" else "gspo")
    draft.put("algorithm.loss", loss, "loss_type", "importance_sampling_level")
    draft.put("algorithm.aggregation", _AGGREGATIONS.get(wanted, "token_mean"), "loss_type")
    if wanted == "dr_grpo":
        draft.put("algorithm.fixed_length", draft.entries["rollout.max_tokens"].value, "max_completion_length")
    if wanted == "bnpo":
        draft.change("loss_type", "the mean is over all tokens of the update, not those of one device")
    if wanted not in _AGGREGATIONS:
        draft.lose("loss_type", f"{wanted} is not supported: using {loss} with the mean over tokens instead")
    _write_clip(draft, loss)
    if (bound := draft.take("off_policy_mask_threshold")) is not None:
        options = draft.entries["algorithm.options"].value if "algorithm.options" in draft.entries else {}
        draft.put("algorithm.options", {**options, "off_policy_mask": bound}, "off_policy_mask_threshold")
    draft.copy("algorithm.entropy_coefficient", "entropy_coef")
    draft.copy("algorithm.kl_coefficient", "beta", default=0.0)
    if draft.entries["algorithm.kl_coefficient"].value:
        draft.put("algorithm.kl_estimator", "k3", "beta")
        name = "use_bias_correction_kl"
        draft.copy("algorithm.kl_ratio_weight", name, default=False)
        if draft.take(name):
            draft.change(name, "the ratio is to the policy that sampled here, to that before the update there")
    draft.put("algorithm.num_passes", draft.count("num_iterations", default=1), "num_iterations")
    if draft.take("mask_truncated_completions"):
        draft.put("algorithm.mask_truncated", True, "mask_truncated_completions")
        if draft.entries["algorithm.aggregation"].value != "token_mean":
            text = "sequences that were cut off count among those that the loss divides by there, and not here"
            draft.change("mask_truncated_completions", text)


def _write_clip(draft: RecipeBuilder, loss: str) -> None:
    low, high = draft.take("epsilon", default=0.2), draft.take("epsilon_high")
    gates = draft.take("sapo_temperature_pos"), draft.take("sapo_temperature_neg")
    if loss == "sapo":
        options = {"tau_positive": gates[0] or 1.0, "tau_negative": gates[1] or 1.05}
        draft.put("algorithm.options", options, "sapo_temperature_pos", "sapo_temperature_neg")
        return
    if loss == "cispo":
        if high is not None:
            draft.put("algorithm.clip_high", high - 1.0, "epsilon_high")
            draft.change("epsilon_high", "the bound on r itself there, 1 + clip_high here")
        return
    draft.put("algorithm.clip_low", low, "epsilon")
    draft.put("algorithm.clip_high", low if high is None else high, "epsilon_high", "epsilon")
    bound = draft.take("delta")
    if bound is not None and loss == "ppo_clip":
        draft.put("algorithm.dual_clip", bound, "delta")
    elif bound is not None:
        draft.lose("delta", "bounds the ratio of a token; with ratios of sequences there is no such bound")


def _write_correction(draft: RecipeBuilder) -> None:
    switches = ("vllm_importance_sampling_correction", "use_vllm")
    is_on = draft.take(switches[0], default=True) and draft.take(switches[1])
    name = "vllm_importance_sampling_mode"
    mode, caps = draft.take(name, default="sequence_mask"), [f"vllm_importance_sampling_{end}" for end in _CAPS]
    cap, least = draft.take(*caps, default=3.0), draft.take(_LEAST)
    level, _, kind = str(mode).partition("_")
    draft.put("algorithm.correction_form", "decoupled", *switches)  # old_per_token_logps are the trainer's
    if not is_on:
        draft.put("algorithm.correction", "none", *switches)
        return
    if kind == "truncate":
        draft.put("algorithm.correction", f"{level}_tis", name)
        draft.put("algorithm.tis_cap", cap, *caps)
        if least is not None:
            draft.lose(_LEAST, "a weight is not raised to a least one: tis cuts from above only")
        return
    # A mask is a weight of r that is 0 above the cap.
    draft.put("algorithm.correction", "icepop" if level == "token" else "sequence_tis_sequence_rs", name)
    draft.put("algorithm.rs_low", least or 0.0, _LEAST if least else name)
    draft.put("algorithm.rs_high", cap, *caps)


def _write_batches(draft: RecipeBuilder) -> None:
    ranks, samples, accumulated = write_processes(draft)
    group = draft.entries["rollout.samples_per_prompt"].value
    generated = draft.number("generation_batch_size", default=0)
    steps = draft.number("steps_per_generation", default=accumulated)
    is_colocated = draft.entries.get("cluster.colocate", Entry(False, "")).value
    if is_colocated:  # each group of vllm_tensor_parallel_size processes has an engine
        width = draft.count("vllm_tensor_parallel_size", default=1)
        draft.put("rollout.num_engines", max(ranks // width, 1), "num_processes", "vllm_tensor_parallel_size")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    draft.put("async.mini_batch_size", max(samples // group, 1), *names, "per_gpu_train_batch_size")
    whole = "" if samples % group == 0 else f", and {max(samples // group, 1)} here"
    draft.change(
        names[0], f"counts completions on one device there; {samples} of a step are {samples / group:g} prompts{whole}"
    )
    together = generated // samples if generated else steps // accumulated
    draft.put("async.require_batches", max(together, 1), "steps_per_generation", "generation_batch_size")
    draft.put("async.staleness_threshold", 0, "steps_per_generation")
    draft.change(
        "steps_per_generation",
        "generation waits for training there, and so here with staleness 0; async.staleness_threshold = 0.5 lets it "
        "run ahead" + (" (without cluster.colocate)" if is_colocated else ""),
    )
