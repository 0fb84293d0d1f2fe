"""verl's batches, places and rhythm in our words: how much at once, on how many devices, and what comes when."""

import math
from typing import Final

from grpo_async_app._imports.draft import Draft

_ACTOR: Final = "actor_rollout_ref.actor."
_TRACKERS: Final = ("wandb", "trackio", "mlflow")


def write_schedule(draft: Draft, *, is_async: bool) -> None:
    """Batches, ranks and engines, epochs, validations and checkpoints.

    Args:
        draft: to add to; data and rollouts are written.
        is_async: the fully asynchronous trainer.
    """
    _write_batches(draft, is_async=is_async)
    _write_places(draft)
    _write_rhythm(draft, is_async=is_async)


def _write_batches(draft: Draft, *, is_async: bool) -> None:
    step = draft.number(f"{_ACTOR}ppo_mini_batch_size", default=256)
    draft.put("async.mini_batch_size", step, f"{_ACTOR}ppo_mini_batch_size")
    all_prompts = draft.number("data.train_batch_size", default=1024)
    if not is_async:
        draft.put("async.require_batches", max(all_prompts // step, 1), "data.train_batch_size")
        draft.put("async.staleness_threshold", 0, "data.train_batch_size")
        return
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
    names = ("rollout.max_concurrent_samples_per_replica", "async_training.max_concurrent_samples_per_replica")
    draft.copy("rollout.max_running", *names)


def _write_places(draft: Draft) -> None:
    nodes = draft.number("trainer.nnodes", default=1)
    width = draft.number("trainer.n_gpus_per_node", default=8)
    draft.put("engine.num_ranks", nodes * width, "trainer.nnodes", "trainer.n_gpus_per_node")
    shared = draft.entries["rollout.tensor_parallel"].value
    is_apart = draft.has("rollout.nnodes") or draft.has("rollout.n_gpus_per_node")
    draft.take("actor_rollout_ref.hybrid_engine")
    draft.put("cluster.launcher", "ray", "trainer.nnodes")
    sampling_nodes, sampling_width = nodes, width
    if is_apart:
        sampling_nodes = draft.number("rollout.nnodes", default=1)
        sampling_width = draft.number("rollout.n_gpus_per_node", default=8)
    else:
        draft.put("cluster.colocate", True, "actor_rollout_ref.hybrid_engine")
    names = ("rollout.nnodes", "rollout.n_gpus_per_node") if is_apart else ("trainer.nnodes", "trainer.n_gpus_per_node")
    draft.put("rollout.num_engines", max(sampling_nodes * sampling_width // shared, 1), *names)
    draft.change(
        names[0],
        "engines and ranks are counted, and the planner finds their nodes; `plan --cluster NODESxACCELERATORS` shows "
        "whether they fit, and cluster.num_nodes with cluster.accelerators_per_node would ask for a part of a cluster",
    )
    for key in ("engine.device", "rollout.device"):
        if device := draft.take("trainer.device"):
            draft.put(key, device, "trainer.device")


def _write_rhythm(draft: Draft, *, is_async: bool) -> None:
    draft.copy("data.epochs", "rollout.total_epochs", "trainer.total_epochs", default=30)
    updates = draft.number("trainer.total_training_steps", default=0)
    prompts = draft.number("rollout.total_rollout_steps", default=0)
    per_update = draft.entries["async.mini_batch_size"].value * draft.entries["async.require_batches"].value
    if updates or prompts:
        draft.put(
            "engine.max_updates",
            updates or math.ceil(prompts / per_update),
            "trainer.total_training_steps" if updates else "rollout.total_rollout_steps",
        )
    every = max(draft.number("rollout.test_freq", "trainer.test_freq", default=0), 0)
    if is_async and every:
        every *= draft.entries["async.trigger_parameter_sync_step"].value
        draft.change(draft.named("rollout.test_freq", "trainer.test_freq"), "counted in syncs there, in updates here")
    if every and "data.eval_path" in draft.entries:
        draft.put("eval.every_updates", every, "rollout.test_freq", "trainer.test_freq")
    draft.copy("checkpoint.every", "trainer.save_freq", convert=lambda steps: max(steps, 0))
    draft.copy("checkpoint.keep", "trainer.max_actor_ckpt_to_keep")
    loggers = draft.take("trainer.logger")
    trackers = [name for name in loggers if name in _TRACKERS] if isinstance(loggers, list) else []
    if trackers:
        draft.put("log.trackers", trackers, "trainer.logger")
    draft.copy("log.project", "trainer.project_name")
