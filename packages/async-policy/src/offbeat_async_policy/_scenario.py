"""The scenario of a simulation: settings, work, machines and what things cost, as a file says it.

Costs come in one of two ways. Either the sections `engines` and `trainer` give them; or `colocated` rows give the parts
of one training step on machines that took turns at generating and training, and `_calibration` turns them into costs,
in the place of `engines.step_s`, `engines.sample_s` and section `trainer`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from offbeat_async_policy._calibration import ColocatedStep
from offbeat_async_policy._config import AsyncConfig
from offbeat_types import ConfigError, setting


@dataclass(frozen=True, kw_only=True)
class WorkConfig:
    """Section `work`: what is generated and trained."""

    num_syncs: int = setting(20, "Weight syncs to simulate; each follows K updates.", "syncs", ge=1)
    group_size: int = setting(8, "Samples of one group.", "samples", ge=1)
    filtered_share: float = setting(0.0, "Share of groups without learning signal.", ge=0, le=1)
    seed: int = setting(0, "Of everything random.", ge=0)


@dataclass(frozen=True, kw_only=True)
class LengthsConfig:
    """Section `lengths`: of the completions; log-normal unless a file of measured ones is named."""

    median: float = setting(1000.0, "Of the log-normal.", "tokens", ge=1)
    spread: float = setting(0.8, "Standard deviation of the logarithm.", ge=0, lt=10)
    longest: int = setting(8192, "Limit on every length; 0 for none.", "tokens", ge=0)
    file: str = setting("", "Measured lengths: numbers, JSON lines, or a run folder; beside the scenario if relative.")


@dataclass(frozen=True, kw_only=True)
class MachinesConfig:
    """Section `machines`: the accelerators, and how they are split."""

    trainer: int = setting(8, "Accelerators that train.", "accelerators", ge=1)
    rollout: int = setting(8, "Accelerators that generate.", "accelerators", ge=1)
    per_engine: int = setting(1, "Accelerators of one rollout engine: tensor times pipeline parallel.", ge=1)
    trainer_multiple: int = setting(1, "The trainer can have multiples of so many accelerators.", ge=1)


@dataclass(frozen=True, kw_only=True)
class EnginesConfig:
    """Section `engines`: the speed of one rollout engine."""

    max_running: int = setting(1024, "Samples one engine decodes at once.", "samples", ge=1)
    groups_per_engine: int = setting(
        0, "Groups in flight for each engine; sets max_in_flight unless that is set. 0: no own bound.", "groups", ge=0
    )
    step_s: float = setting(0.016, "Time of a decoding step that does not depend on the samples running.", "s", ge=0)
    sample_s: float = setting(0.0002, "Time that each running sample adds to a decoding step.", "s", ge=0)
    decode_curve: str = setting(
        "", "Measured throughput, samples:tokens_per_s,..., in the place of step_s and sample_s."
    )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Section `trainer`: what training costs. Work is shared by the trainer's accelerators, the rest is not."""

    step_s: float = setting(2.0, "Time of an optimizer step that more accelerators do not shorten.", "s", ge=0)
    group_s: float = setting(2.0, "Work of one group.", "accelerator-seconds", ge=0)
    token_s: float = setting(0.0, "Work of one completion token, on top.", "accelerator-seconds", ge=0)
    logprob_step_s: float = setting(0.0, "As step_s, for the pass over old log-probabilities.", "s", ge=0)
    logprob_group_s: float = setting(0.0, "As group_s, for that pass.", "accelerator-seconds", ge=0)
    recompute_logprobs: bool = setting(
        False, "Make that pass in asynchronous training too, as colocated training does."
    )


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Section `sync`: moving weights."""

    sync_s: float = setting(5.0, "Time of one weight sync, in which nothing else runs.", "s", ge=0)
    switch_s: float = setting(0.0, "What a colocated step takes beside its parts: sleep, wake, data.", "s", ge=0)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything a simulation can be told; see the sections."""

    async_: AsyncConfig = field(default_factory=AsyncConfig)
    work: WorkConfig = field(default_factory=WorkConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    machines: MachinesConfig = field(default_factory=MachinesConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    colocated: tuple[ColocatedStep, ...] = ()
    folder: Path = Path()

    def __post_init__(self) -> None:
        machines = self.machines
        if machines.rollout % machines.per_engine:
            raise ConfigError(
                f"machines.rollout={machines.rollout} is not a multiple of machines.per_engine={machines.per_engine}: "
                f"use {max(1, machines.rollout // machines.per_engine) * machines.per_engine}"
            )
        if machines.trainer % machines.trainer_multiple:
            raise ConfigError(
                f"machines.trainer={machines.trainer} is not a multiple of machines.trainer_multiple="
                f"{machines.trainer_multiple}"
            )

    @property
    def num_accelerators(self) -> int:
        """Trainer and rollout together."""
        return self.machines.trainer + self.machines.rollout
