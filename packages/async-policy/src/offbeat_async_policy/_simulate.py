"""Drives the real policy with a simulated clock, at the size of a cluster.

The model: every engine decodes all its running samples at one speed, which the decode curve gives; a group goes whole
to the engine with the fewest samples and has finished with its last sample. Prompts, scoring and failures cost nothing.
A sync stops all engines and the trainer for `sync_s`. Real runs are slower; it is for comparing settings.
"""

import heapq
import random
from itertools import count

from offbeat_async_policy._actions import Action, Drop, Finish, Submit, Sync, Update
from offbeat_async_policy._cluster import Cluster, Workload
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._engine_model import EngineModel
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._simulation_report import SimulationReport
from offbeat_async_policy._time_account import ENGINE_KINDS, TRAINER_KINDS, WAITING, TimeAccount, shares


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
        self._events: list[tuple[float, int, str, int, int]] = []  # (time, tie-break, kind, engine, its epoch)
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
            while not self._take_in(heapq.heappop(self._events)):
                pass  # nothing that the policy would hear of
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

    def _take_in(self, event: tuple[float, int, str, int, int]) -> bool:
        """Let the event happen; return whether the policy was told something."""
        time_s, _, kind, engine, epoch = event
        if kind == "sample" and epoch != self._engines[engine].epoch:
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
                self._foresee(index)
        return True

    def _note_who_waits(self) -> None:
        """Tell the account what holds until the next event, in the words of `_time_account`."""
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
        self._foresee(engine)

    def _end_sample(self, engine: int) -> bool:
        group_id, begun = self._engines[engine].end_next(self._now_s)
        self._loads[engine] -= 1
        self._note_begun(begun)
        self._foresee(engine)
        self._samples_left[group_id] -= 1
        if self._samples_left[group_id]:
            return False
        oldest_version = self._began_at[group_id]
        is_filtered = group_id in self._filtered
        self._forget_flight(group_id)
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
        self._expect(self._now_s + seconds, "update")

    def _pause_for_sync(self) -> None:
        self._account.syncing = True
        for model in self._engines:
            model.pause(self._now_s)
        self._expect(self._now_s + self._cluster.sync_s, "sync")

    def _drop(self, group_id: int) -> None:
        tokens = self._tokens.pop(group_id)
        if group_id not in self._holder:
            self._wasted_tokens += tokens
            return
        engine = self._holder[group_id]
        self._loads[engine] -= self._samples_left[group_id]
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
        self._account.engine_runs(engine, model.num_running)
        end_s = model.next_end_s()
        if end_s is not None:
            self._expect(end_s, "sample", engine, model.epoch)

    def _expect(self, time_s: float, kind: str, engine: int = 0, epoch: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._tie_break), kind, engine, epoch))

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
