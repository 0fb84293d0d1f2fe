"""verl's options in our words.

Source: verl, verl/trainer/config (ppo_trainer, actor/actor, optim, rollout/rollout, reward, distillation,
algorithm/rollout_correction), and the config folders of verl/experimental/fully_async_policy and one_step_off_policy
(earlier in recipe), read at 7deb67c (2025-12) and 1dda039 (2026-08).
"""

from collections.abc import Mapping
from typing import Any, Final

from grpo_async_app._imports.verl_objective import write_objective
from grpo_async_app._imports.verl_optimizer import write_optimizer
from grpo_async_app._imports.verl_schedule import find_mode, write_schedule
from grpo_async_app._imports.verl_teacher import write_teacher
from offbeat_recipes import Draft, Program

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_MODEL: Final = "actor_rollout_ref.model."
_MEGATRON: Final = f"{_ACTOR}megatron."
_ENGINES: Final = {"fsdp": "torch", "fsdp2": "torch", "megatron": "megatron"}
_STRATEGIES: Final = {"dp": "fsdp"}
"""The name of a configuration for the training engine, where it is not the engine's."""
_SAMPLERS: Final = {"vllm": "vllm", "hf": "torch", "trtllm": "trtllm"}
_AXES: Final = {
    "tensor_parallel": "tensor_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
}

_REWARDS: Final = ("custom_reward_function", "reward.custom_reward_function")
"""The section until 2026, and the one after."""
_NO_PROGRAM: Final = Program()

ALWAYS: Final[Mapping[str, str]] = {
    "data.filter_overlong_prompts*": "prompts that are too long are always left out and counted",
    "data.return_raw_chat": "the chat template is always applied here",
    f"{_MODEL}use_remove_padding": "sequences are always packed",
    f"{_ROLLOUT}calculate_log_probs": "engines always give the log-probabilities of what they sample",
    f"{_ROLLOUT}mode": "engines always serve asynchronously",
    f"{_ROLLOUT}log_prob_*": "the trainer's token budget bounds every pass",
    f"{_ACTOR}use_dynamic_bsz": "micro-batches are always filled by tokens",
    f"{_ACTOR}ppo_micro_batch_size*": "micro-batches are always filled by tokens",
    "actor_rollout_ref.ref.log_prob_*": "the trainer's token budget bounds every pass",
    "trainer.resume_mode": "`grpo-async-app resume RUN` goes on from the latest checkpoint",
}
MISSING: Final[Mapping[str, str]] = {
    "algorithm.rollout_correction.loss_type": "the loss is algorithm.loss in both forms",
    "async_training.use_*": "engines and trainer keep their places",
    "async_training.dynamic_*": "engines and trainer keep their places",
    "trainer.v1.separate_async.hybrid_rollout.*": "engines and trainer keep their places",
    "trainer.v1.sampler.max_off_policy_threshold": "counted in syncs there; async.max_version_lag in updates",
    "trainer.v1.sampler.max_off_policy_strategy": "async.on_exceed, beside async.max_version_lag",
    "data.truncation": "nothing is cut: prompts that are too long are left out and counted",
    "data.gen_batch_size": "prompts are submitted one by one",
    "critic.*": "no critic is trained",
    "trainer.critic_warmup": "no critic is trained",
    "trainer.val_before_train": "the first validation comes after eval.every_updates",
    "trainer.experiment_name": "name the run folder: --out FOLDER",
    "trainer.default_local_dir": "name the run folder: --out FOLDER",
    f"{_ACTOR}fsdp_config.*": "weights, gradients and moments are always sharded, and stay on the device",
    "actor_rollout_ref.ref.*": "the reference policy is kept by the trainer, and shared out as it is",
    f"{_ACTOR}ulysses_sequence_parallel_size": 'engine.backend = "megatron" cuts sequences: context_parallel',
    f"{_ACTOR}ppo_epochs": "each sample is trained on once",
    f"{_ROLLOUT}multi_turn.*": "see section environment",
    f"{_ROLLOUT}load_format": "weights come from the trainer before anything is sampled",
    "*checkpoint_engine.*": "weights take shared memory on one machine and TCP between machines",
    "*profiler.*": "see section profile: chosen updates of chosen roles",
}


def import_verl(options: Mapping[str, Any], program: Program = _NO_PROGRAM) -> Draft:
    """Translate verl's options.

    Args:
        options: by full name, as verl's command line takes them.
        program: that they are given to; of a YAML file none is known.
    """
    draft = Draft(options)
    mode = find_mode(draft, program)
    _write_data(draft)
    _write_reward(draft)
    _write_rollout(draft)
    _write_trainer(draft, "megatron" if "megatron" in program.config else "fsdp")
    write_objective(draft, bypasses=mode in ("fully_async", "one_step_off"))
    write_schedule(draft, mode)
    write_optimizer(draft)
    write_teacher(draft)
    draft.finish(ALWAYS, MISSING)
    return draft


def _write_data(draft: Draft) -> None:
    draft.copy("model.path", f"{_MODEL}path")
    draft.copy("model.trust_remote_code", f"{_MODEL}trust_remote_code", "data.trust_remote_code")
    for key, name in (("data.path", "data.train_files"), ("data.eval_path", "data.val_files")):
        files = draft.take(name)
        if isinstance(files, list):
            if len(files) > 1:
                draft.change(name, f"only {files[0]} is taken: link all {len(files)} into one folder and name that")
            files = files[0]
        if files is not None:
            draft.put(key, files, name)
    draft.copy("data.prompt_column", "data.prompt_key", default="prompt")
    draft.put("data.answer_column", "reward_model.ground_truth", "data.train_files")
    if draft.take("data.image_key", default="images") != "images":
        draft.change("data.image_key", "images are read from the column `images`: rename yours")
    draft.copy("data.max_prompt_tokens", "data.max_prompt_length", default=512)
    draft.copy("data.shuffle", "data.shuffle")
    draft.copy("data.seed", "data.seed")


def _write_reward(draft: Draft) -> None:
    paths = tuple(f"{section}.path" for section in _REWARDS)
    path, name = draft.take(*paths), draft.take(*(f"{section}.name" for section in _REWARDS))
    draft.take("reward_model.reward_manager", "reward.reward_manager.name")
    if path:
        module = str(path).rsplit("/", 1)[-1].removesuffix(".py")
        draft.put("reward.name", f"{module}:{name or 'compute_score'}", *paths)
        draft.change(
            draft.named(*paths),
            "called with (data_source, solution_str, ground_truth, extra_info) there, here as function(prompt, "
            "completion), from the working folder or what is installed: write one that calls yours with "
            "solution_str=completion, ground_truth=prompt.answer",
        )
    else:
        draft.put("reward.name", "math_verify", "reward_model.reward_manager")
        draft.change(
            "reward_model.reward_manager",
            "the reward is chosen by data_source there; here by reward.name: choose yours",
        )


def _write_rollout(draft: Draft) -> None:
    name = f"{_ROLLOUT}name"
    wanted = draft.take(name, default="vllm")
    draft.put("rollout.backend", _SAMPLERS.get(wanted, "vllm"), name)
    if wanted not in _SAMPLERS:
        draft.change(name, "there is no such rollout engine here: vllm takes its place")
    draft.copy("rollout.tensor_parallel", f"{_ROLLOUT}tensor_model_parallel_size", default=2)
    draft.copy("rollout.dtype", f"{_ROLLOUT}dtype", default="bfloat16")
    draft.copy("rollout.samples_per_prompt", f"{_ROLLOUT}n", "rollout.n", default=1)
    draft.copy("rollout.temperature", f"{_ROLLOUT}temperature")
    draft.copy("rollout.top_p", f"{_ROLLOUT}top_p")
    draft.copy("rollout.top_k", f"{_ROLLOUT}top_k", convert=lambda k: max(k, 0))
    prompt = draft.entries["data.max_prompt_tokens"].value
    answer = draft.number("data.max_response_length", f"{_ROLLOUT}response_length", default=512)
    draft.put("rollout.max_tokens", answer, "data.max_response_length")
    longest = draft.number(f"{_ROLLOUT}max_model_len", default=prompt + answer)
    draft.put("rollout.max_model_len", longest, f"{_ROLLOUT}max_model_len", "data.max_response_length")
    draft.copy("rollout.max_running", f"{_ROLLOUT}max_num_seqs", default=1024)
    draft.copy(
        "rollout.sync_bucket_bytes",
        f"{_ROLLOUT}update_weights_bucket_megabytes",
        f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes",
        convert=lambda mib: mib * 2**20,
    )
    draft.copy("eval.temperature", f"{_ROLLOUT}val_kwargs.temperature")
    _write_engine_arguments(draft, wanted)


def _write_engine_arguments(draft: Draft, wanted: str) -> None:
    """Arguments of the rollout engine itself go to `rollout.options`, which hands on what it does not know."""
    if _SAMPLERS.get(wanted, "vllm") != "vllm":
        return
    prefix = f"{_ROLLOUT}engine_kwargs.vllm."
    names = {name: name.removeprefix(prefix) for name in draft.left if name.startswith(prefix)}
    own = (
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "max_num_batched_tokens",
    )
    names |= {f"{_ROLLOUT}{name}": name for name in own if draft.has(f"{_ROLLOUT}{name}")}
    options: dict[str, Any] = {}
    for name, argument in names.items():
        if (value := draft.take(name)) is not None:
            *outer, last = argument.split(".")
            inner = options
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[last] = value
    if options:
        draft.put("rollout.options", options, *names)


def _write_trainer(draft: Draft, usual: str) -> None:
    has_axes = any(name.startswith(_MEGATRON) for name in draft.left)
    strategy = draft.take(f"{_ACTOR}strategy", "model_engine", default="megatron" if has_axes else usual)
    strategy = _STRATEGIES.get(strategy, strategy)
    if strategy not in _ENGINES:
        named = draft.named(f"{_ACTOR}strategy", "model_engine")
        draft.change(named, "there is no such training engine here: torch takes its place")
        strategy = "fsdp"
    draft.put("engine.backend", _ENGINES[strategy], f"{_ACTOR}strategy")
    draft.put("engine.dtype", "bfloat16", f"{_ACTOR}strategy")
    if not strategy.startswith("fsdp"):
        _write_axes(draft)
    draft.copy("engine.max_tokens_per_microbatch", f"{_ACTOR}ppo_max_token_len_per_gpu", default=16384)
    draft.copy("engine.activation_checkpointing", f"{_MODEL}enable_gradient_checkpointing", default=True)
    draft.copy("engine.lora_rank", f"{_MODEL}lora_rank")
    draft.copy("engine.lora_alpha", f"{_MODEL}lora_alpha", convert=float)


def _write_axes(draft: Draft) -> None:
    """Along which axes the ranks share the model."""
    options = {key: draft.take(f"{_MEGATRON}{name}") for key, name in _AXES.items()}
    options = {key: size for key, size in options.items() if size is not None}
    if options:
        draft.put("engine.options", options, *(f"{_MEGATRON}{_AXES[key]}" for key in options))
