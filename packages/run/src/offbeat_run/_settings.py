"""The sections every offbeat application has: `checkpoint`, `log` and `liveness`."""

from dataclasses import dataclass

from offbeat_types import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints and which to keep."""

    every: int = setting(50, "Write a checkpoint after this many updates; 0: only at the end.", "updates", ge=0)
    keep: int = setting(2, "Checkpoints to keep, the latest ones; the best one stays besides.", "checkpoints", ge=1)
    save_optimizer: bool = setting(True, "Write optimizer, schedule and RNG too; without them no exact resume.")

    def room_bytes(self, num_parameters: int, *, is_lora: bool) -> int:
        """Room on the disk for all checkpoints kept at once, one in the making, the best, and the rest of the run."""
        return self.checkpoint_bytes(num_parameters, is_lora=is_lora) * (self.keep + 2) + 2**26

    def checkpoint_bytes(self, num_parameters: int, *, is_lora: bool) -> int:
        """Size of one checkpoint: float32 weights, and two moments of all of them unless LoRA trains a few."""
        has_moments = self.save_optimizer and not is_lora
        return num_parameters * 4 * (3 if has_moments else 1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run tells while it goes on."""

    generations: int = setting(16, "Completions written down per validation.", "completions", ge=0)
    train_generations: int = setting(4, "Completions written down per update trained on.", "completions", ge=0)
    tensorboard: bool = setting(True, "Write TensorBoard files as well as metrics.jsonl.")
    timeline: bool = setting(True, "Write timeline.json: who worked and who waited; opens in Perfetto.")
    trackers: tuple[str, ...] = setting(
        (),
        "Trackers that get the metrics too; each needs its package, and the error without it says which.",
        choices=("wandb", "trackio", "mlflow"),
    )
    project: str = setting("offbeat", "Project (wandb, trackio) or experiment (mlflow) the run is listed under.")


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    """Section `liveness`: the monitor that names who waits for whom when the processes of a run stand still."""

    stall_after_s: float = setting(60.0, "A wait this long is looked into; ranks that are stuck end.", "s", gt=0)
