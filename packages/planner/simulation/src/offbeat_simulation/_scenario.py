"""The scenario of a simulation: settings, work, machines and what things cost, as a file says it.

Costs come in one of two ways. Either the sections `engines` and `trainer` give them; or `colocated` rows give the parts
of one training step on machines that took turns at generating and training, and `_calibration` turns them into costs,
in the place of `engines.step_s`, `engines.sample_s` and section `trainer`.
"""

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from offbeat_async_policy import AsyncConfig
from offbeat_core import METADATA_KEY, ConfigError, DataError, read_options, setting
from offbeat_simulation._calibration import ColocatedStep, calibrate, engine_time
from offbeat_simulation._simulate import SimulationReport, simulate
from offbeat_simulation._workload import (
    Cluster,
    DecodeCurve,
    DecodeSpeed,
    DecodeTime,
    Lengths,
    Workload,
    read_lengths,
)


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
    """All settings of a simulation; see the sections."""

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


SECTIONS: Final[dict[str, type]] = {
    "async": AsyncConfig,
    "work": WorkConfig,
    "lengths": LengthsConfig,
    "machines": MachinesConfig,
    "engines": EnginesConfig,
    "trainer": TrainerConfig,
    "sync": SyncConfig,
}
ROWS: Final = "colocated"


# What a recipe of grpo-async-app says of the same things: its section and key, ours, and the key of its section to
# multiply by.
_IN_RECIPES: Final = (
    ("rollout", "samples_per_prompt", "work", "group_size", ""),
    ("rollout", "max_tokens", "lengths", "longest", ""),
    ("rollout", "max_running", "engines", "max_running", ""),
    ("rollout", "tensor_parallel", "machines", "per_engine", ""),
    ("rollout", "num_engines", "machines", "rollout", "tensor_parallel"),
    ("engine", "num_ranks", "machines", "trainer", ""),
)
_LEFT_OPEN: Final = ("max_running", 0)
"""Left to the machine that a run starts on, which is not known here: the scenario's number stays."""


def read_scenario(path: Path | None, overrides: Sequence[tuple[str, str]] = (), recipe: Path | None = None) -> Scenario:
    """Read a scenario.

    Args:
        path: TOML, or JSON if its name ends so; None for the defaults.
        overrides: pairs such as ("--machines.rollout", "64"); they win over everything else.
        recipe: of grpo-async-app; its settings win over the scenario's.

    Raises:
        ConfigError: something is unknown, of another type, or out of bounds; each section that has such is named.
        DataError: a file cannot be read.
    """
    file = read_tables(path) if path else {}
    rows = file.pop(ROWS, [])
    layers = [(str(path), name, table) for name, table in file.items()]
    layers += [(str(recipe), name, table) for name, table in _settings_of(recipe).items()] if recipe else []
    layers += [(word, *_parse_override(word, text)) for word, text in overrides]
    for origin, name, table in layers:
        if name not in SECTIONS or not isinstance(table, dict):
            raise ConfigError(f"{origin}: [{name}] is no section of a scenario{_nearest(name)}")

    problems: list[str] = []
    sections = {}
    for name, kind in SECTIONS.items():
        own = [(origin, table) for origin, section, table in layers if section == name and table]
        where = ", ".join([*dict.fromkeys(origin for origin, _ in own), f"[{name}]"])
        merged = {key: value for _, table in own for key, value in table.items()}
        sections["async_" if name == "async" else name] = _read(where, kind, merged, problems)
    steps = [_read(f"{ROWS} row {number}", ColocatedStep, row, problems) for number, row in enumerate(rows, 1)]
    if problems:
        raise ConfigError("; ".join(problems))
    return Scenario(**sections, colocated=tuple(steps), folder=path.parent if path else Path())


def _read(where: str, kind: type, table: Any, problems: list[str]) -> Any:
    """Return the section or row; None, and one problem more, where it cannot be."""
    if not isinstance(table, dict):
        problems.append(f"{where}: a table is required, got {table!r}")
        return None
    try:
        return read_options(where, kind, table)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _settings_of(recipe: Path) -> dict[str, dict[str, Any]]:
    """Return what a recipe of grpo-async-app says of the same things, as sections of a scenario."""
    said = {name: table for name, table in read_tables(recipe).items() if isinstance(table, dict)}
    settings = {"async": said.get("async", {})}
    for theirs, their_key, section, key, factor in _IN_RECIPES:
        table = said.get(theirs, {})
        if their_key in table and (their_key, table[their_key]) != _LEFT_OPEN:
            settings.setdefault(section, {})[key] = table[their_key] * table.get(factor, 1)
    return settings


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file whose top level is a table."""
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: a table at the top is required, got {type(plain).__name__}")
    return plain


def describe_keys() -> str:
    """Every key of a scenario with its default, unit and meaning, section by section."""
    lines = []
    for name, cls in [*SECTIONS.items(), (ROWS, ColocatedStep)]:
        lines.append(f"[[{name}]]" if name == ROWS else f"[{name}]")
        for each in fields(cls):
            setting = each.metadata[METADATA_KEY]
            unit = f" {setting.unit}" if setting.unit else ""
            lines.append(f"  {each.name} = {json.dumps(each.default)}{unit}: {setting.doc}")
    return "\n".join(lines)


def _parse_override(word: str, text: str) -> tuple[str, dict[str, Any]]:
    """Section and value of `--section.key value`: TOML if it is, none, or else the text itself."""
    section, _, key = word.removeprefix("--").partition(".")
    try:
        value = None if text == "none" else tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return section, {key: value}


def _nearest(name: str) -> str:
    known = [*SECTIONS, ROWS]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class ScenarioModel:
    """Cost model of a scenario.

    Args:
        scenario: as read.
        lengths: of the completions.
        speed: of one rollout engine.
        trainer: what training costs.
        switch_s: of a colocated step.
    """

    scenario: Scenario
    lengths: Lengths
    speed: DecodeSpeed
    trainer: TrainerConfig
    switch_s: float

    @classmethod
    def of(cls, scenario: Scenario) -> "ScenarioModel":
        """Read what the scenario names, and fit what its colocated rows say.

        Raises:
            ConfigError, DataError: something of it cannot be used.
        """
        config = scenario.lengths
        measured = read_lengths(scenario.folder / config.file) if config.file else ()
        lengths = Lengths(measured=measured, median=config.median, spread=config.spread, longest=config.longest)
        if scenario.colocated:
            return cls._calibrated(scenario, lengths)
        engines = scenario.engines
        speed: DecodeSpeed = (
            DecodeCurve.parse(engines.decode_curve)
            if engines.decode_curve
            else DecodeTime(engines.step_s, engines.sample_s)
        )
        return cls(
            scenario=scenario,
            lengths=lengths,
            speed=speed,
            trainer=scenario.trainer,
            switch_s=scenario.sync.switch_s,
        )

    @classmethod
    def _calibrated(cls, scenario: Scenario, lengths: Lengths) -> "ScenarioModel":
        fit = calibrate(scenario.colocated)
        num_steps = fit.groups / scenario.async_.mini_batch_size
        trainer = replace(
            scenario.trainer,
            step_s=fit.update.fixed_s / num_steps,
            group_s=fit.update.work_s / fit.groups,
            logprob_step_s=fit.logprob.fixed_s / num_steps,
            logprob_group_s=fit.logprob.work_s / fit.groups,
        )
        return cls(
            scenario=scenario,
            lengths=lengths,
            speed=engine_time(fit, lengths, scenario.work.group_size, scenario.machines.per_engine),
            trainer=trainer,
            switch_s=fit.switch_s,
        )

    def run(self, config: AsyncConfig | None = None, machines: MachinesConfig | None = None) -> SimulationReport:
        """Simulate the scenario, with these settings or this split in the place of its own."""
        config, machines = config or self.scenario.async_, machines or self.scenario.machines
        num_engines = machines.rollout // machines.per_engine
        per_engine = self.scenario.engines.groups_per_engine
        if per_engine and not config.max_in_flight:
            config = replace(config, max_in_flight=per_engine * num_engines)
        recompute = self.trainer.recompute_logprobs
        return self._simulate(config, num_engines, machines.trainer, recompute, self.scenario.sync.sync_s)

    def run_colocated(self) -> SimulationReport:
        """Simulate synchronous training on all accelerators, which generate and train in turn."""
        config, machines = self.scenario.async_, self.scenario.machines
        synchronous = AsyncConfig(
            staleness_threshold=0.0,
            require_batches=config.require_batches * config.trigger_parameter_sync_step,
            mini_batch_size=config.mini_batch_size,
        )
        every = self.scenario.num_accelerators
        return self._simulate(synchronous, max(1, every // machines.per_engine), every, True, self.switch_s)

    def _simulate(
        self, config: AsyncConfig, num_engines: int, num_trainers: int, logprobs: bool, sync_s: float
    ) -> SimulationReport:
        trainer, work = self.trainer, self.scenario.work
        step_s = trainer.step_s + (trainer.logprob_step_s if logprobs else 0.0)
        group_s = trainer.group_s + (trainer.logprob_group_s if logprobs else 0.0)
        cluster = Cluster(
            num_engines=num_engines,
            max_running=self.scenario.engines.max_running,
            decode_curve=self.speed,
            update_s=step_s * config.require_batches + group_s * config.groups_per_update / num_trainers,
            update_tokens_per_s=num_trainers / trainer.token_s if trainer.token_s else 0.0,
            sync_s=sync_s,
        )
        return simulate(config, workload=self._workload(config, work.num_syncs), cluster=cluster)

    def _workload(self, config: AsyncConfig, num_syncs: int) -> Workload:
        work = self.scenario.work
        if work.filtered_share == 1:
            raise ConfigError("work.filtered_share=1 leaves nothing to train")
        num_groups = round(num_syncs * config.groups_per_sync / (1 - work.filtered_share))
        return Workload(
            num_groups=num_groups,
            group_size=work.group_size,
            lengths=self.lengths,
            filtered_share=work.filtered_share,
            seed=work.seed,
        )
