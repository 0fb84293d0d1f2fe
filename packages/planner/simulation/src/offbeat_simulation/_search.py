"""Looks for a better split of the accelerators and better settings, by simulating them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offbeat_async_policy import AsyncConfig
from offbeat_simulation._scenario import MachinesConfig, ScenarioModel
from offbeat_simulation._simulate import SimulationReport

STALENESS = (0.0, 0.1, 0.25, 0.5, 1.0)
MAX_SPLITS = 9
SYNCS_OF_A_TRIAL = 8
AS_GOOD_AS = 0.97


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the scenario.

    Args:
        config: settings.
        machines: split of the accelerators.
        report: of a simulation of `SYNCS_OF_A_TRIAL` syncs.
    """

    config: AsyncConfig
    machines: MachinesConfig
    report: SimulationReport

    @property
    def groups_behind(self) -> float:
        """Groups trained, on average, between a group's oldest token and its own training: comparable over R and K."""
        return self.report.mean_lag * self.config.groups_per_update


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Result of a search.

    Args:
        present: the scenario as it is.
        front: each faster than all that are less far behind; the least far behind first.
        best: of the front, the least far behind among those within 3 % of the fastest.
        num_tried: candidates simulated.
    """

    present: Candidate
    front: tuple[Candidate, ...]
    best: Candidate
    num_tried: int


def propose(model: ScenarioModel, max_groups_behind: float | None = None) -> Proposal:
    """Search splits first, then staleness and partial rollout on the three best, then R and K on the two best.

    Args:
        model: of the scenario; all candidates use as many accelerators in all, and its mini_batch_size.
        max_groups_behind: leave out what is further behind; None for no limit.
    """
    search = _Search(model)
    present = search.try_out(model.scenario.async_, model.scenario.machines)
    free = replace(model.scenario.async_, staleness_threshold=0.5, partial_rollout=True)
    for machines in _splits(model.scenario.machines):
        for config in {model.scenario.async_, free}:
            search.try_out(config, machines)
    for candidate in search.fastest(3, distinct_splits=True):
        for config in _stalenesses(candidate.config):
            search.try_out(config, candidate.machines)
    for candidate in search.fastest(2):
        for config in _cadences(candidate.config):
            search.try_out(config, candidate.machines)
    allowed = [
        each for each in search.tried.values() if max_groups_behind is None or each.groups_behind <= max_groups_behind
    ] or [present]
    front = _front(allowed)
    top = max(each.report.groups_per_s for each in front)
    best = next(each for each in front if each.report.groups_per_s >= AS_GOOD_AS * top)
    return Proposal(present=present, front=tuple(front), best=best, num_tried=len(search.tried))


class _Search:
    def __init__(self, model: ScenarioModel) -> None:
        scenario = model.scenario
        self._model = replace(
            model, scenario=replace(scenario, work=replace(scenario.work, num_syncs=SYNCS_OF_A_TRIAL))
        )
        self.tried: dict[tuple[AsyncConfig, MachinesConfig], Candidate] = {}

    def try_out(self, config: AsyncConfig, machines: MachinesConfig) -> Candidate:
        """Simulate the candidate, unless that was done."""
        key = (config, machines)
        if key not in self.tried:
            report = self._model.run(config, machines)
            self.tried[key] = Candidate(config=config, machines=machines, report=report)
        return self.tried[key]

    def fastest(self, num: int, *, distinct_splits: bool = False) -> list[Candidate]:
        """Return the candidates that train the most groups per second; of each split only the fastest, if asked for."""
        chosen: list[Candidate] = []
        for each in sorted(self.tried.values(), key=lambda tried: -tried.report.groups_per_s):
            if not distinct_splits or each.machines not in [other.machines for other in chosen]:
                chosen.append(each)
        return chosen[:num]


def _splits(machines: MachinesConfig) -> list[MachinesConfig]:
    """At most MAX_SPLITS ways to split all accelerators, evenly spread over those that are possible."""
    whole = machines.trainer + machines.rollout
    possible = [
        replace(machines, trainer=whole - rollout, rollout=rollout)
        for rollout in range(machines.per_engine, whole, machines.per_engine)
        if (whole - rollout) % machines.trainer_multiple == 0
    ]
    if len(possible) <= MAX_SPLITS:
        return possible
    return [possible[index * (len(possible) - 1) // (MAX_SPLITS - 1)] for index in range(MAX_SPLITS)]


def _stalenesses(config: AsyncConfig) -> Iterable[AsyncConfig]:
    for sigma in STALENESS:
        if sigma and int(config.groups_per_sync * sigma) < 1:
            continue  # less than one group more: AsyncConfig refuses it
        for partial in (False, True) if sigma else (False,):
            yield replace(config, staleness_threshold=sigma, partial_rollout=partial)


def _cadences(config: AsyncConfig) -> Iterable[AsyncConfig]:
    """Other R and K, with as many optimizer steps between two syncs, half, or twice as many."""
    present = config.require_batches * config.trigger_parameter_sync_step
    for num_steps in {max(1, present // 2), present, 2 * present}:
        for require_batches in range(1, num_steps + 1):
            cadence = num_steps // require_batches
            if num_steps % require_batches or (config.max_version_lag or cadence) < cadence:
                continue
            if int(num_steps * config.mini_batch_size * config.staleness_threshold) < (config.staleness_threshold > 0):
                continue
            yield replace(config, require_batches=require_batches, trigger_parameter_sync_step=cadence)


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda one: (one.groups_behind, -one.report.groups_per_s)):
        if not front or each.report.groups_per_s > 1.01 * front[-1].report.groups_per_s:
            front.append(each)
    return front
