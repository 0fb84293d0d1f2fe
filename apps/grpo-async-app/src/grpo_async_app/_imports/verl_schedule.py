"""verl's batches, places and rhythm in our words: how much at once, on how many devices, and what comes when."""

import math
from typing import Final

from offbeat_recipes import Draft, Entry, Program

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_SAMPLING_NODES: Final = ("rollout.nnodes", f"{_ROLLOUT}nnodes")
_SAMPLING_WIDTH: Final = ("rollout.n_gpus_per_node", f"{_ROLLOUT}n_gpus_per_node")
"""Of the asynchronous trainers apart, and of main_ppo's own."""
_TRACKERS: Final = ("wandb", "trackio", "mlflow")


def find_mode(draft: Draft, program: Program) -> str:
    """How verl's trainer and its engines follow each other.

    Returns:
        "sync"; "one_step_off": the next batch is sampled while one is trained on; "fully_async"; "separate_async", the
        same in main_ppo.
    """
    started = f"{program.name} {program.config}"
    for mode in ("fully_async", "one_step_off"):
        if mode in started:
            return mode
    mode = str(draft.take("trainer.v1.trainer_mode", default="sync"))
    if draft.take("trainer.use_v1", default=True) and mode != "sync":
        if mode == "colocate_async":
            draft.change("trainer.v1.trainer_mode", "colocated engines sleep while the trainer works: synchronous here")
        return mode if mode == "separate_async" else "sync"
    if any(name.startswith("async_training.") or name == "rollout.total_rollout_steps" for name in draft.left):
        return "fully_async"
    return "one_step_off" if "rollout.n_gpus_per_node" in draft.left else "sync"


def write_schedule(draft: Draft, mode: str) -> None:
    """Batches, ranks and engines, epochs, validations and checkpoints.

    Args:
        draft: to add to; data and rollouts are written.
        mode: as `find_mode` says.
    """
    _write_batches(draft, mode)
    _write_places(draft, is_apart=mode != "sync")
    _write_rhythm(draft)


def _write_batches(draft: Draft, mode: str) -> None:
    step = draft.number(f"{_ACTOR}ppo_mini_batch_size", default=256)
    draft.put("async.mini_batch_size", step, f"{_ACTOR}ppo_mini_batch_size")
    all_prompts = draft.number("data.train_batch_size", default=1024)
    if mode == "fully_async":
        _write_fully_async(draft)
        return
    if mode == "separate_async":
        _write_separate_async(draft)
        return
    draft.put("async.require_batches", max(all_prompts // step, 1), "data.train_batch_size")
    draft.put("async.staleness_threshold", 0, "data.train_batch_size")
    if mode == "one_step_off":
        # verl's docs/advance/fully_async.md: staleness_threshold = 1 is about the same as one_step_off.
        draft.put("async.staleness_threshold", 1, "rollout.n_gpus_per_node")
        draft.change(
            "rollout.n_gpus_per_node",
            "one step off: the next batch is sampled while one is trained on, here with async.staleness_threshold = 1",
        )


def _write_fully_async(draft: Draft) -> None:
    draft.copy("async.require_batches", "async_training.require_batches", default=1)
    draft.copy("async.trigger_parameter_sync_step", "async_training.trigger_parameter_sync_step", default=4)
    staleness = draft.number("async_training.staleness_threshold", default=0.1)
    draft.put("async.staleness_threshold", staleness, "async_training.staleness_threshold")
    partial = draft.take("async_training.partial_rollout", default=True)
    draft.put("async.partial_rollout", bool(partial and staleness), "async_training.partial_rollout")
    if partial and not staleness:
        draft.change(
            "async_training.partial_rollout", "has no effect without staleness: nothing is in flight at a sync"
        )
    names = (
        "rollout.max_concurrent_samples_per_replica",
        "async_training.max_concurrent_samples_per_replica",
        "async_training.concurrent_samples_per_replica",
    )
    draft.copy("rollout.max_running", *names)


def _write_separate_async(draft: Draft) -> None:
    """verl/trainer/ppo/v1: a train batch is so many mini-batches, with a sync after the last.

    So many batches are begun before the first update, and one more with each.
    """
    prefix = "trainer.v1.separate_async."
    draft.put("async.require_batches", 1, f"{prefix}parameter_sync_step")
    draft.copy("async.trigger_parameter_sync_step", f"{prefix}parameter_sync_step", default=4)
    draft.copy("async.staleness_threshold", f"{prefix}num_warmup_batches", default=1)
    draft.put("async.partial_rollout", draft.entries["async.staleness_threshold"].value > 0, "trainer.v1.trainer_mode")


def _write_places(draft: Draft, *, is_apart: bool) -> None:
    nodes = draft.number("trainer.nnodes", default=1)
    width = draft.number("trainer.n_gpus_per_node", default=8)
    draft.put("engine.num_ranks", nodes * width, "trainer.nnodes", "trainer.n_gpus_per_node")
    shared = draft.entries["rollout.tensor_parallel"].value
    draft.take("actor_rollout_ref.hybrid_engine")
    draft.put("cluster.launcher", "ray", "trainer.nnodes")
    sampling_nodes, sampling_width = nodes, width
    if is_apart:
        sampling_nodes = draft.number(*_SAMPLING_NODES, default=1)
        sampling_width = draft.number(*_SAMPLING_WIDTH, default=8)
    else:
        draft.put("cluster.colocate", True, "actor_rollout_ref.hybrid_engine")
    names = (*_SAMPLING_NODES, *_SAMPLING_WIDTH) if is_apart else ("trainer.nnodes", "trainer.n_gpus_per_node")
    draft.put("rollout.num_engines", max(sampling_nodes * sampling_width // shared, 1), *names)
    draft.change(
        draft.named(*names),
        "engines and ranks are counted, and the planner finds their nodes; `plan --cluster NODESxACCELERATORS` shows "
        "whether they fit, and cluster.num_nodes with cluster.accelerators_per_node would ask for a part of a cluster",
    )
    for key in ("engine.device", "rollout.device"):
        if device := draft.take("trainer.device"):
            draft.put(key, device, "trainer.device")


def _write_rhythm(draft: Draft) -> None:
    draft.copy("data.epochs", "rollout.total_epochs", "trainer.total_epochs", default=30)
    updates = draft.number("trainer.total_training_steps", default=0)
    prompts = draft.number("rollout.total_rollout_steps", default=0)
    per_update = draft.entries["async.mini_batch_size"].value * draft.entries["async.require_batches"].value
    # What verl calls a step ends with a sync: trigger_parameter_sync_step updates here, 1 of them without it.
    to_sync = draft.entries.get("async.trigger_parameter_sync_step", Entry(1, "")).value
    if updates or prompts:
        draft.put(
            "engine.max_updates",
            updates * to_sync or math.ceil(prompts / per_update),
            "trainer.total_training_steps" if updates else "rollout.total_rollout_steps",
        )
    for names in (("rollout.test_freq", "trainer.test_freq"), ("trainer.save_freq",)):
        if to_sync > 1 and draft.number(*names, default=0) > 0:
            draft.change(draft.named(*names), f"counted in syncs there, in updates here: {to_sync} in each")
    tests = draft.number("rollout.test_freq", "trainer.test_freq", default=0)
    if tests > 0 and "data.eval_path" in draft.entries:
        draft.put("eval.every_updates", tests * to_sync, "rollout.test_freq", "trainer.test_freq")
    draft.copy("checkpoint.every", "trainer.save_freq", convert=lambda steps: max(steps, 0) * to_sync)
    draft.copy("checkpoint.keep", "trainer.max_actor_ckpt_to_keep")
    found = draft.take("trainer.logger", default=[])  # one name, or a list that a shell's quotes have made a text
    loggers = found if isinstance(found, list) else str(found).strip("[]").split(",")
    trackers = [name for name in loggers if name in _TRACKERS]
    if trackers:
        draft.put("log.trackers", trackers, "trainer.logger")
    draft.copy("log.project", "trainer.project_name")
