"""The schedule of the learning rate, the same under every training engine."""

import math

from offbeat_types._errors import ConfigError
from offbeat_types._training import TrainEngineConfig


def learning_rate_at(step: int, config: TrainEngineConfig) -> float:
    """Learning rate of update `step`, counted from 0.

    It rises linearly over the warm-up, reaching its peak at update `warmup_steps`, and falls to
    `min_learning_rate_ratio` of it at update `total_steps`, where it stays.
    """
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.min_learning_rate_ratio
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return peak
    done = min((step - warmup) / max(config.total_steps - warmup, 1), 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (floor + (1.0 - floor) * left)


def check_schedule(config: TrainEngineConfig) -> None:
    """Refuse a schedule that has no end, or ends before its warm-up does.

    Raises:
        ConfigError: with the setting to change.
    """
    if config.schedule != "constant" and config.total_steps <= config.warmup_steps:
        raise ConfigError(
            f"schedule {config.schedule!r} needs total_steps above warmup_steps: "
            f"got {config.total_steps} and {config.warmup_steps}; set total_steps, or schedule = 'constant'"
        )
