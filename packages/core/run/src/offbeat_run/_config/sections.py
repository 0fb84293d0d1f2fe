"""The sections every offbeat application has: `checkpoint`, `log`, `liveness` and `profile`."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, RoleName, TracePlan, setting

VALIDATED_EVERY: Final = 50
"""Updates between two validations where nothing is said: as often as checkpoints, so that each has a score."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints and which to keep."""

    every: int = setting(
        VALIDATED_EVERY, "Write a checkpoint after this many updates; 0: only at the end.", "updates", ge=0
    )
    keep: int = setting(2, "Checkpoints to keep, the latest ones; the best one stays besides.", "checkpoints", ge=1)
    save_optimizer: bool = setting(True, "Write optimizer, schedule and RNG too; without them no exact resume.")
    on_signal_s: float = setting(
        25.0,
        "Longest time to finish the update in progress and save it when a signal asks the run to end (Ctrl-C, SIGTERM, "
        "SIGHUP, SIGUSR1): less than the 30 s that Slurm and Kubernetes give. 0: end at once.",
        "s",
        ge=0,
    )

    def room_bytes(self, num_parameters: int, *, is_lora: bool) -> int:
        """Room on the disk for all checkpoints kept at once, one in the making, the best, and the rest of the run."""
        return self.checkpoint_bytes(num_parameters, is_lora=is_lora) * (self.keep + 2) + 2**26

    def checkpoint_bytes(self, num_parameters: int, *, is_lora: bool) -> int:
        """Size of one checkpoint: float32 weights, and two moments of all of them unless LoRA trains a few."""
        has_moments = self.save_optimizer and not is_lora
        return num_parameters * 4 * (3 if has_moments else 1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Section `log`: records of a run, and trackers that get them too."""

    generations: int = setting(16, "Completions written down per validation.", "completions", ge=0)
    train_generations: int = setting(4, "Completions written down per update trained on.", "completions", ge=0)
    tensorboard: bool = setting(True, "Write TensorBoard files as well as metrics.jsonl.")
    timeline: bool = setting(True, "Write timeline.json: when each process worked and waited; opens in Perfetto.")
    trackers: tuple[str, ...] = setting(
        (),
        "Trackers that get the metrics too; each needs its package, and the error without it says which.",
        choices=("wandb", "trackio", "mlflow"),
    )
    project: str = setting("offbeat", "Project (wandb, trackio) or experiment (mlflow) the run is listed under.")
    prometheus_port: int | None = setting(
        None,
        "Answer Prometheus here with the latest metrics, at /metrics; 0: a free port; none: do not.",
        ge=0,
        le=65535,
    )
    prometheus_host: str = setting(
        "127.0.0.1",
        "Address that it listens on. With OFFBEAT_METRICS_TOKEN set, requests must bring that token; any address but "
        "this machine's own needs one, and loopback is every user of the machine.",
    )


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    """Section `liveness`: the monitor that names the processes that wait for each other when a run is stalled."""

    stall_after_s: float = setting(60.0, "A wait this long is looked into; ranks that are stuck end.", "s", gt=0)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Section `profile`: traces of some steps, for Perfetto."""

    steps: str = setting("", "FIRST:LAST, such as 3:6: trace the updates from FIRST up to, not including, LAST.")
    roles: list[str] = setting(
        ["trainer"], "Roles that trace themselves: all of a kind, such as trainer, or one, such as trainer-1."
    )
    max_bytes: int = setting(
        2**30, "Largest size of the traces of one role: a step that would exceed it is not kept.", "bytes", ge=2**16
    )

    def __post_init__(self) -> None:
        if self.steps and (not re.fullmatch(r"\d+:\d+", self.steps) or not len(self.range)):
            raise ConfigError(
                f"profile.steps must be FIRST:LAST with FIRST below LAST, such as 3:6; got {self.steps!r}"
            )

    @property
    def range(self) -> range:
        """The updates to trace, counted from 0; empty for none."""
        first, _, last = self.steps.partition(":")
        return range(int(first), int(last)) if self.steps else range(0)

    def check(self, roles: Collection[RoleName], num_updates: int) -> None:
        """Find what would trace nothing, before anything starts.

        Args:
            roles: all that the run has and that can trace themselves.
            num_updates: of the run.

        Raises:
            ConfigError: the steps begin after the run's end, or a role is not there.
        """
        if not self.range:
            return
        if self.range.start >= num_updates:
            raise ConfigError(
                f"profile.steps = {self.steps} begins after the last of {num_updates} updates, counted from 0"
            )
        for wanted in self.roles:
            if not any(wanted in (str(role), role.kind) for role in roles):
                has = ", ".join(map(str, roles))
                raise ConfigError(f"profile.roles: no role {wanted!r} to trace in this run; it has {has}")

    def plan(self, role: RoleName, folder: Path) -> TracePlan | None:
        """Return what a role traces; None for nothing.

        Args:
            role: of this run.
            folder: of the run's traces.
        """
        if not self.range or not {str(role), role.kind} & set(self.roles):
            return None
        return TracePlan(
            role=str(role),
            folder=str(folder),
            first=self.range.start,
            last=self.range.stop,
            max_bytes=self.max_bytes,
        )
