"""verl's options in our words.

Source: verl, verl/trainer/config (ppo_trainer, actor/actor, optim, rollout/rollout, reward, distillation,
algorithm/rollout_correction), and the config folders of verl/experimental/fully_async_policy and one_step_off_policy
(earlier in recipe), read at 7deb67c (2025-12) and 1dda039 (2026-08).
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from grpo_async_app._imports.verl_engine import write_optimizer, write_replay, write_trainer
from grpo_async_app._imports.verl_objective import write_objective, write_teacher
from grpo_async_app._imports.verl_paths import write_portable_paths
from grpo_async_app._imports.verl_rollout import group_of_fork, write_rollout
from grpo_async_app._imports.verl_validation import SHUFFLES, validates, write_num_rows, write_validation
from offbeat_recipes import Entry, Program, RecipeBuilder, read_option_table, write_trackers

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_MODEL: Final = "actor_rollout_ref.model."
_REWARDS: Final = ("custom_reward_function", "reward.custom_reward_function")
"""The section until 2026, and the one after."""
_MODEL_IS_ON: Final = ("reward_model.enable", "reward.reward_model.enable")
_NO_PROGRAM: Final = Program()
_ALL: Final = 10**6
"""Checkpoints that are kept where there is no limit."""
_ASYNC: Final = re.compile(r"\Aasync\.")
"""The section as texts about the trainer call it; in its configuration it is async_training."""

_OPTIONS: Final = read_option_table(__package__, "verl")


def import_verl(
    options: Mapping[str, Any],
    program: Program = _NO_PROGRAM,
    variables: Mapping[str, tuple[str, str]] | None = None,
) -> RecipeBuilder:
    """Translate verl's options, and what is known of the program that they are given to.

    Args:
        options: by full name; `async.…` is read as `async_training.…`, which is what the trainer calls it.
        program: that they are given to.
        variables: by option, the variable of the environment that its path begins with, and the default of the script.
    """
    given = {_ASYNC.sub("async_training.", name): value for name, value in options.items()}
    draft = RecipeBuilder(*_OPTIONS.renamed(given))
    mode = _find_mode(draft, program)
    _write_data(draft)
    _write_reward(draft)
    write_rollout(draft)
    write_validation(draft)
    _write_reward_model(draft)
    write_trainer(draft, "megatron" if "megatron" in program.config else "fsdp")
    write_objective(draft, bypasses=mode in ("fully_async", "one_step_off"))
    _write_batches(draft, mode)
    _write_places(draft, is_apart=mode != "sync")
    _write_rhythm(draft, mode)
    write_optimizer(draft)
    write_replay(draft)
    write_teacher(draft)
    write_portable_paths(draft, variables or {})
    draft.finish(_OPTIONS)
    return draft


def _write_data(draft: RecipeBuilder) -> None:
    draft.copy("model.path", f"{_MODEL}path")
    draft.copy("model.trust_remote_code", f"{_MODEL}trust_remote_code", "data.trust_remote_code")
    _write_training_file(draft)
    draft.copy("data.prompt_column", "data.prompt_key", default="prompt")
    draft.put("data.answer_column", "reward_model.ground_truth", "data.train_files")
    _write_template_options(draft)
    draft.put("data.max_prompt_tokens", draft.count("data.max_prompt_length", default=512), "data.max_prompt_length")
    if draft.given("data.filter_overlong_prompts") is True and draft.take("data.truncation"):
        draft.ignore("data.truncation", "prompts that are too long are left out there too")
    draft.copy("data.shuffle", *SHUFFLES)
    draft.copy("data.seed", "data.seed")
    write_num_rows(draft, "train", "data.num_items")


def _write_training_file(draft: RecipeBuilder) -> None:
    name = "data.train_files"
    files = draft.take(name)
    if isinstance(files, list):
        if len(files) > 1:
            draft.lose(
                name,
                f"only {files[0]} is read: link all {len(files)} into one folder and name that, or give each a table "
                "[data.mix.NAME]",
            )
        files = files[0] if files else None
    if files is not None:
        draft.put("data.path", files, name)


def _write_template_options(draft: RecipeBuilder) -> None:
    prefix = "data.apply_chat_template_kwargs."
    names = [name for name in draft.left if name.startswith(prefix)]
    if options := {name.removeprefix(prefix): value for name in names if (value := draft.take(name)) is not None}:
        draft.put("data.template_options", options, *names)


def _write_reward(draft: RecipeBuilder) -> None:
    paths = tuple(f"{section}.path" for section in _REWARDS)
    functions = tuple(f"{section}.name" for section in _REWARDS)
    path, function = draft.take(*paths), draft.take(*functions)
    name = "reward_model.reward_manager"
    draft.take(name, "reward.reward_manager.name")
    if path:
        draft.put("reward.name", f"{path}:{function or 'compute_score'}", *paths, *functions)
        draft.put("reward.signature", "verl", *paths)
        _write_reward_options(draft)
    elif _has_reward_model(draft):
        draft.put("reward.name", "reward_model", *_MODEL_IS_ON)
    else:
        draft.put("reward.name", "math_verify", name)
        draft.lose(name, "verl chooses the reward by data_source; here reward.name does: set it to yours")


def _write_reward_options(draft: RecipeBuilder) -> None:
    for prefix in (f"{section}.reward_kwargs." for section in _REWARDS):
        names = [name for name in draft.left if name.startswith(prefix)]
        if options := {name.removeprefix(prefix): value for name in names if (value := draft.take(name)) is not None}:
            draft.put("reward.function_options", {draft.entries["reward.name"].value: options}, *names)


def _has_reward_model(draft: RecipeBuilder) -> bool:
    return True in [draft.take(name) for name in _MODEL_IS_ON]


def _write_reward_model(draft: RecipeBuilder) -> None:
    """Write the table of the model that is the reward; the longest prompt and answer are written.

    Source: verl, reward_model/reward_model.yaml until 2026 and reward/reward.yaml after.
    """
    paths = ("reward_model.model.path", "reward.reward_model.model_path", "reward_model.model_path")
    formats = ("reward.reward_model.rollout.dtype", "reward_model.rollout.dtype", "reward_model.inference.dtype")
    if not _has_reward_model(draft):
        return
    if draft.entries["reward.name"].value != "reward_model":
        draft.take(*paths)
        draft.lose(
            draft.named(*paths),
            "the function gives the reward; with both, reward.weights names it and reward_model, in place of "
            "reward.name, and reward.reward_model.path the model",
        )
        return
    draft.copy("reward.reward_model.path", *paths)
    if "reward.reward_model.path" not in draft.entries:
        draft.lose(draft.named(*_MODEL_IS_ON), "no model is named: set reward.reward_model.path")
    draft.copy("reward.reward_model.dtype", *formats, default="bfloat16")
    longest = draft.entries["data.max_prompt_tokens"].value + draft.entries["rollout.max_tokens"].value
    draft.put("reward.reward_model.max_tokens", longest, "data.max_prompt_length", "data.max_response_length")


_SAMPLING_NODES: Final = ("rollout.nnodes", f"{_ROLLOUT}nnodes")
_SAMPLING_WIDTH: Final = ("rollout.n_gpus_per_node", f"{_ROLLOUT}n_gpus_per_node")
"""Options of the asynchronous trainers apart, and of main_ppo's own."""


def _find_mode(draft: RecipeBuilder, program: Program) -> str:
    """Return how verl's trainer and its engines alternate.

    Returns:
        "sync"; "one_step_off": the next batch is sampled while one is trained on; "fully_async"; "separate_async", the
        same in main_ppo.
    """
    started = f"{program.name} {program.config}"
    for mode in ("fully_async", "one_step_off"):
        if mode in started:
            return mode
    mode = str(draft.take("trainer.v1.trainer_mode", default="sync"))
    if not draft.take("trainer.use_v1", default=True):
        draft.change("trainer.use_v1", "the trainer before v1, which does not read trainer.v1")
    elif mode != "sync":
        text = "colocated engines sleep while the trainer works" if mode == "colocate_async" else "unknown here"
        if mode != "separate_async":
            draft.change("trainer.v1.trainer_mode", f"{text}: synchronous here")
        return mode if mode == "separate_async" else "sync"
    if any(name.startswith("async_training.") or name == "rollout.total_rollout_steps" for name in draft.left):
        return "fully_async"
    return "one_step_off" if "rollout.n_gpus_per_node" in draft.left else "sync"


def _write_passes(draft: RecipeBuilder) -> None:
    """Source: verl/workers/actor/dp_actor.py: the same mini batches in the same order, unless actor.shuffle is set."""
    name = f"{_ACTOR}ppo_epochs"
    draft.put("algorithm.num_passes", draft.count(name, default=1), name)
    of_critic, passes = "critic.ppo_epochs", draft.entries["algorithm.num_passes"].value
    if draft.take(of_critic, default=passes) != passes:
        draft.change(
            of_critic, "a critic makes as many passes as the policy, and but for section critic as engine says"
        )
    if draft.take(f"{_ACTOR}shuffle"):
        draft.change(f"{_ACTOR}shuffle", "mini batches come in the same order in each pass")


def _write_step(draft: RecipeBuilder) -> int:
    """Write how many prompts a step takes.

    Source: Search-R1 a14dc3a, verl/workers/fsdp_workers.py: a mini batch is multiplied by rollout.n, which is 1 there,
    and batch.repeat(n_agent) comes before it.
    """
    name, group = f"{_ACTOR}ppo_mini_batch_size", group_of_fork(draft)
    given = draft.count(name, default=256)
    step = max(given // group, 1)
    draft.put("async.mini_batch_size", step, name)
    if group > 1:
        draft.change(
            name, f"counts samples, or turns, in a fork with a group size of its own: {given / group:g} prompts"
        )
    return step


def _write_batches(draft: RecipeBuilder, mode: str) -> None:
    _write_passes(draft)
    step = _write_step(draft)
    if mode in ("fully_async", "separate_async"):
        (_write_fully_async if mode == "fully_async" else _write_separate_async)(draft)
        if draft.take("data.train_batch_size") is not None:
            draft.ignore("data.train_batch_size", "prompts are streamed one by one there")
        return
    all_prompts = draft.count("data.train_batch_size", default=1024)
    if step > all_prompts:  # verl refuses it; forks whose environments multiply the batch let it pass
        draft.put("async.mini_batch_size", all_prompts, "data.train_batch_size")
        draft.change(
            draft.named(f"{_ACTOR}ppo_mini_batch_size"),
            f"larger than data.train_batch_size = {all_prompts}, and so the whole batch: {all_prompts} prompts a step",
        )
        step = all_prompts
    draft.put("async.require_batches", max(all_prompts // step, 1), "data.train_batch_size")
    draft.put("async.staleness_threshold", 0, "data.train_batch_size")
    if mode == "one_step_off":
        # verl's docs/advance/fully_async.md: staleness_threshold = 1 is about the same as one_step_off.
        draft.put("async.staleness_threshold", 1, "rollout.n_gpus_per_node")
        draft.change(
            "rollout.n_gpus_per_node",
            "one step off: the next batch is sampled while one is trained on, here with async.staleness_threshold = 1",
        )


def _write_fully_async(draft: RecipeBuilder) -> None:
    for key, usual in (("require_batches", 1), ("trigger_parameter_sync_step", 4)):
        name = f"async_training.{key}"
        draft.put(f"async.{key}", draft.count(name, default=usual), name)
    staleness = draft.number("async_training.staleness_threshold", default=0.1)
    draft.put("async.staleness_threshold", staleness, "async_training.staleness_threshold")
    partial = draft.take("async_training.partial_rollout", default=True)
    draft.put("async.partial_rollout", bool(partial and staleness), "async_training.partial_rollout")
    if partial and not staleness:
        draft.change(
            "async_training.partial_rollout", "has no effect without staleness: nothing is in flight at a sync"
        )
    draft.copy(
        "rollout.max_running",
        "rollout.max_concurrent_samples_per_replica",
        "async_training.max_concurrent_samples_per_replica",
        "async_training.concurrent_samples_per_replica",
    )


def _write_separate_async(draft: RecipeBuilder) -> None:
    """verl/trainer/ppo/v1: a train batch is so many mini-batches, with a sync after the last.

    So many batches are begun before the first update, and one more with each.
    """
    prefix = "trainer.v1.separate_async."
    draft.put("async.require_batches", 1, "trainer.v1.trainer_mode")
    name = f"{prefix}parameter_sync_step"
    draft.put("async.trigger_parameter_sync_step", draft.count(name, default=4), name)
    ahead = f"{prefix}num_warmup_batches"
    staleness = draft.number(ahead, default=1)
    draft.put("async.staleness_threshold", staleness, ahead)
    draft.put("async.partial_rollout", staleness > 0, "trainer.v1.trainer_mode")


def _write_places(draft: RecipeBuilder, *, is_apart: bool) -> None:
    names: tuple[str, ...] = ("trainer.nnodes", "trainer.n_gpus_per_node")
    devices = draft.count(names[0], default=1) * draft.count(names[1], default=8)
    draft.put("engine.num_ranks", devices, *names)
    draft.take("actor_rollout_ref.hybrid_engine")
    draft.put("cluster.launcher", "ray", "trainer.nnodes")
    if is_apart:
        names = (*_SAMPLING_NODES, *_SAMPLING_WIDTH)
        devices = draft.number(*_SAMPLING_NODES, default=1) * draft.count(*_SAMPLING_WIDTH, default=8)
    else:
        draft.put("cluster.colocate", True, "actor_rollout_ref.hybrid_engine")
    draft.put("rollout.num_engines", max(devices // draft.entries["rollout.tensor_parallel"].value, 1), *names)
    draft.change(
        draft.named(*names),
        "engines and ranks are counted, and the planner finds their nodes; `plan --cluster NODESxACCELERATORS` shows "
        "whether they fit, and cluster.num_nodes with cluster.accelerators_per_node would ask for a part of a cluster",
    )
    for key in ("engine.device", "rollout.device"):
        if device := draft.take("trainer.device"):
            draft.put(key, device, "trainer.device")


def _write_end(draft: RecipeBuilder, mode: str, to_sync: int) -> None:
    """After how many epochs or updates a run ends, whichever comes first.

    Source: verl/experimental/fully_async_policy/fully_async_rollouter.py, which reads no trainer.total_training_steps.
    Until early 2026 it read rollout.total_epochs, and test_freq beside it, in place of those of the trainer.
    """
    epochs, prompts = ("trainer.total_epochs", "rollout.total_epochs"), "rollout.total_rollout_steps"
    endless = (prompts,) if draft.given(prompts) == 0 else ()
    draft.put("data.epochs", draft.number(*reversed(epochs), default=30), *epochs, *endless)
    name = "trainer.total_training_steps"
    updates = draft.number(name, default=0)
    is_bounded = mode == "fully_async" and prompts not in draft.left  # null there leaves the epochs alone
    num_prompts = draft.number(prompts, default=100 if is_bounded else 0)
    if mode == "fully_async" and updates:
        draft.change(name, f"not read by the fully asynchronous trainer, which ends by {prompts} or its epochs")
    elif updates:
        draft.put("engine.max_updates", updates * to_sync, name)
        return
    if num_prompts:
        per_update = draft.entries["async.mini_batch_size"].value * draft.entries["async.require_batches"].value
        draft.put("engine.max_updates", math.ceil(num_prompts / per_update), prompts)
    if is_bounded:
        draft.change(prompts, "100 prompts where it is not set, and so here: engine.max_updates, which may go")


def _write_rhythm(draft: RecipeBuilder, mode: str) -> None:
    # What verl calls a step ends with a sync: trigger_parameter_sync_step updates here, 1 of them without it.
    to_sync = draft.entries.get("async.trigger_parameter_sync_step", Entry(1, "")).value
    _write_end(draft, mode, to_sync)
    for names in (("rollout.test_freq", "trainer.test_freq"), ("trainer.save_freq",)):
        if to_sync > 1 and draft.number(*names, default=0) > 0:
            draft.change(draft.named(*names), f"counted in syncs there, in updates here: {to_sync} in each")
    tests = draft.number("rollout.test_freq", "trainer.test_freq", default=0)
    if validates(draft):
        draft.put("eval.every_updates", max(tests, 0) * to_sync, "rollout.test_freq", "trainer.test_freq")
    draft.copy("checkpoint.every", "trainer.save_freq", convert=lambda steps: max(steps, 0) * to_sync)
    draft.copy("checkpoint.keep", "trainer.max_actor_ckpt_to_keep", convert=lambda most: most if most > 0 else _ALL)
    write_trackers(draft, "trainer.logger")
    draft.copy("log.project", "trainer.project_name")
    draft.copy("log.generations", "trainer.log_val_generations", "trainer.val_generations_to_log_to_wandb")
    _write_contents(draft)


def _write_contents(draft: RecipeBuilder) -> None:
    """Write what a checkpoint holds; without the optimizer a run cannot be resumed from it."""
    names = (f"{_ACTOR}checkpoint.save_contents", f"{_ACTOR}checkpoint.contents")
    if (contents := draft.take(*names)) is not None:
        draft.put("checkpoint.save_optimizer", "optimizer" in str(contents), *names)
