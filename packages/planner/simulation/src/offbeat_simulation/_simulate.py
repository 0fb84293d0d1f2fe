"""Drives the real policy with a simulated clock, at the size of a cluster.

The model: every engine decodes all its running samples at one speed, which the decode curve gives; a group goes whole
to the engine with the fewest samples and has finished with its last sample. Prompts, scoring and failures cost nothing.
A sync stops all engines and the trainer for `sync_s`. Real runs are slower; it is for comparing settings.
"""

import heapq
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import count
from typing import Final

from offbeat_async_policy import Action, AsyncConfig, AsyncPolicy, Drop, Finish, Submit, Sync, Update
from offbeat_simulation._workload import Cluster, DecodeSpeed, Workload


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Result of a simulation.

    Args:
        mode: name of the asynchronous mode.
        elapsed_s: simulated seconds of the run.
        updates, syncs, submitted, trained, filtered, dropped: see `Statistics`.
        groups_per_s, tokens_per_s: trained groups, and completion tokens of trained groups, per simulated second.
        seconds_per_sync: simulated seconds for as many groups as are trained between two syncs.
        trainer_idle_share: share of the time in which no update ran.
        engine_idle_share: share of the time in which an engine decoded nothing, over all engines.
        slot_use: samples running, as a share of max_running, over all engines and the whole time.
        wasted_token_share: sampled tokens of groups that were filtered or dropped, as a share of all sampled.
        trainer_shares: share of the trainer's time by what it did; see `TimeAccount`.
        engine_shares: the same for the engines.
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
    seconds_per_sync: float
    trainer_idle_share: float
    engine_idle_share: float
    slot_use: float
    wasted_token_share: float
    trainer_shares: dict[str, float]
    engine_shares: dict[str, float]
    mean_lag: float
    max_lag: int
    lags: dict[int, int]

    def speedup_over(self, other: "SimulationReport") -> float:
        """Trained groups per second, as a multiple of the other run's; nan when the other trained nothing."""
        return self.groups_per_s / other.groups_per_s if other.groups_per_s else float("nan")


TRAINER_KINDS: Final = ("training", "supply", "bound", "drain", "sync")
ENGINE_KINDS: Final = ("decoding", "tail", "bound", "drain", "end", "open", "sync")
TAIL_SHARE: Final = 1 / 8
WAITING: Final = "waiting"
"""State of a trainer that waits for groups: the account itself distinguishes supply from bound."""


class TimeAccount:
    """Adds up the trainer's and the engines' seconds; the caller says what holds from now on, and what time passed.

    trainer   training    an update runs
              supply      waits for groups, while at least half of the engines run more than a tail: they are too slow
              bound       waits for groups, while most engines run a tail or nothing: no rule lets another group start
              drain       a sync is due, and waits for what is in flight
              sync        weights travel
    engines   decoding    samples run
              tail        at most an eighth of the most samples that ever ran on one engine
              bound       empty: the staleness bound or max_in_flight is reached, and the trainer has not caught up
              drain       empty: a sync is due, and waits for other engines
              end         empty: no prompts are left
              open        empty although a group might start: nothing of the kind should last
              sync        weights travel

    Args:
        num_engines: rollout engines.
    """

    def __init__(self, num_engines: int) -> None:
        self.trainer_s: defaultdict[str, float] = defaultdict(float)
        self.engine_s: defaultdict[str, float] = defaultdict(float)
        self.trainer = WAITING
        self.closed = "open"
        self.syncing = False
        self._running = [0] * num_engines
        self._most_running = 1
        self._num_by_state = {"decoding": 0, "tail": 0, "empty": num_engines}

    def advance(self, passed_s: float) -> None:
        """Let time pass under what holds now."""
        if passed_s <= 0:
            return
        self.trainer_s[self._trainer_kind()] += passed_s
        if self.syncing:
            self.engine_s["sync"] += passed_s * len(self._running)
            return
        self.engine_s["decoding"] += passed_s * self._num_by_state["decoding"]
        self.engine_s["tail"] += passed_s * self._num_by_state["tail"]
        self.engine_s[self.closed] += passed_s * self._num_by_state["empty"]

    def engine_runs(self, engine: int, num_running: int) -> None:
        """Note that the engine runs so many samples from now on."""
        self._num_by_state[self._state(self._running[engine])] -= 1
        self._running[engine] = num_running
        if num_running > self._most_running:
            self._most_running = num_running
            self._num_by_state = dict.fromkeys(self._num_by_state, 0)
            for each in self._running:
                self._num_by_state[self._state(each)] += 1
        else:
            self._num_by_state[self._state(num_running)] += 1

    def _trainer_kind(self) -> str:
        if self.trainer != WAITING:
            return self.trainer
        return "supply" if 2 * self._num_by_state["decoding"] >= len(self._running) else "bound"

    def _state(self, num_running: int) -> str:
        if not num_running:
            return "empty"
        return "tail" if num_running <= self._most_running * TAIL_SHARE else "decoding"


def shares(seconds: dict[str, float], kinds: tuple[str, ...]) -> dict[str, float]:
    """Each kind's share of all seconds; zeros when there were none."""
    whole = sum(seconds.values()) or 1.0
    return {kind: seconds.get(kind, 0.0) / whole for kind in kinds}


class EngineModel:
    """Keeps a counter of tokens decoded per running sample: a sample ends when the counter has grown by its length.

    Args:
        curve: throughput by samples running.
        max_running: samples decoded at once; the others queue in order.
    """

    def __init__(self, curve: DecodeSpeed, max_running: int) -> None:
        self._speeds = [0.0] + [curve.tokens_per_s(n) / n for n in range(1, max_running + 1)]
        self._max_running = max_running
        self._running: list[tuple[float, int]] = []  # heap of (token counter at which it ends, group)
        self._queue: deque[tuple[int, int]] = deque()  # (group, length)
        self._token_counter = 0.0
        self._counted_to_s = 0.0
        self._paused = False
        self.revision = 0  # grows whenever `next_end_s` changes
        self.busy_s = 0.0
        self.sample_s = 0.0  # running samples, summed over time

    @property
    def num_running(self) -> int:
        """Samples running."""
        return len(self._running)

    def add(self, now_s: float, group_id: int, lengths: list[int]) -> list[int]:
        """Take the samples of a group; return the groups that begin to decode now."""
        self._advance(now_s)
        self._queue.extend((group_id, length) for length in lengths)
        return self._fill()

    def end_next(self, now_s: float) -> tuple[int, list[int]]:
        """End the sample that is due; return its group, and the groups that begin to decode in its place."""
        self._advance(now_s)
        ends_at_token, group_id = heapq.heappop(self._running)
        self._token_counter = ends_at_token  # without the rounding of the clock
        return group_id, self._fill()

    def remove(self, now_s: float, group_id: int) -> list[int]:
        """Abort a group; return the groups that begin to decode in its place."""
        self._advance(now_s)
        self._running = [sample for sample in self._running if sample[1] != group_id]
        heapq.heapify(self._running)
        self._queue = deque(sample for sample in self._queue if sample[0] != group_id)
        return self._fill()

    def pause(self, now_s: float) -> None:
        """Hold everything where it is."""
        self._advance(now_s)
        self._paused = True
        self.revision += 1

    def resume(self, now_s: float) -> list[int]:
        """Go on; return the groups that begin to decode now."""
        self._advance(now_s)
        self._paused = False
        return self._fill()

    def next_end_s(self) -> float | None:
        """Return when the next sample ends, if nothing changes before."""
        if self._paused or not self._running:
            return None
        tokens_left = self._running[0][0] - self._token_counter
        return self._counted_to_s + max(0.0, tokens_left) / self._speeds[len(self._running)]

    def _advance(self, now_s: float) -> None:
        passed_s, self._counted_to_s = now_s - self._counted_to_s, now_s
        if self._running and not self._paused:
            self._token_counter += passed_s * self._speeds[len(self._running)]
            self.busy_s += passed_s
            self.sample_s += passed_s * len(self._running)

    def _fill(self) -> list[int]:
        begun = []
        while not self._paused and self._queue and len(self._running) < self._max_running:
            group_id, length = self._queue.popleft()
            heapq.heappush(self._running, (self._token_counter + length, group_id))
            begun.append(group_id)
        self.revision += 1
        return begun


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
        self._loads = [0] * cluster.num_engines  # samples running or queued on each
        self._account = TimeAccount(cluster.num_engines)
        self._now_s = 0.0
        self._events: list[tuple[float, int, str, int, int]] = []  # (time, tie-break, kind, engine, its revision)
        self._tie_break = count()
        self._holder: dict[int, int] = {}  # group in flight -> engine
        self._samples_left: dict[int, int] = {}  # group in flight -> samples that have not ended
        self._began_at: dict[int, int] = {}  # group in flight -> engine version when its first sample began
        self._tokens: dict[int, int] = {}  # group, untrained -> its completion tokens
        self._filtered: set[int] = set()  # groups in flight that will turn out to have no learning signal
        self._trained_tokens = 0
        self._wasted_tokens = 0
        self._updating = False
        self._updating_s = 0.0

    def run(self) -> SimulationReport:
        while not self._perform(self._policy.actions()):
            self._note_who_waits()
            while not self._handle(heapq.heappop(self._events)):
                pass  # nothing that the policy is notified of
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

    def _handle(self, event: tuple[float, int, str, int, int]) -> bool:
        """Let the event happen; return whether the policy was notified."""
        time_s, _, kind, engine, revision = event
        if kind == "sample" and revision != self._engines[engine].revision:
            return False  # something changed on the engine since this was foreseen
        self._account.advance(time_s - self._now_s)
        self._now_s = time_s
        if kind == "sample":
            return self._end_sample(engine)
        if kind == "update":
            self._updating = False
            self._policy.update_finished()
        else:
            self._account.syncing = False
            self._policy.sync_finished()
            for index, model in enumerate(self._engines):
                self._note_begun(model.resume(self._now_s))
                self._schedule_next_end(index)
        return True

    def _note_who_waits(self) -> None:
        """Tell the account what holds until the next event, in the words of `TimeAccount`."""
        status = self._policy.status
        if status.sync_is_due:
            closed = "drain"
        elif status.rollouter_closed_because:
            closed = "bound" if status.num_not_started else "end"
        else:
            closed = "open"
        self._account.closed = closed
        if self._updating:
            self._account.trainer = "training"
        elif status.syncing:
            self._account.trainer = "sync"
        else:
            self._account.trainer = "drain" if closed == "drain" else WAITING

    def _submit(self, group_id: int) -> None:
        # Drawn from the group's own random numbers, so that a group is the same under every setting.
        draws = random.Random(f"{self._workload.seed}/{group_id}")
        lengths = [self._workload.lengths.draw(draws) for _ in range(self._workload.group_size)]
        engine = self._loads.index(min(self._loads))
        self._loads[engine] += len(lengths)
        self._holder[group_id] = engine
        self._samples_left[group_id] = len(lengths)
        self._tokens[group_id] = sum(lengths)
        if draws.random() < self._workload.filtered_share:
            self._filtered.add(group_id)
        self._note_begun(self._engines[engine].add(self._now_s, group_id, lengths))
        self._schedule_next_end(engine)

    def _end_sample(self, engine: int) -> bool:
        group_id, begun = self._engines[engine].end_next(self._now_s)
        self._loads[engine] -= 1
        self._note_begun(begun)
        self._schedule_next_end(engine)
        self._samples_left[group_id] -= 1
        if self._samples_left[group_id]:
            return False
        oldest_version = self._began_at[group_id]
        is_filtered = group_id in self._filtered
        self._forget_submitted(group_id)
        if is_filtered:
            self._wasted_tokens += self._tokens.pop(group_id)
            self._policy.group_filtered(group_id)
        else:
            self._policy.group_finished(group_id, oldest_version)
        return True

    def _update(self, update: Update) -> None:
        num_tokens = sum(self._tokens.pop(group) for group in update.group_ids)
        share = len(update.group_ids) / self._policy.config.groups_per_update
        seconds = self._cluster.seconds_for_update(share, num_tokens)
        self._trained_tokens += num_tokens
        self._updating = True
        self._updating_s += seconds
        self._schedule(self._now_s + seconds, "update")

    def _pause_for_sync(self) -> None:
        self._account.syncing = True
        for model in self._engines:
            model.pause(self._now_s)
        self._schedule(self._now_s + self._cluster.sync_s, "sync")

    def _drop(self, group_id: int) -> None:
        tokens = self._tokens.pop(group_id)
        if group_id not in self._holder:
            self._wasted_tokens += tokens
            return
        engine = self._holder[group_id]
        self._loads[engine] -= self._samples_left[group_id]
        self._forget_submitted(group_id)
        self._note_begun(self._engines[engine].remove(self._now_s, group_id))
        self._schedule_next_end(engine)

    def _forget_submitted(self, group_id: int) -> None:
        del self._holder[group_id], self._samples_left[group_id]
        self._began_at.pop(group_id, None)
        self._filtered.discard(group_id)

    def _note_begun(self, groups: list[int]) -> None:
        for group_id in groups:
            self._began_at.setdefault(group_id, self._policy.engine_version)

    def _schedule_next_end(self, engine: int) -> None:
        model = self._engines[engine]
        self._account.engine_runs(engine, model.num_running)
        end_s = model.next_end_s()
        if end_s is not None:
            self._schedule(end_s, "sample", engine, model.revision)

    def _schedule(self, time_s: float, kind: str, engine: int = 0, revision: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._tie_break), kind, engine, revision))

    def _report(self) -> SimulationReport:
        statistics, elapsed_s = self._policy.statistics, self._now_s
        engine_seconds = elapsed_s * len(self._engines) or 1.0
        per_second = 1 / elapsed_s if elapsed_s else 0.0
        groups_per_s = statistics.trained * per_second
        sampled = self._trained_tokens + self._wasted_tokens
        return SimulationReport(
            mode=self._policy.config.mode,
            elapsed_s=elapsed_s,
            updates=statistics.updates,
            syncs=statistics.syncs,
            submitted=statistics.submitted,
            trained=statistics.trained,
            filtered=statistics.filtered,
            dropped=statistics.dropped,
            groups_per_s=groups_per_s,
            tokens_per_s=self._trained_tokens * per_second,
            seconds_per_sync=self._policy.config.groups_per_sync / groups_per_s if groups_per_s else 0.0,
            trainer_idle_share=1 - self._updating_s * per_second,
            engine_idle_share=1 - sum(model.busy_s for model in self._engines) / engine_seconds,
            slot_use=sum(model.sample_s for model in self._engines) / engine_seconds / self._cluster.max_running,
            wasted_token_share=self._wasted_tokens / sampled if sampled else 0.0,
            trainer_shares=shares(self._account.trainer_s, TRAINER_KINDS),
            engine_shares=shares(self._account.engine_s, ENGINE_KINDS),
            mean_lag=statistics.mean_lag,
            max_lag=statistics.max_lag,
            lags=dict(sorted(statistics.lags.items())),
        )
