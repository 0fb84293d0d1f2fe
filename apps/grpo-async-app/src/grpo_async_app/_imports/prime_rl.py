"""prime-rl's TOML in our words.

Source: PrimeIntellect-ai/prime-rl 559b44772 (2026-08-21), packages/prime-rl-configs/src/prime_rl/configs (rl.py,
orchestrator.py, trainer.py, inference.py, algorithm.py) and src/prime_rl/trainer/rl/loss.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from offbeat_recipes import Draft

_SOURCES: Final = "orchestrator.train.source"
_SCHEDULES: Final = ("constant", "linear", "cosine")
_PLAIN_MEAN: Final = ("grpo",)
"""Algorithms whose advantage is the reward less the mean of its group, as dr_grpo's is here."""

ALWAYS: Final[Mapping[str, str]] = {
    "inference inference.server*": "engines are started by the run",
    "inference.deployment*": "the plan places the engines",
    "deployment.type": "the plan places the ranks",
    "weight_broadcast* *.weight_broadcast*": "chosen by where trainer and engines are",
    "*rollout_transport*": "there is one",
    "*log.*": "each process has a log in the run folder",
    "orchestrator.train.filter_zero_advantages": "a token without advantage has no gradient",
    "orchestrator.concurrency*": "as many samples as async.staleness_threshold lets, rollout.max_running at a time",
    "trainer.dist_timeout_seconds": "who waits for whom is known after liveness.stall_after_s",
    "trainer.model.reduce_dtype": "gradients are reduced in float32",
    "trainer.model.optimization_dtype": "the optimizer holds float32 weights",
    "trainer.model.reshard_after_forward": "weights are always given back after a layer",
    "trainer.model.fused_lm_head_token_chunk_size": "the head works in chunks of what fits",
}
MISSING: Final[Mapping[str, str]] = {
    "output_dir run.*": "name the run folder: --out FOLDER",
    "resume*": "grpo-async-app resume RUN",
    "slurm*": "ranks are started on this machine or by Ray: cluster.launcher",
    "orchestrator.token_batch_size": "an update counts prompts: async.mini_batch_size",
    "orchestrator.renderer*": "the tokenizer's chat template: data.template_options",
    "orchestrator.eval.source": "one held-out set: data.eval_path",
    "trainer.loss.kl_tau": "towards the policy that sampled; algorithm.kl_coefficient is towards the first policy",
    "trainer.model.full_offload* trainer.model.*_cpu_offload": "optimizer and weights stay on the device",
    "trainer.model.compile*": "the trainer is not compiled",
}


def import_prime_rl(options: Mapping[str, Any]) -> Draft:
    """Translate the TOML of prime-rl's `rl` command; arrays of tables are lists of mappings."""
    draft = Draft(options)
    _write_model(draft)
    _write_data(draft)
    _write_rollout(draft)
    _write_trainer(draft)
    _write_objective(draft)
    _write_batches(draft)
    _write_rhythm(draft)
    draft.finish(ALWAYS, MISSING)
    return draft


def _write_model(draft: Draft) -> None:
    names = ("model.name", "trainer.model.name", "orchestrator.model.name")
    draft.copy("model.path", *names, default="Qwen/Qwen3-0.6B")
    draft.change(draft.named(*names), "here a folder: download the model, nothing is fetched by name")
    draft.copy("model.trust_remote_code", "trainer.model.trust_remote_code", "orchestrator.model.trust_remote_code")


def _write_data(draft: Draft) -> None:
    """The first source; its environment has the prompts, the turns and the reward."""
    sources = draft.take(_SOURCES, default=[])
    first = sources[0] if sources else {}
    environment = first.get("env", {})
    taskset = dict(environment.get("taskset", {}))
    name = environment.get("id") or taskset.pop("id", "")
    draft.put("data.path", f"verifiers:{name}", _SOURCES)
    draft.put("environment.name", "verifiers", _SOURCES)
    if taskset:
        draft.put("data.task_options", taskset, _SOURCES)
    draft.change(_SOURCES, "of verifiers up to 0.3.1; agents that are programs of their own are not there")
    if len(sources) > 1:
        draft.miss(_SOURCES, f"one environment: the first of {len(sources)}")


def _write_rollout(draft: Draft) -> None:
    draft.put("rollout.backend", "vllm", "inference.vllm.model")
    draft.copy("rollout.samples_per_prompt", "orchestrator.group_size", default=1)
    draft.copy("rollout.temperature", "orchestrator.train.sampling.temperature", default=1.0)
    lengths = ("orchestrator.seq_len", "seq_len", "trainer.model.seq_len")
    longest = draft.number(*lengths, default=2048)
    draft.take("inference.vllm.max_model_len")
    draft.put("rollout.max_model_len", longest, *lengths)
    limit = draft.number("orchestrator.train.sampling.max_completion_tokens", default=longest)
    room = min(limit, longest // 2)
    draft.put("rollout.max_tokens", room, "orchestrator.train.sampling.max_completion_tokens")
    draft.put("environment.max_tokens", longest // 2, *lengths)
    draft.put("data.max_prompt_tokens", longest - longest // 2, *lengths)
    draft.change(
        draft.named(*lengths),
        "prompt and turns together, cut when longer; here each has half, and is left out",
    )
    width = draft.number("inference.vllm.tensor_parallel_size", default=1)
    draft.put("rollout.tensor_parallel", width, "inference.vllm.tensor_parallel_size")
    each = draft.number("deployment.gpus_per_node", default=8)
    for key, kind, share in (("engine.num_ranks", "train", 1), ("rollout.num_engines", "infer", width)):
        names = (f"deployment.num_{kind}_gpus", f"deployment.num_{kind}_nodes")
        devices = draft.number(names[0], default=0) or each * draft.number(names[1], default=0) or 1
        if kind == "infer":
            devices *= draft.number("deployment.num_infer_replicas", default=1)
        draft.put(key, max(devices // share, 1), *names)
    memory = draft.take("inference.vllm.gpu_memory_utilization", default=0.9)
    draft.put("rollout.options", {"gpu_memory_utilization": memory}, "inference.vllm.gpu_memory_utilization")
    draft.copy("rollout.seed", "inference.vllm.seed")


def _write_trainer(draft: Draft) -> None:
    for key in ("engine.dtype", "rollout.dtype"):
        draft.put(key, "bfloat16", "trainer.model.dtype")
    kind = draft.take("trainer.optim.type", default="adamw")
    if kind != "adamw":
        draft.change("trainer.optim.type", f"{kind} is not there: AdamW takes its place")
    rate = draft.number("trainer.optim.lr", default=1e-6)
    draft.put("engine.learning_rate", rate, "trainer.optim.lr")
    draft.copy("engine.weight_decay", "trainer.optim.weight_decay", default=0.01)
    draft.copy("engine.adam_beta1", "trainer.optim.betas1", default=0.9)
    draft.copy("engine.adam_beta2", "trainer.optim.betas2", default=0.999)
    draft.copy("engine.max_grad_norm", "trainer.optim.max_norm", default=1.0)
    kind = draft.take("trainer.scheduler.type", default="constant")
    draft.put("engine.schedule", kind if kind in _SCHEDULES else "constant", "trainer.scheduler.type")
    if kind != "constant":
        draft.copy("engine.warmup_steps", "trainer.scheduler.warmup_steps", default=10)
        least = draft.number("trainer.scheduler.min_lr", default=0.0)
        draft.put("engine.min_learning_rate_ratio", least / rate if rate else 0.0, "trainer.scheduler.min_lr")
    if kind == "linear":
        draft.miss("trainer.scheduler.decay_steps", "the rate falls from the end of the warm-up to the end of the run")
        draft.take("trainer.scheduler.decay_steps")
    draft.put("engine.activation_checkpointing", True, "trainer.model.ac")
    if any(name.startswith("trainer.model.lora.") for name in draft.left):
        draft.copy("engine.lora_rank", "trainer.model.lora.rank", default=16)
        draft.copy("engine.lora_alpha", "trainer.model.lora.alpha", default=32.0, convert=float)
    axes = {"trainer.model.cp": "context_parallel", "trainer.model.ep": "expert_parallel"}
    found = {ours: draft.take(theirs) for theirs, ours in axes.items()}
    if widths := {ours: size for ours, size in found.items() if isinstance(size, int) and size > 1}:  # or "auto"
        draft.put("engine.backend", "megatron", *axes)
        draft.put("engine.options", widths, *axes)


def _write_objective(draft: Draft) -> None:
    kind = draft.take("orchestrator.algo.type", default="grpo")
    draft.put("algorithm.advantage", "dr_grpo", "orchestrator.algo.type")
    if kind not in _PLAIN_MEAN:
        draft.change("orchestrator.algo.type", f"{kind} is not there: reward less mean of the group takes its place")
    loss = draft.take("trainer.loss.type", default="default")
    values = {"loss": "ppo_clip", "correction": "none", "correction_form": "bypass", "aggregation": "token_mean"}
    for key, value in values.items():
        draft.put(f"algorithm.{key}", value, "trainer.loss.type")
    draft.change(
        "trainer.loss.type",
        f"{loss} leaves out tokens whose probability has moved by more than a bound; here their ratio is clipped",
    )
    for name in [f"trainer.loss.{end}" for end in ("dppo_mask_low", "dppo_mask_high", "ipo_threshold")]:
        if draft.take(name) is not None:
            draft.miss(name, "bounds a difference; algorithm.clip_low and clip_high a ratio")


def _write_batches(draft: Draft) -> None:
    group = draft.entries["rollout.samples_per_prompt"].value
    samples = draft.number("orchestrator.batch_size", default=128)
    draft.put("async.mini_batch_size", max(samples // group, 1), "orchestrator.batch_size", "orchestrator.group_size")
    draft.change("orchestrator.batch_size", f"counts samples there; {samples} are {samples / group:g} prompts")
    name = "orchestrator.max_off_policy_steps"
    draft.put("async.partial_rollout", True, name)
    draft.put("async.staleness_threshold", 1.0, name)
    draft.put("async.max_version_lag", draft.number(name, default=8), name)
    draft.put("async.on_exceed", "drop", name)
    draft.change(name, "dropped beyond it, as there; how many are in the air is bounded by async.staleness_threshold")


def _write_rhythm(draft: Draft) -> None:
    steps = draft.number("max_steps", "trainer.max_steps", "orchestrator.max_steps", default=0)
    draft.put("engine.max_updates", steps, "max_steps")
    draft.put("data.epochs", 0, "max_steps")
    if any(name.startswith("orchestrator.eval.") for name in draft.left):
        draft.copy("eval.every_updates", "orchestrator.eval.interval", default=100)
        draft.put("data.eval_size", 64, "orchestrator.eval.num_examples")
        draft.copy("eval.temperature", "orchestrator.eval.sampling.temperature")
    draft.put("checkpoint.every", draft.number("ckpt.interval", "trainer.ckpt.interval", default=0), "ckpt.interval")
    draft.copy("checkpoint.keep", "ckpt.keep_last", "trainer.ckpt.keep_last")
    if any(name.startswith("monitors.wandb") for name in draft.left):
        draft.put("log.trackers", ["wandb"], "monitors.wandb.project")
        draft.copy("log.project", "monitors.wandb.project", default="prime-rl")
