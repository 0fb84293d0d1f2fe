"""OpenRLHF's command line in our words.

Source: OpenRLHF at 3c3be62 (2026-08), openrlhf/cli/train_ppo_ray.py, openrlhf/models/loss.py and openrlhf/trainer.
"""

from collections.abc import Mapping
from typing import Any, Final

from offbeat_recipes import RecipeBuilder, is_number, read_option_table, write_betas

_ADVANTAGES: Final = {
    "group_norm": "grpo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "gae": "gae",
    "flash_reinforce": "reinforce_plus_plus",
}
_OF_BATCHES: Final = ("flash_reinforce",)
_CORRECTIONS: Final = {"tis": "token_tis", "icepop": "icepop", "seq-mask-tis": "token_tis_geometric_rs"}
_KINDS: Final = {("token", "mask"): "icepop", ("token", "clip"): "tis", ("seq", "mask"): "seq-mask-tis"}
_USUAL_BOUNDS: Final = (0.5, 5.0)
_CORRECTION: Final = "algo.advantage.is_correction_"
_USUAL_ANSWER: Final = 1024
"""Their default of generate_max_len, before 2026."""
_MOST_SAMPLES: Final = 10**8
"""Their default of data.max_samples: all."""

_OPTIONS: Final = read_option_table(__package__, "openrlhf")


def import_openrlhf(options: Mapping[str, Any]) -> RecipeBuilder:
    """Translate OpenRLHF's options, named without dashes, such as "rollout.batch_size" or, before 2026, "eps_clip"."""
    draft = _begin(options)
    _write_data(draft)
    _write_rollout(draft)
    _write_reward(draft)
    _write_trainer(draft)
    _write_batches(draft)
    _write_objective(draft)
    _write_correction(draft)
    _write_rhythm(draft)
    draft.finish(_OPTIONS)
    return draft


def names_model(options: Mapping[str, Any]) -> bool:
    """Return whether a command names the model that it trains, by the current option or the old one."""
    return bool({"actor.model_name_or_path", "pretrain"} & set(options))


def _begin(options: Mapping[str, Any]) -> RecipeBuilder:
    """Source: OpenRLHF 0.4, train_ppo_ray.py: what is kl_estimator today was a switch, use_kl_estimator_k3."""
    given = dict(options)
    if given.pop("use_kl_estimator_k3", False):
        given.setdefault("kl_estimator", "k3")
    return RecipeBuilder(*_OPTIONS.renamed(given))


def _write_data(draft: RecipeBuilder) -> None:
    draft.copy("model.path", "actor.model_name_or_path")
    draft.copy("data.path", "data.prompt_dataset")
    draft.copy("data.split", "data.prompt_split", default="train")
    draft.copy("data.prompt_column", "data.input_key", default="input")
    draft.copy("data.answer_column", "data.label_key")
    samples = draft.number("data.max_samples", default=_MOST_SAMPLES)
    if samples < _MOST_SAMPLES:
        draft.put("data.num_items", samples, "data.max_samples")
    draft.copy("data.eval_path", "eval.dataset")
    if "data.eval_path" in draft.entries:
        draft.copy("data.eval_split", "eval.split")
    draft.copy("data.epochs", "train.num_episodes", default=1)
    draft.copy(("engine.seed", "rollout.seed", "data.seed"), "train.seed", default=42)


_REWARD_MODEL: Final = "reward.model_name_or_path"


def _write_reward(draft: RecipeBuilder) -> None:
    """Source: openrlhf/cli/train_ppo_ray.py, which loads a reward model where there is no remote_url."""
    name = "reward.remote_url"
    path = str(draft.take(name, default=""))
    if draft.take(_REWARD_MODEL) and not path:
        _write_reward_model(draft)
        return
    if path and draft.has(_REWARD_MODEL):
        draft.ignore(_REWARD_MODEL, f"not read there beside {name}")
    if path.endswith(".py"):
        draft.put("reward.name", f"{path}:reward_func", name)
        draft.put("reward.signature", "openrlhf", name)
        return
    draft.put("reward.name", "math_verify", name)
    draft.lose(name, "rewards come from a model, a server or an agent there; here set reward.name to your function")


def _write_reward_model(draft: RecipeBuilder) -> None:
    draft.put("reward.name", "reward_model", _REWARD_MODEL)
    note = "it reads the policy's tokens there, messages by default here: reward.reward_model.input"
    draft.copy("reward.reward_model.path", _REWARD_MODEL, note=note)
    is_half = draft.take("ds.param_dtype", default="bf16") == "bf16"
    draft.put("reward.reward_model.dtype", "bfloat16" if is_half else "float32", "ds.param_dtype")
    draft.put("reward.reward_model.max_tokens", draft.entries["rollout.max_model_len"].value, "data.max_len")


def _write_rollout(draft: RecipeBuilder) -> None:
    draft.put("rollout.backend", "vllm", "vllm.num_engines")
    draft.copy("rollout.num_engines", "vllm.num_engines", default=1)
    draft.copy("rollout.tensor_parallel", "vllm.tensor_parallel_size", default=1)
    draft.put("rollout.dtype", "bfloat16", "ds.param_dtype")
    samples = draft.count("rollout.n_samples_per_prompt", default=1)
    draft.put("rollout.samples_per_prompt", samples, "rollout.n_samples_per_prompt")
    draft.copy("rollout.temperature", "rollout.temperature", default=1.0)
    draft.copy("rollout.top_p", "rollout.top_p", default=1.0)
    _write_lengths(draft)
    options = {"gpu_memory_utilization": draft.take("vllm.gpu_memory_utilization", default=0.95)}
    switches = [name for name in ("enforce_eager", "enable_prefix_caching") if draft.take(f"vllm.{name}")]
    options |= dict.fromkeys(switches, True)
    draft.put("rollout.options", options, "vllm.gpu_memory_utilization", *(f"vllm.{name}" for name in switches))


def _write_lengths(draft: RecipeBuilder) -> None:
    """Write lengths; until 2026 a prompt and its completion each had one, and now they share one."""
    prompt, answer = (draft.number(name, default=0) for name in ("data.prompt_max_len", "rollout.max_new_tokens"))
    longest = draft.count("data.max_len", default=2048)
    if prompt:
        answer = answer or _USUAL_ANSWER
        longest = prompt + answer
    elif not answer:
        answer = longest // 2
        draft.change("data.max_len", "a completion gets what its prompt leaves there; here each gets half")
    draft.put("rollout.max_model_len", longest, "data.max_len", "data.prompt_max_len", "rollout.max_new_tokens")
    draft.put("rollout.max_tokens", answer, "rollout.max_new_tokens", "data.max_len")
    draft.put("data.max_prompt_tokens", prompt or max(longest - answer, 1), "data.prompt_max_len", "data.max_len")


def _write_trainer(draft: RecipeBuilder) -> None:
    names = ("actor.num_nodes", "actor.num_gpus_per_node")
    draft.put("engine.num_ranks", draft.count(names[0], default=1) * draft.count(names[1], default=8), *names)
    half = draft.take("ds.param_dtype", default="bf16")
    draft.take("ds.bf16")
    draft.put("engine.dtype", "bfloat16" if half == "bf16" else "float32", "ds.param_dtype", "ds.bf16")
    if (optimizer := draft.take("actor.optim", default="adam")) != "adam":
        draft.lose("actor.optim", f"{optimizer} is not supported: using AdamW instead")
    draft.copy("engine.learning_rate", "actor.adam.lr", default=1e-6)
    kind = str(draft.take("actor.lr_scheduler", default="cosine_with_min_lr"))
    schedule = next((each for each in ("cosine", "linear", "constant") if kind.startswith(each)), "constant")
    draft.put("engine.schedule", schedule, "actor.lr_scheduler")
    least = draft.number("actor.min_lr_ratio", default=0.1)
    if kind == "cosine_with_min_lr":
        draft.put("engine.min_learning_rate_ratio", least, "actor.min_lr_ratio")
    if (steps := draft.number("lr_warmup_steps", default=0)) > 0:
        draft.put("engine.warmup_steps", int(steps), "lr_warmup_steps")
    elif draft.number("actor.lr_warmup_ratio", default=0.03):
        draft.lose("actor.lr_warmup_ratio", "a share of all steps, 0.03 if not given: give engine.warmup_steps")
    write_betas(draft, "actor.adam.betas", (0.9, 0.95))
    draft.copy("engine.weight_decay", "actor.adam.weight_decay", default=0.0)
    draft.copy("engine.max_grad_norm", "actor.max_norm", default=1.0)
    draft.copy("engine.max_tokens_per_microbatch", "train.max_tokens_per_gpu", default=16192)
    draft.copy("engine.activation_checkpointing", "actor.gradient_checkpointing_enable", default=False)
    rank, alpha = draft.number("ds.lora.rank", default=0), draft.number("ds.lora.alpha", default=16)
    if rank:
        draft.put("engine.lora_rank", rank, "ds.lora.rank")
        draft.put("engine.lora_alpha", float(alpha), "ds.lora.alpha")


def _write_batches(draft: RecipeBuilder) -> None:
    """Write batch sizes; in OpenRLHF a train batch counts completions, and a rollout batch prompts."""
    group = draft.entries["rollout.samples_per_prompt"].value
    samples, prompts = draft.count("train.batch_size", default=128), draft.count("rollout.batch_size", default=1024)
    step = max(samples // group, 1)
    draft.put("async.mini_batch_size", step, "train.batch_size", "rollout.n_samples_per_prompt")
    draft.change("train.batch_size", f"counts completions there: {step} prompts")
    draft.put("async.require_batches", max(prompts // step, 1), "rollout.batch_size")
    passes = draft.count("train.max_epochs", default=1)
    draft.put("algorithm.num_passes", passes, "train.max_epochs")
    if passes > 1:
        draft.change("train.max_epochs", "shuffled anew in each pass there; here mini batches keep their order")
    is_async, size = draft.take("train.async_enable"), draft.number("train.async_queue_size", default=1)
    draft.put("async.staleness_threshold", size if is_async else 0, "train.async_queue_size", "train.async_enable")
    if draft.take("train.partial_rollout_enable"):
        draft.put("async.partial_rollout", bool(is_async and size), "train.partial_rollout_enable")
    if draft.take("train.colocate_all") and not is_async:  # with async, only the models of the trainer share devices
        draft.put("cluster.colocate", True, "train.colocate_all")
    draft.put("cluster.launcher", "ray", "actor.num_nodes")


def _write_objective(draft: RecipeBuilder) -> None:
    name = "algo.advantage.estimator"
    wanted = draft.text(name, default="gae")
    draft.put("algorithm.advantage", _ADVANTAGES.get(wanted, "grpo"), name)
    if wanted in _OF_BATCHES:
        draft.lose(
            name,
            "only the mean over the batch is subtracted there; here it is also divided by the standard deviation",
        )
    elif wanted not in _ADVANTAGES:
        draft.lose(name, f"{wanted} is not supported: using grpo instead")
    if wanted in ("gae", "reinforce"):
        draft.copy("algorithm.gamma", "algo.advantage.gamma", default=1.0)
    if wanted == "gae":
        _write_critic(draft)
    if draft.take("algo.advantage.no_std_norm"):
        _write_no_spread(draft, wanted)
    loss = "gspo" if draft.take("actor.policy_loss_type", default="ppo") == "gspo" else "ppo_clip"
    draft.put("algorithm.loss", loss, "actor.policy_loss_type")
    by_sequence = loss == "gspo" or draft.text("actor.loss_agg_mode", default="token-mean") != "token-mean"
    names = ("actor.loss_agg_mode", "actor.policy_loss_type")
    draft.put("algorithm.aggregation", "sequence_mean" if by_sequence else "token_mean", *names)
    both = draft.number("actor.eps_clip", default=0.2)
    sides = draft.take("actor.eps_clip_low_high", default=[both, both])
    if not isinstance(sides, list) or len(sides) != 2 or not all(map(is_number, sides)):
        draft.lose("actor.eps_clip_low_high", f"two numbers were required: using {both} for both")
        sides = [both, both]
    for side, value in zip(("low", "high"), sides, strict=True):
        draft.put(f"algorithm.clip_{side}", value, "actor.eps_clip_low_high", "actor.eps_clip")
    if loss == "ppo_clip":
        draft.copy("algorithm.dual_clip", "actor.dual_clip")
    draft.copy("algorithm.entropy_coefficient", "actor.entropy_coef")
    weight, in_loss = draft.number("algo.kl.init_coef", default=0.01), draft.take("algo.kl.use_loss")
    estimator = draft.text("algo.kl.estimator", default="k1")
    draft.put("algorithm.kl_coefficient", weight, "algo.kl.init_coef")
    if weight:
        draft.put("algorithm.kl_in", "loss" if in_loss else "reward", "algo.kl.use_loss")
        draft.put("algorithm.kl_estimator", "k3" if in_loss and estimator == "k1" else estimator, "algo.kl.estimator")
        if in_loss:
            draft.copy("algorithm.kl_ratio_weight", "algo.kl.unbiased_gradient", default=False)
        if in_loss and estimator == "k1":
            draft.change("algo.kl.estimator", "the gradient of k1 in the loss is 0 on average: using k3 instead")
    draft.copy("algorithm.filter_groups", "algo.dynamic_filtering_enable")
    length = draft.number("reward.overlong_buffer_len", default=0)
    factor = draft.number("reward.overlong_penalty_factor", default=1)
    if length:
        draft.put("algorithm.overlong_buffer_tokens", int(length), "reward.overlong_buffer_len")
        draft.put("algorithm.overlong_penalty_factor", float(factor), "reward.overlong_penalty_factor")


def _write_no_spread(draft: RecipeBuilder, wanted: str) -> None:
    """Advantages that are not divided by their spread over the batch; their mean over it is still subtracted.

    Source: openrlhf/trainer/ppo_utils/experience_maker.py, compute_advantages_and_returns.
    """
    name = "algo.advantage.no_std_norm"
    if wanted == "reinforce_baseline":
        draft.put("algorithm.advantage", "dr_grpo", name)
    elif wanted == "gae":
        draft.put("algorithm.options", {"normalise": False}, name)
    elif wanted == "reinforce":
        draft.lose(name, "reinforce_plus_plus is always divided by its spread over the batch")
        return
    else:
        draft.ignore(name, f"it has no effect there with {wanted}")
        return
    draft.change(name, "the mean over the batch is still subtracted there, but not here")


def _write_critic(draft: RecipeBuilder) -> None:
    draft.copy("algorithm.gae_lambda", "algo.advantage.lambd", default=1.0)
    name = "critic.model_name_or_path"
    draft.copy("critic.path", name)
    if not draft.has(name) and "reward.reward_model.path" in draft.entries:
        draft.copy("critic.path", _REWARD_MODEL)
    draft.copy("critic.learning_rate", "critic.adam.lr", default=9e-6)
    draft.copy("critic.clip", "critic.value_clip", default=0.5)
    draft.put(
        "critic.warmup_updates", max(draft.number("critic.freezing_steps", default=-1), 0), "critic.freezing_steps"
    )


def _write_correction(draft: RecipeBuilder) -> None:
    """Source: openrlhf/models/loss.py, PolicyLoss; all of them bound r = trainer's / rollout's probability.

    Up to 0.11.1 a switch and a type say what is done; since then a level, "off" by default, and a mode.
    """
    names = [f"{_CORRECTION}{end}" for end in ("enable", "type", "level", "mode", "threshold")]
    is_on, kind, level, mode = (draft.take(name) for name in names[:4])
    if level is not None:
        is_on, kind = level != "off", _KINDS.get((level, mode or "mask"), "tis")
    elif kind is None:
        kind = "tis"
    low, high = _bounds(draft, names[-1])
    bypasses = bool(is_on) and draft.entries["algorithm.loss"].value == "gspo"
    form = "bypass" if bypasses else "decoupled"
    draft.put("algorithm.correction_form", form, names[2], names[0], "actor.policy_loss_type")
    gate = f"{_CORRECTION}gating"
    if is_on and not bypasses and draft.take(gate, default="ratio") != "ratio":
        draft.lose(gate, "a ratio rejects here, not a divergence: algorithm.correction is chosen by its default")
        return
    if not is_on or bypasses:
        draft.put("algorithm.correction", "none", names[2], names[0])
        return
    draft.put("algorithm.correction", _CORRECTIONS.get(kind, "token_tis"), names[2], names[3], names[1])
    if kind == "tis":
        draft.put("algorithm.tis_cap", high, names[-1])
        if low:
            draft.change(names[-1], "weights are raised to the lower bound there; tis cuts from above only")
        return
    draft.put("algorithm.rs_low", low, names[-1])
    draft.put("algorithm.rs_high", high, names[-1])
    if kind == "seq-mask-tis":
        draft.change(
            draft.named(names[2], names[1]),
            "weights of what is kept are not cut there; here algorithm.tis_cap is 2",
        )


def _bounds(draft: RecipeBuilder, name: str) -> tuple[float, float]:
    """Bounds on r: two numbers, or an upper one alone."""
    given = draft.take(name, default=list(_USUAL_BOUNDS))
    found = given if isinstance(given, list) else [given]
    if not 1 <= len(found) <= 2 or not all(map(is_number, found)):
        draft.lose(name, f"one number or two were required: using {_USUAL_BOUNDS[0]} and {_USUAL_BOUNDS[1]}")
        found = list(_USUAL_BOUNDS)
    return (float(found[0]) if len(found) > 1 else 0.0), float(found[-1])


def _write_rhythm(draft: RecipeBuilder) -> None:
    every = draft.number("eval.steps", default=-1)
    if "data.eval_path" in draft.entries:
        draft.put("eval.every_updates", max(every, 0), "eval.steps")
        draft.copy("eval.temperature", "eval.temperature", default=0.6)
    draft.put("checkpoint.every", max(draft.number("ckpt.save_steps", default=-1), 0), "ckpt.save_steps")
    draft.copy("checkpoint.keep", "ckpt.max_num", default=3)
    if draft.take("logger.tensorboard_dir"):
        draft.put("log.tensorboard", True, "logger.tensorboard_dir")
    if draft.take("logger.wandb.key"):
        draft.put("log.trackers", ["wandb"], "logger.wandb.key")
        draft.copy("log.project", "logger.wandb.project")
