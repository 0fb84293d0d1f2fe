"""Everything a run writes down while it runs: metrics, generations, timeline, progress."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.groups import SampledGroup
from grpo_async_app._run.log.cut_off_alarm import CutOffAlarm
from grpo_async_app._run.log.mismatch_alarm import MismatchAlarm
from grpo_async_app._run.validation import Validation, accuracy_metric
from offbeat_async_policy import BusyShares, Statistics
from offbeat_core import Metric, Metrics, WeightPart
from offbeat_data import Prompt
from offbeat_run import HELD_OUT, Generation, MetricsLine, RunFolder, RunLog, clock_s, iter_metrics, read_alarms

WAIT_SHOWN_AFTER_S = 120.0
_logging = logging.getLogger(__name__)
_FLAGS: Final = ("failed", "timed_out", "unreadable")
"""Parts of a reward that say what went wrong while it judged, 1 where it did."""


class RunLogger:
    """Writes to the run folder and to the terminal: opened anew with each trainer of the run.

    Args:
        num_updates: updates of the whole run, for the progress.

    Attributes:
        version: updates that were written down.
        last_validated: version of the last validation that was written down, by this process or an earlier one; -1
            for none.
        last_accuracy: of the set that `eval.score_set` names, in that validation; None for none.
    """

    def __init__(self, run: RunFolder, config: GrpoConfig, num_updates: int) -> None:
        self._run, self._config, self._num_updates = run, config, num_updates
        self._log: RunLog | None = None
        self.version, self.last_validated = 0, -1
        self.last_accuracy: float | None = None

    @contextmanager
    def opened(self, last_step: int) -> Iterator[None]:
        """Write while the block lasts; what was written after `last_step`, the checkpoint's, vanishes (-1: all)."""
        self._last_wait_s, self._num_left_out_logged, self._last_left_out_logged = 0.0, 0, ""
        self.version = max(last_step, 0)
        with RunLog(self._run, self._config.log, self._num_updates, last_step) as self._log:
            alarms = [alarm.text for alarm in read_alarms(self._run)]
            self._read_last_validation(iter_metrics(self._run.metrics))
            past = iter_metrics(self._run.metrics)
            self._mismatch_alarm = self._new_mismatch_alarm(past, alarms)
            self._cut_off_alarm = CutOffAlarm(self._config, alarms)
            yield

    def _new_mismatch_alarm(self, past: Iterable[MetricsLine], alarms: Iterable[str]) -> MismatchAlarm:
        if self._config.is_exact:
            return MismatchAlarm(0.0, past, alarms, exact=True)
        return MismatchAlarm(self._config.algorithm.mismatch_alarm_nats, past, alarms)

    def _read_last_validation(self, lines: Iterable[MetricsLine]) -> None:
        validated = (line for line in lines if any(name.startswith("eval/") for name in line.values))
        last = max(validated, key=lambda line: line.step, default=None)
        self.last_validated, self.last_accuracy = -1, None
        if last is not None:
            sets = (self._config.eval.score_set or HELD_OUT, *self._config.eval.sets)
            found = (last.values.get(accuracy_metric(name)) for name in sets)
            self.last_validated = last.step
            self.last_accuracy = next((value for value in found if isinstance(value, float)), None)

    @property
    def _opened(self) -> RunLog:
        assert self._log is not None
        return self._log

    def worked(self, role: str, work: str, start_s: float, end_s: float) -> None:
        """Note a stretch in which a role was busy."""
        self._opened.span(role, work, start_s, end_s)

    def synced(self, version: int, start_s: float, end_s: float) -> None:
        self._opened.span("weight sync", "sync", start_s, end_s, {"version": version})

    def took_weights(self, role: str, part: WeightPart, version: int, start_s: float) -> None:
        self._opened.span(role, f"take weights: {part}", start_s, clock_s(), {"version": version})

    def handed_over(self, role: str, step: str, start_s: float, end_s: float, resident_bytes: int) -> None:
        """Note a step in which memory changed hands between roles that share devices."""
        self._opened.span(role, step, start_s, end_s, {"resident_bytes": resident_bytes})

    def updated(
        self,
        version: int,
        groups: list[SampledGroup],
        prompts: Mapping[int, Prompt],
        trained: Metrics,
        shares: BusyShares,
        statistics: Statistics,
        accidents: Metrics,
        left_out: Mapping[str, int],
    ) -> bool:
        """Write down one update: `version` counts it too, `accidents` has happened to roles.

        Returns:
            Whether it has raised the alarm about a mismatch.
        """
        self.version = version
        values = {
            **trained,
            **_group_metrics(groups, version - 1),
            **(_turn_metrics(groups) if self._config.has_turns else {}),
            "async/trainer_idle_share": Metric(value=shares.trainer_idle),
            "async/rollout_idle_share": Metric(value=shares.rollout_idle),
            "async/overlap_share": Metric(value=shares.overlap),
            "perf/update_s": Metric(value=shares.wall_s),
            "perf/tokens_per_s": Metric(value=sum(group.num_tokens for group in groups) / shares.wall_s),
            "perf/samples_per_s": Metric(value=sum(len(g.rewards) for g in groups) / shares.wall_s),
            "groups/filtered": Metric(value=float(statistics.filtered), how="last"),
            "groups/dropped": Metric(value=float(statistics.dropped), how="last"),
            "groups/reissued": Metric(value=float(statistics.reissued), how="last"),
            **accidents,
        }
        values.update({metric: _count(number) for metric, number in left_out.items()})
        self._opened.write(version, {**values, "async/lag_histogram": _lag_histogram(groups, version - 1)})
        num_samples = sum(len(group.rewards) for group in groups)
        mismatch = self._mismatch_alarm.look(version, trained)
        cut_off = self._cut_off_alarm.look(version, values["train/cut_off_share"].value, num_samples)
        for alarm in filter(None, (mismatch, cut_off)):
            self._opened.alarm(version, alarm)
        shown = groups[: self._config.log.train_generations]
        self._opened.write_generations(_generation(version, group, prompts[group.item]) for group in shown)
        return bool(mismatch)

    def validated(self, validation: Validation) -> None:
        self.last_validated = validation.version
        self.last_accuracy = validation.accuracy(self._config.eval.score_set)
        self._opened.write_validation(validation.version, validation.numbers(), validation.items)
        shown: dict[str, list[Generation]] = {}
        for answered in validation.answered:
            kept = shown.setdefault(answered.asked.name, [])
            if answered.samples and len(kept) < self._config.log.generations:
                first = answered.samples[0]
                trajectory, score = first.trajectories[0], first.score
                kept.append(
                    Generation(
                        step=validation.version,
                        kind="validation",
                        set=answered.asked.name,
                        version=trajectory.oldest_version,
                        prompt=answered.prompt.text,
                        completion=trajectory.text,
                        reward=score.value,
                        answer=answered.prompt.answer or "",
                        stop_reason=trajectory.stop_reason,
                        num_tokens=trajectory.num_tokens,
                        images=tuple(picture.preview() for picture in answered.prompt.pictures),
                    )
                )
        self._opened.write_generations(generation for kept in shown.values() for generation in kept)

    def waiting(self, wait: str, idle_s: float) -> None:
        """Report which role waits for which, when nothing has moved for a while; once a minute at most."""
        if idle_s >= WAIT_SHOWN_AFTER_S and clock_s() - self._last_wait_s >= 60:
            self._last_wait_s = clock_s()
            self._opened.message(f"nothing moved for {idle_s:.0f} s: {wait}")

    def left_out(self, samples: Mapping[str, int], last: str) -> None:
        """Report that samples were left out: the first time, and then whenever there are twice as many."""
        total = sum(samples.values())
        if total >= 2 * self._num_left_out_logged:
            self._num_left_out_logged = total
            latest, self._last_left_out_logged = f"; the latest: {last}" * (last != self._last_left_out_logged), last
            counts = ", ".join(f"{number} {metric}" for metric, number in sorted(samples.items()))
            self._opened.message(f"samples left out: {counts}{latest}")

    def message(self, text: str) -> None:
        """Print a line above the progress; before that is there, log it."""
        if self._log is None:
            _logging.warning(text)
        else:
            self._log.message(text)


def _group_metrics(groups: list[SampledGroup], version: int) -> Metrics:
    rewards = [reward for group in groups for reward in group.rewards]
    samples = [sample for group in groups for sample in group.samples]
    versions = [{each.version for one in sample for each in one.segments} for sample in samples]
    lags = [version - group.oldest_version for group in groups]
    parts = _part_metrics([parts for group in groups for parts in group.parts])
    return {
        "train/reward": _mean(rewards),
        "train/response_tokens": _ratio(sum(group.num_tokens for group in groups), len(rewards)),
        "train/cut_off_share": _mean([any(one.ended != "done" for one in sample) for sample in samples]),
        "train/mixed_version_share": _mean([len(each) > 1 for each in versions]),
        "train/lag_mean": _mean(lags),
        "train/lag_max": Metric(value=float(max(lags, default=0)), how="max"),
        **(parts if len(parts) > 1 else {}),
    }


def _part_metrics(parts_S: Sequence[Mapping[str, float]]) -> Metrics:
    """Return the mean of each part of the reward, over the samples that have it: rewards differ in their parts."""
    found: Metrics = {}
    for name in sorted({name for parts in parts_S for name in parts}):
        is_flag = name in _FLAGS  # nothing went wrong with the samples that lack it
        found[f"reward/{name}"] = _mean([parts.get(name, 0.0) for parts in parts_S if is_flag or name in parts])
    return found


def _turn_metrics(groups: list[SampledGroup]) -> Metrics:
    """Return how much the environment or the agent was asked in one sample, and how much it said."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    num_samples = sum(len(group.rewards) for group in groups)
    read = sum(len(trajectory.ids) - trajectory.num_tokens for trajectory in trajectories)
    return {
        "train/turns": _ratio(sum(len(trajectory.turns) for trajectory in trajectories), num_samples),
        "train/read_tokens": _ratio(read, num_samples),
        "train/trajectories": _ratio(len(trajectories), num_samples),
    }


def _count(number: int) -> Metric:
    return Metric(value=float(number), how="last")


def _mean(values: "list[float] | list[int] | list[bool]") -> Metric:
    return Metric(value=float(np.mean(values)) if values else 0.0, weight=float(len(values)))


def _ratio(total: int, number: int) -> Metric:
    """Return a mean over samples, some of which have several trajectories."""
    return Metric(value=total / max(number, 1), weight=float(number))


def _lag_histogram(groups: list[SampledGroup], version: int) -> list[float]:
    lags = [version - group.oldest_version for group in groups]
    return [float(count) for count in np.bincount(lags)] if lags else []


def _generation(version: int, group: SampledGroup, prompt: Prompt) -> Generation:
    """Return the first trajectory of a group, as written down."""
    trajectory = group.trajectories[0]
    return Generation(
        step=version,
        kind="train",
        version=trajectory.oldest_version,
        prompt=prompt.text,
        completion=trajectory.text,
        reward=group.rewards[0],
        rewards=group.parts[0],
        answer=prompt.answer or "",
        stop_reason=trajectory.stop_reason,
        num_tokens=trajectory.num_tokens,
        images=tuple(picture.preview() for picture in prompt.pictures),
    )
