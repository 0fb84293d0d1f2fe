"""The everyday settings: those that `train --help` lists, and that a first run is most likely to change."""

from typing import Final

EVERYDAY: Final = (
    "model.path",
    "data.path",
    "data.eval_size",
    "data.epochs",
    "data.max_prompt_tokens",
    "reward.name",
    "environment.name",
    "rollout.backend",
    "rollout.num_engines",
    "rollout.samples_per_prompt",
    "rollout.max_tokens",
    "rollout.max_model_len",
    "rollout.temperature",
    "engine.num_ranks",
    "engine.learning_rate",
    "engine.lora_rank",
    "engine.max_updates",
    "algorithm.advantage",
    "algorithm.kl_coefficient",
    "async.mini_batch_size",
    "async.staleness_threshold",
    "cluster.colocate",
    "checkpoint.every",
    "eval.every_updates",
    "log.trackers",
)
"""Keys in the order of the sections. A key that is added takes the place of another: a screen holds no more."""
