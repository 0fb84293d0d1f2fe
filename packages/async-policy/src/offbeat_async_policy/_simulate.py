"""Drives the real policy with a simulated clock, at the size of a cluster.

The model: every engine decodes all its running samples at one speed, which the decode curve gives; a group goes whole
to the engine with the fewest samples and has finished with its last sample. Prompts, scoring and failures cost nothing.
A sync stops all engines and the trainer for `sync_s`. Real runs are slower; it is for comparing settings.
"""

import heapq
import random
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from offbeat_async_policy._actions import Action, Drop, Finish, Submit, Sync, Update
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._engine_model import EngineModel
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._workload import DecodeCurve, Lengths
from offbeat_types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is generated and trained.

    Args:
        num_groups: prompt groups of the run.
        group_size: samples of one group.
        lengths: of the completions.
        filtered_share: share of groups without learning signal, in [0, 1].
        seed: of everything random.
    """

    num_groups: int
    group_size: int = 8
    lengths: Lengths = field(default_factory=Lengths)
    filtered_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.num_groups >= 1, "num_groups", "at least 1", self.num_groups)
        _require(self.group_size >= 1, "group_size", "at least 1", self.group_size)
        _require(0 <= self.filtered_share <= 1, "filtered_share", "a share in [0, 1]", self.filtered_share)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What it runs on.

    Args:
        num_engines: rollout engines.
        max_running: samples one engine decodes at once.
        decode_curve: throughput of one engine.
        update_s: time of one full update.
        update_tokens_per_s: completion tokens trained per second, on top of update_s; 0 for none.
        sync_s: time of one weight sync.
    """

    num_engines: int
    max_running: int
    decode_curve: DecodeCurve
    update_s: float
    update_tokens_per_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        _require(self.num_engines >= 1, "num_engines", "at least 1", self.num_engines)
        _require(self.max_running >= 1, "max_running", "at least 1", self.max_running)
        for name in ("update_s", "update_tokens_per_s", "sync_s"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), name, "a finite number, at least 0", value)

    def seconds_for_update(self, share: float, num_tokens: int) -> float:
        """Time of an update with this share of its full number of groups."""
        return self.update_s * share + (num_tokens / self.update_tokens_per_s if self.update_tokens_per_s else 0.0)


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """What came of it.

    Args:
        mode: name of the asynchronous mode.
        elapsed_s: simulated seconds of the run.
        updates, syncs, submitted, trained, filtered, dropped: see `Statistics`.
        groups_per_s, tokens_per_s: trained groups, and completion tokens of trained groups, per simulated second.
        trainer_idle_share: share of the time in which no update ran.
        engine_idle_share: share of the time in which an engine decoded nothing, over all engines.
        slot_use: samples running, as a share of max_running, over all engines and the whole time.
        mean_lag, max_lag: in updates.
        lags: trained groups by lag.
    """

    mode: str
    elapsed_s: float
    updates: int
    syncs: int
    submitted: int
    trained: int
    filtered: int
    dropped: int
    groups_per_s: float
    tokens_per_s: float
    trainer_idle_share: float
    engine_idle_share: float
    slot_use: float
    mean_lag: float
    max_lag: int
    lags: dict[int, int]

    def speedup_over(self, other: "SimulationReport") -> float:
        """Trained groups per second, as a multiple of the other run's; nan when the other trained nothing."""
        return self.groups_per_s / other.groups_per_s if other.groups_per_s else float("nan")

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def simulate(config: AsyncConfig, *, workload: Workload, cluster: Cluster) -> SimulationReport:
    """Run the policy to its end on a simulated cluster.

    Raises:
        ConfigError: a number of the workload or of the cluster is out of range.
    """
    return _Simulation(config, workload, cluster).run()


class _Simulation:
    def __init__(self, config: AsyncConfig, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._policy = AsyncPolicy(config, workload.num_groups)
        self._engines = [EngineModel(cluster.decode_curve, cluster.max_running) for _ in range(cluster.num_engines)]
        self._now_s = 0.0
        self._events: list[tuple[float, int, str, int, int]] = []  # (time, tie-break, kind, engine, its epoch)
        self._tie_break = count()
        self._holder: dict[int, int] = {}  # group in flight -> engine
        self._samples_left: dict[int, int] = {}  # group in flight -> samples that have not ended
        self._began_at: dict[int, int] = {}  # group in flight -> engine version when its first sample began
        self._tokens: dict[int, int] = {}  # group, untrained -> its completion tokens
        self._filtered: set[int] = set()  # groups in flight that will turn out to have no learning signal
        self._trained_tokens = 0
        self._updating_s = 0.0

    def run(self) -> SimulationReport:
        while not self._perform(self._policy.actions()):
            self._take_in(heapq.heappop(self._events))
        return self._report()

    def _perform(self, actions: list[Action]) -> bool:
        for action in actions:
            match action:
                case Submit(group_id):
                    self._submit(group_id)
                case Update():
                    self._update(action)
                case Sync():
                    self._pause_for_sync()
                case Drop(group_id):
                    self._drop(group_id)
                case Finish():
                    return True
        return False

    def _take_in(self, event: tuple[float, int, str, int, int]) -> None:
        time_s, _, kind, engine, epoch = event
        if kind == "sample" and epoch != self._engines[engine].epoch:
            return  # something changed on the engine since this was foreseen
        self._now_s = time_s
        if kind == "sample":
            self._end_sample(engine)
        elif kind == "update":
            self._policy.update_finished()
        else:
            self._policy.sync_finished()
            for index, model in enumerate(self._engines):
                self._note_begun(model.resume(self._now_s))
                self._foresee(index)

    def _submit(self, group_id: int) -> None:
        # Drawn from the group's own random numbers, so that a group is the same under every setting.
        draws = random.Random(f"{self._workload.seed}/{group_id}")
        lengths = [self._workload.lengths.draw(draws) for _ in range(self._workload.group_size)]
        engine = min(range(len(self._engines)), key=lambda index: self._engines[index].num_samples)
        self._holder[group_id] = engine
        self._samples_left[group_id] = len(lengths)
        self._tokens[group_id] = sum(lengths)
        if draws.random() < self._workload.filtered_share:
            self._filtered.add(group_id)
        self._note_begun(self._engines[engine].add(self._now_s, group_id, lengths))
        self._foresee(engine)

    def _end_sample(self, engine: int) -> None:
        group_id, begun = self._engines[engine].end_next(self._now_s)
        self._note_begun(begun)
        self._foresee(engine)
        self._samples_left[group_id] -= 1
        if self._samples_left[group_id]:
            return
        oldest_version = self._began_at[group_id]
        is_filtered = group_id in self._filtered
        self._forget_flight(group_id)
        if is_filtered:
            del self._tokens[group_id]
            self._policy.group_filtered(group_id)
        else:
            self._policy.group_finished(group_id, oldest_version)

    def _update(self, update: Update) -> None:
        num_tokens = sum(self._tokens.pop(group) for group in update.group_ids)
        share = len(update.group_ids) / self._policy.config.groups_per_update
        seconds = self._cluster.seconds_for_update(share, num_tokens)
        self._trained_tokens += num_tokens
        self._updating_s += seconds
        self._expect(self._now_s + seconds, "update")

    def _pause_for_sync(self) -> None:
        for model in self._engines:
            model.pause(self._now_s)
        self._expect(self._now_s + self._cluster.sync_s, "sync")

    def _drop(self, group_id: int) -> None:
        del self._tokens[group_id]
        if group_id in self._holder:
            engine = self._holder[group_id]
            self._forget_flight(group_id)
            self._note_begun(self._engines[engine].remove(self._now_s, group_id))
            self._foresee(engine)

    def _forget_flight(self, group_id: int) -> None:
        del self._holder[group_id], self._samples_left[group_id]
        self._began_at.pop(group_id, None)
        self._filtered.discard(group_id)

    def _note_begun(self, groups: list[int]) -> None:
        for group_id in groups:
            self._began_at.setdefault(group_id, self._policy.engine_version)

    def _foresee(self, engine: int) -> None:
        model = self._engines[engine]
        end_s = model.next_end_s()
        if end_s is not None:
            self._expect(end_s, "sample", engine, model.epoch)

    def _expect(self, time_s: float, kind: str, engine: int = 0, epoch: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._tie_break), kind, engine, epoch))

    def _report(self) -> SimulationReport:
        statistics, elapsed_s = self._policy.statistics, self._now_s
        engine_seconds = elapsed_s * len(self._engines) or 1.0
        per_second = 1 / elapsed_s if elapsed_s else 0.0
        return SimulationReport(
            mode=self._policy.config.mode,
            elapsed_s=elapsed_s,
            updates=statistics.updates,
            syncs=statistics.syncs,
            submitted=statistics.submitted,
            trained=statistics.trained,
            filtered=statistics.filtered,
            dropped=statistics.dropped,
            groups_per_s=statistics.trained * per_second,
            tokens_per_s=self._trained_tokens * per_second,
            trainer_idle_share=1 - self._updating_s * per_second,
            engine_idle_share=1 - sum(model.busy_s for model in self._engines) / engine_seconds,
            slot_use=sum(model.sample_s for model in self._engines) / engine_seconds / self._cluster.max_running,
            mean_lag=statistics.mean_lag,
            max_lag=statistics.max_lag,
            lags=dict(sorted(statistics.lags.items())),
        )


def _require(holds: bool, name: str, required: str, got: float) -> None:
    if not holds:
        raise ConfigError(f"{name}: required {required}, got {got:g}")
