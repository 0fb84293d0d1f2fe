"""prime-rl's TOML in our words.

Source: PrimeIntellect-ai/prime-rl 559b44772 (2026-08-21), packages/prime-rl-configs/src/prime_rl/configs (rl.py,
orchestrator.py, trainer.py, inference.py, algorithm.py) and src/prime_rl/trainer/rl/loss.py; of versions 0.2 to 0.5
src/prime_rl/orchestrator/config.py, trainer/config.py and inference/config.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from grpo_async_app._imports.prime_rl_sources import write_eval_sets, write_sources
from offbeat_recipes import RecipeBuilder, read_option_table

_SCHEDULES: Final = ("constant", "linear", "cosine")
_PLAIN_MEAN: Final = ("grpo",)
"""Algorithms whose advantage is the reward less the mean of its group, as dr_grpo's is here."""
_OPTIONS: Final = read_option_table(__package__, "prime_rl")
_SAMPLING: Final = "orchestrator.train.sampling."
_VLLM: Final = "inference.vllm."
_NEARLY_NONE: Final = 0.001
"""prime-rl calls a share of 0 too hard and one of 1 too easy; here both bounds are exclusive."""
_WANDB: Final = tuple(f"{part}monitors.wandb." for part in ("", "orchestrator.", "trainer."))
_BUFFER: Final = "orchestrator.buffer."
_LOSS: Final = "trainer.loss."
_RATIO_BOUNDS: Final = tuple(f"{_LOSS}{kind}_" for kind in ("token_mask", "geo_mask", "sequence"))
_KL_TO_SAMPLER: Final = 0.001
"""Their default of kl_tau, since 0.5."""
_RENDERER: Final = "orchestrator.renderer."
_TEMPLATES: Final = (f"{_SAMPLING}extra_body.chat_template_kwargs.", f"{_VLLM}default_chat_template_kwargs.")
_OF_TEMPLATES: Final = ("enable_thinking", "thinking", "reasoning_effort")
"""Options of a renderer that the chat templates of models have as variables; a template takes no notice of others."""
_MODE: Final = "orchestrator.training_mode"
"""Name of the option in a part of 2026; use_sft_loss came before it, orchestrator.algo.type after."""


def import_prime_rl(options: Mapping[str, Any]) -> RecipeBuilder:
    """Translate the TOML of prime-rl's `rl` command; arrays of tables are lists of mappings."""
    draft = RecipeBuilder(*_OPTIONS.renamed({name: value for each in options.items() for name, value in _flat(*each)}))
    _write_model(draft)
    write_sources(draft)
    _write_sampling(draft)
    _write_lengths(draft)
    _write_engines(draft)
    _write_trainer(draft)
    _write_adapters(draft)
    _write_objective(draft)
    _write_buffer(draft)
    _write_filters(draft)
    _write_batches(draft)
    _write_rhythm(draft)
    draft.finish(_OPTIONS)
    return draft


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Name the entries of a list of tables by their number; prime-rl writes null as "None"."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for inner, held in value.items():
            yield from _flat(f"{name}.{inner}", held)
    else:
        yield name, None if value == "None" else value


def _write_model(draft: RecipeBuilder) -> None:
    names = ("model.name", "trainer.model.name", "orchestrator.model.name")
    draft.copy("model.path", *names, default="Qwen/Qwen3-0.6B")
    of_models = ("trainer.model", "orchestrator.model", "inference.vllm")
    owners = (*of_models, "tokenizer", "trainer.tokenizer", "orchestrator.tokenizer")
    draft.copy("model.trust_remote_code", *(f"{owner}.trust_remote_code" for owner in owners))
    found = {name: name.rpartition(".")[2] for name in draft.left if name.startswith(_TEMPLATES)}
    found |= {f"{_RENDERER}{key}": key for key in _OF_TEMPLATES if draft.has(f"{_RENDERER}{key}")}
    template = {key: draft.take(name) for name, key in found.items()}
    draft.take(f"{_RENDERER}name")  # the way of one family to fill in its template; here the template itself does it
    if template:
        draft.put("data.template_options", template, *found)


def _write_sampling(draft: RecipeBuilder) -> None:
    draft.put("rollout.backend", "vllm", "inference.vllm.model")
    group = draft.count("orchestrator.group_size", default=1)
    draft.put("rollout.samples_per_prompt", group, "orchestrator.group_size")
    draft.copy("rollout.temperature", f"{_SAMPLING}temperature", default=1.0)
    for name in ("top_p", "min_p"):
        draft.copy(f"rollout.{name}", f"{_SAMPLING}{name}")
    draft.copy("rollout.top_k", f"{_SAMPLING}top_k", convert=lambda k: max(k, 0))
    draft.copy("data.seed", "orchestrator.seed", f"{_BUFFER}seed")
    draft.copy("rollout.seed", f"{_SAMPLING}seed", "inference.vllm.seed")


def _write_lengths(draft: RecipeBuilder) -> None:
    lengths = ("orchestrator.seq_len", "seq_len", "trainer.model.seq_len")
    longest = draft.count(*lengths, default=2048)
    widest = draft.number(f"{_VLLM}max_model_len", default=longest)
    draft.put("rollout.max_model_len", max(widest, longest), f"{_VLLM}max_model_len", *lengths)
    limit = draft.count(f"{_SAMPLING}max_completion_tokens", default=longest)
    draft.put("rollout.max_tokens", min(limit, longest // 2), f"{_SAMPLING}max_completion_tokens")
    draft.put("environment.max_tokens", longest // 2, *lengths)
    draft.put("data.max_prompt_tokens", longest - longest // 2, *lengths)
    draft.change(
        draft.named(*lengths),
        "limits prompt and turns together and truncates there; here each gets half, and longer ones are left out",
    )


def _write_engines(draft: RecipeBuilder) -> None:
    width = draft.count(f"{_VLLM}tensor_parallel_size", default=1)
    draft.put("rollout.tensor_parallel", width, f"{_VLLM}tensor_parallel_size")
    replicas = draft.number(f"{_VLLM}data_parallel_size", default=0)
    each = draft.number("deployment.gpus_per_node", default=8)
    for key, kind, share in (("engine.num_ranks", "train", 1), ("rollout.num_engines", "infer", width)):
        names = [f"deployment.num_{kind}_gpus", f"deployment.num_{kind}_nodes"]
        devices = draft.number(names[0], default=0) or each * draft.number(names[1], default=0)
        if kind == "infer":
            devices *= draft.number("deployment.num_infer_replicas", default=1)
        listed = f"{'trainer' if kind == 'train' else 'inference'}_gpu_ids"
        given = draft.take(listed)
        devices = devices or (len(given) if isinstance(given, list) else 0)
        number = devices // share or (replicas if kind == "infer" else 0)
        names += ["deployment.gpus_per_node", listed]
        if kind == "infer":
            names += ["deployment.num_infer_replicas", f"{_VLLM}data_parallel_size", f"{_VLLM}tensor_parallel_size"]
        draft.put(key, max(number, 1), *names)
    quantization = draft.take(f"{_VLLM}quantization")
    if quantization == "fp8":
        draft.put("rollout.weight_format", "fp8", f"{_VLLM}quantization")
    elif quantization:
        draft.lose(f"{_VLLM}quantization", "engines sample from rollout.dtype, or from fp8 with rollout.weight_format")
    draft.take(f"{_VLLM}enable_return_routed_experts")
    if draft.take("trainer.enable_router_replay"):
        draft.put("rollout.replay_routes", "auto", "trainer.enable_router_replay")
    options: dict[str, Any] = {"gpu_memory_utilization": draft.take(f"{_VLLM}gpu_memory_utilization", default=0.9)}
    sources = [f"{_VLLM}gpu_memory_utilization"]
    for name in [each for each in draft.left if each.startswith(_VLLM) and _OPTIONS.row(each) == _HANDED_ON]:
        if (value := draft.take(name)) is not None:
            *outer, last = name.removeprefix(_VLLM).split(".")
            inner = options
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[last] = value
            sources.append(name)
    draft.put("rollout.options", options, *sources)


_HANDED_ON: Final = _OPTIONS.rows[f"{_VLLM}*"]


def _write_trainer(draft: RecipeBuilder) -> None:
    draft.take("trainer.model.dtype")
    draft.put("engine.dtype", "bfloat16", "trainer.model.dtype")
    sampled = draft.text("inference.vllm.dtype", default="auto")
    draft.put("rollout.dtype", "float32" if sampled == "float32" else "bfloat16", "inference.vllm.dtype")
    kind = draft.take("trainer.optim.type", default="adamw")
    if kind != "adamw":
        draft.lose("trainer.optim.type", f"{kind} is not supported: using AdamW instead")
    rate = draft.number("trainer.optim.lr", "orchestrator.optim.lr", default=1e-6)
    draft.put("engine.learning_rate", rate, "trainer.optim.lr", "orchestrator.optim.lr")
    draft.copy("engine.weight_decay", "trainer.optim.weight_decay", default=0.01)
    draft.copy("engine.adam_beta1", "trainer.optim.betas1", default=0.9)
    draft.copy("engine.adam_beta2", "trainer.optim.betas2", default=0.999)
    draft.copy("engine.max_grad_norm", "trainer.optim.max_norm", default=1.0)
    kind = draft.text("trainer.scheduler.type", default="constant")
    draft.put("engine.schedule", kind if kind in _SCHEDULES else "constant", "trainer.scheduler.type")
    if kind != "constant":
        draft.copy("engine.warmup_steps", "trainer.scheduler.warmup_steps", default=10)
        least = draft.number("trainer.scheduler.min_lr", default=0.0)
        draft.put("engine.min_learning_rate_ratio", least / rate if rate else 0.0, "trainer.scheduler.min_lr")
    if kind == "linear":
        draft.lose("trainer.scheduler.decay_steps", "the rate decays from the end of the warm-up to the end of the run")
        draft.take("trainer.scheduler.decay_steps")
    checkpointed = [name for name in draft.left if name.startswith("trainer.model.ac.") or name == "trainer.model.ac"]
    draft.take(*checkpointed)
    draft.put("engine.activation_checkpointing", True, "trainer.model.ac", *checkpointed)


def _write_adapters(draft: RecipeBuilder) -> None:
    if any(name.startswith("trainer.model.lora.") for name in draft.left):
        rank = draft.count("trainer.model.lora.rank", default=16)
        alpha = float(draft.number("trainer.model.lora.alpha", default=32.0))
        draft.put("engine.lora_rank", rank, "trainer.model.lora.rank")
        if draft.take("trainer.model.lora.use_rslora"):
            alpha *= math.sqrt(rank)
            note = "adapters are scaled by alpha / sqrt(rank) there: engine.lora_alpha is raised to match"
            draft.change("trainer.model.lora.use_rslora", note)
        draft.put("engine.lora_alpha", alpha, "trainer.model.lora.alpha", "trainer.model.lora.use_rslora")
    axes = {
        "trainer.model.cp": "context_parallel",
        "trainer.model.ep": "expert_parallel",
        "trainer.model.tp": "tensor_parallel",
    }
    found = {ours: draft.take(theirs) for theirs, ours in axes.items()}
    if widths := {ours: size for ours, size in found.items() if isinstance(size, int) and size > 1}:  # or "auto"
        if "expert_parallel" in widths:
            draft.put("engine.backend", "megatron", "trainer.model.ep")
        draft.put("engine.options", widths, *axes)


def _write_objective(draft: RecipeBuilder) -> None:
    mode = draft.take(_MODE) if draft.given(_MODE) in ("opd", "sft") else ""
    kind = draft.text("orchestrator.algo.type", default="opd" if mode == "opd" else "grpo")
    draft.put("algorithm.advantage", "dr_grpo", "orchestrator.algo.type")
    if mode == "sft" or draft.take("orchestrator.use_sft_loss"):
        draft.lose(
            draft.named(_MODE, "orchestrator.use_sft_loss"),
            "the policy learns a teacher's answers there: sample them first, and train on them with sft-app",
        )
    if kind == "opd":
        _write_teacher(draft)
    elif kind not in _PLAIN_MEAN:
        draft.lose("orchestrator.algo.type", f"{kind} is not supported: using reward less mean of the group instead")
    _write_loss(draft)


def _write_loss(draft: RecipeBuilder) -> None:
    """Source: prime-rl 0.2 to 559b447, src/prime_rl/trainer/rl/loss.py.

    Up to 0.4 tokens were left out by bounds on their ratio (token_mask_*, geo_mask_*, sequence_*), in 0.5 by bounds on
    the difference of probabilities on both sides (ipo_mask_*), and since then on the side to which the advantage pushes
    (dppo_mask_*), or with type = "ipo" on both.
    """
    name = f"{_LOSS}type"
    kind = draft.text(name, default="default")
    by_ratio = any(each.startswith(_RATIO_BOUNDS) for each in draft.left) or kind not in ("default", "ipo")
    by_ratio = by_ratio or draft.has(f"{_LOSS}ratio_type")
    values = {"loss": "dppo_tv", "correction": "none", "correction_form": "bypass", "aggregation": "token_mean"}
    for key, value in (values | ({"loss": "ppo_clip"} if by_ratio else {})).items():
        draft.put(f"algorithm.{key}", value, name, f"{_LOSS}ratio_type")
    if draft.take(f"{_LOSS}ratio_type") == "sequence":
        draft.lose(f"{_LOSS}ratio_type", 'ratios are of tokens; algorithm.loss = "gspo" has one of a sequence')
    if kind not in ("default", "ipo", "custom"):
        draft.lose(name, f"{kind} is not known here: using ppo_clip, and docs/losses.md has others")
    elif by_ratio:
        draft.lose(name, "tokens whose ratio is beyond a bound are left out there; here their ratio is clipped")
    else:
        _write_bounds(draft, kind)
    if tau := draft.number(f"{_LOSS}kl_tau", default=_KL_TO_SAMPLER):
        usual = "" if draft.has(f"{_LOSS}kl_tau") else ", its default since 0.5"
        text = (
            f"a penalty of {tau:g}{usual} on the distance to the policy that sampled; algorithm.kl_coefficient is on "
        )
        draft.lose(f"{_LOSS}kl_tau", f"{text}that to the first policy")


def _write_bounds(draft: RecipeBuilder, kind: str) -> None:
    for side in ("low", "high"):
        names = (f"{_LOSS}ipo_threshold",) if kind == "ipo" else (f"{_LOSS}dppo_mask_{side}", f"{_LOSS}ipo_mask_{side}")
        draft.put(f"algorithm.clip_{side}", draft.number(*names, default=0.1 if kind == "ipo" else 0.2), *names)
    if kind == "ipo" or draft.has(f"{_LOSS}ipo_mask_low") or draft.has(f"{_LOSS}ipo_mask_high"):
        text = (
            "tokens beyond the bounds are left out on both sides there; here on the side to which the advantage pushes"
        )
        draft.lose(f"{_LOSS}type", text)


def _write_teacher(draft: RecipeBuilder) -> None:
    name = "orchestrator.algo.teacher.name"
    draft.copy("teacher.path", name)
    if "teacher.path" not in draft.entries:
        draft.lose(draft.named("orchestrator.algo.type", _MODE), "no teacher is named: set teacher.path")
        return
    draft.put("teacher.backend", "vllm", name)
    draft.put("algorithm.advantage", "none", "orchestrator.algo.type", _MODE)
    draft.put("algorithm.distillation_coefficient", 1.0, "orchestrator.algo.type", _MODE)


def _write_buffer(draft: RecipeBuilder) -> None:
    """Source: prime-rl 0.4, orchestrator/config.py (BufferConfig) and buffer.py."""
    draft.copy("algorithm.filter_groups", f"{_BUFFER}online_difficulty_filtering")
    for key, name, bound in (
        ("low", f"{_BUFFER}hard_threshold", lambda share: max(share, _NEARLY_NONE)),
        ("high", f"{_BUFFER}easy_threshold", lambda share: min(share, 1.0 - _NEARLY_NONE)),
    ):
        note = "never drawn again there; here drawn curriculum.outside_weight times as often as others"
        draft.copy(f"curriculum.{key}", name, convert=bound, note=note)


def _write_filters(draft: RecipeBuilder) -> None:
    """Source: prime-rl 0.6 to 0.8, configs/orchestrator.py: zero_advantage is the one that enforces by default."""
    for prefix in ("orchestrator.pre_batch_filters.", "orchestrator.post_batch_filters.", "orchestrator.filters."):
        names = [name for name in draft.left if name.startswith(prefix)]
        for number in sorted({name.removeprefix(prefix).partition(".")[0] for name in names}):
            _write_filter(draft, f"{prefix}{number}.")


def _write_filter(draft: RecipeBuilder, prefix: str) -> None:
    name, switch = f"{prefix}type", f"{prefix}enforce"
    kind = draft.take(name)
    is_on = draft.take(switch, default=kind == "zero_advantage")
    for each in [other for other in draft.left if other.startswith(prefix)]:
        draft.ignore(each, f"belongs to {name}")
        draft.take(each)
    if kind == "zero_advantage" and prefix.startswith("orchestrator.pre_"):
        draft.put("algorithm.filter_groups", bool(is_on), name, switch)
    elif kind == "zero_advantage":
        draft.ignore(name, "a token with zero advantage has no gradient")
    elif is_on:
        draft.lose(draft.named(name, switch), "what it finds is left out there, but trained on here")
    else:
        draft.ignore(draft.named(name, switch), "what it finds is only counted there")


def _write_batches(draft: RecipeBuilder) -> None:
    group = draft.entries["rollout.samples_per_prompt"].value
    samples = draft.count("orchestrator.batch_size", default=128)
    draft.put("async.mini_batch_size", max(samples // group, 1), "orchestrator.batch_size", "orchestrator.group_size")
    if group > 1:
        draft.change("orchestrator.batch_size", f"counts samples there; {samples} are {samples / group:g} prompts")
    name = "orchestrator.max_off_policy_steps"
    levels = ("orchestrator.max_async_level", "max_async_level", "trainer.max_async_level")
    flying = draft.number("orchestrator.max_inflight_episodes", "orchestrator.concurrency.max_inflight", default=0)
    if flying >= group:
        names = ("orchestrator.max_inflight_episodes", "orchestrator.concurrency.max_inflight")
        draft.put("async.max_in_flight", int(flying // group), *names)
    level = float(draft.number(*levels, default=1))
    draft.put("async.staleness_threshold", level, *levels, name)
    draft.put("async.partial_rollout", level > 0, *levels, name)
    draft.put("async.max_version_lag", draft.number(name, default=8), name)
    draft.put("async.on_exceed", "drop", name)
    draft.change(
        name, "samples beyond it are dropped, as there; async.staleness_threshold limits how many are in flight"
    )


def _write_rhythm(draft: RecipeBuilder) -> None:
    steps = draft.number("max_steps", "trainer.max_steps", "orchestrator.max_steps", default=0)
    draft.put("engine.max_updates", steps, "max_steps", "trainer.max_steps", "orchestrator.max_steps")
    draft.put("data.epochs", 0, "max_steps")
    write_eval_sets(draft)
    intervals = ("ckpt.interval", "trainer.ckpt.interval")
    draft.put("checkpoint.every", draft.number(*intervals, default=0), *intervals)
    draft.copy("checkpoint.keep", "ckpt.keep_last", "trainer.ckpt.keep_last")
    only_weights = ("trainer.ckpt.skip_optimizer", "trainer.ckpt.weights_only", "ckpt.weights_only")
    draft.copy("checkpoint.save_optimizer", *only_weights, convert=lambda alone: not alone)
    if any(name.startswith(_WANDB) for name in draft.left):
        projects = [f"{prefix}project" for prefix in _WANDB]
        draft.put("log.trackers", ["wandb"], *projects)
        draft.copy("log.project", *projects, default="prime-rl")
