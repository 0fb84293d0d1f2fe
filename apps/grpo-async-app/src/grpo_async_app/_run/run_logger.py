"""Everything a run writes down while it goes on: metrics, generations, timeline, progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.groups import SampledGroup
from grpo_async_app._run.sampling import Validation
from offbeat_async_policy import Statistics
from offbeat_data import Prompt
from offbeat_run import Generation, RunFolder, RunLog, clock_s, read_metrics
from offbeat_types import Metric, Metrics

OnSpan = Callable[[str, float, float], None]
"""Called with (role, start_s, end_s) when a role stops being busy."""


@dataclass(frozen=True, kw_only=True)
class BusyShares:
    """Shares of one stretch of wall-clock time.

    Args:
        wall_s: its length.
        trainer_idle: share in which the trainer did nothing.
        rollout_idle: the same for the rollout engines, averaged over them.
        overlap: share in which the trainer and at least one rollout engine were busy together.
    """

    wall_s: float
    trainer_idle: float
    rollout_idle: float
    overlap: float


class BusyClock:
    """Adds up busy time by role; a role is busy while at least one piece of its work is open and it is not held.

    Args:
        trainer: name of the trainer.
        num_rollouts: how many rollout engines there are now; all but the trainer count as such.
        now_s: clock, in seconds.
        on_span: told of each stretch in which a role was busy.
    """

    def __init__(
        self, trainer: str, num_rollouts: Callable[[], int], now_s: Callable[[], float], on_span: OnSpan
    ) -> None:
        self._trainer, self._num_rollouts = trainer, num_rollouts
        self._now_s, self._on_span = now_s, on_span
        self._open: dict[str, int] = {}
        self._held: set[str] = set()
        self._since_s: dict[str, float] = {}  # roles busy now, and since when
        self._busy_s: dict[str, float] = {}
        self._overlap_s = 0.0
        self._lap_s = self._last_s = now_s()

    @contextmanager
    def busy(self, role: str) -> Iterator[None]:
        """Count the body as work of `role`."""
        self._change(lambda: self._open.update({role: self._open.get(role, 0) + 1}))
        try:
            yield
        finally:
            self._change(lambda: self._open.update({role: self._open[role] - 1}))

    @contextmanager
    def held(self, roles: Iterable[str]) -> Iterator[None]:
        """Count these roles as idle during the body, whatever is open: they are paused."""
        names = set(roles)
        self._change(lambda: self._held.update(names))
        try:
            yield
        finally:
            self._change(lambda: self._held.difference_update(names))

    def lap(self) -> BusyShares:
        """Shares since the last lap."""
        self._change(lambda: None)
        wall_s = max(self._last_s - self._lap_s, 1e-9)
        rollout_s = sum(busy_s for role, busy_s in self._busy_s.items() if role != self._trainer)
        shares = BusyShares(
            wall_s=wall_s,
            trainer_idle=1 - self._busy_s.get(self._trainer, 0.0) / wall_s,
            rollout_idle=max(0.0, 1 - rollout_s / max(self._num_rollouts(), 1) / wall_s),
            overlap=self._overlap_s / wall_s,
        )
        self._busy_s.clear()
        self._overlap_s, self._lap_s = 0.0, self._last_s
        return shares

    def _change(self, apply: Callable[[], object]) -> None:
        """Add the time since the last change to whoever was busy, then apply the next change."""
        now_s = self._now_s()
        passed_s, self._last_s = now_s - self._last_s, now_s
        for role in self._since_s:
            self._busy_s[role] = self._busy_s.get(role, 0.0) + passed_s
        if self._trainer in self._since_s and len(self._since_s) > 1:
            self._overlap_s += passed_s
        apply()
        active = {role for role, count in self._open.items() if count and role not in self._held}
        for role in self._since_s.keys() - active:
            self._on_span(role, self._since_s.pop(role), now_s)
        for role in active - self._since_s.keys():
            self._since_s[role] = now_s


WAIT_SHOWN_AFTER_S = 120.0
_WORK: Final = {"rollout": "generate", "teacher": "score", "trainer": "train"}
"""What a role does, as the timeline calls it."""


class RunLogger:
    """Writes to the run folder and to the terminal.

    Args:
        run: open for writing.
        config: of the run.
        num_updates: updates of the whole run, for the progress.
        last_step: updates done at the checkpoint this goes on from, -1 for none: what was written after it vanishes.

    Attributes:
        last_validated: version of the last validation that was written down, by whatever process; -1 for none.
    """

    def __init__(self, run: RunFolder, config: GrpoConfig, num_updates: int, last_step: int) -> None:
        self._run, self._config = run, config
        self._log = RunLog(run, config.log, num_updates, last_step)
        self._last_wait_s = 0.0
        self._num_left_out_told = 0

    def __enter__(self) -> "RunLogger":
        self._log.__enter__()
        validated = [line.step for line in read_metrics(self._run.metrics) if "eval/reward" in line.values]
        self.last_validated = max(validated, default=-1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, trace)

    def worked(self, role: str, start_s: float, end_s: float) -> None:
        """Add a stretch in which a role was busy, in seconds of `clock_s`."""
        self._log.span(role, _WORK[role.partition("-")[0]], start_s, end_s)

    def synced(self, version: int, start_s: float, end_s: float) -> None:
        """Note a weight sync."""
        self._log.span("weight sync", "sync", start_s, end_s, {"version": version})

    def handed_over(self, role: str, step: str, start_s: float, end_s: float, resident_bytes: int) -> None:
        """Note a step in which memory changed hands between roles that share devices.

        Args:
            role: that gave or took it.
            step: such as "sleep".
            start_s: of `clock_s`.
            end_s: of `clock_s`.
            resident_bytes: main memory that it holds afterwards.
        """
        self._log.span(role, step, start_s, end_s, {"resident_bytes": resident_bytes})

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
    ) -> None:
        """Write down one update.

        Args:
            version: updates done, this one included.
            groups: trained on.
            prompts: their prompts by item.
            trained: metrics of the trainer.
            shares: of the time since the update before.
            statistics: of the policy; its lags do not hold this update yet.
            accidents: what has happened to the roles: restarts, stragglers.
            left_out: samples that were left out since the start, by metric.
        """
        values = {
            **trained,
            **_group_metrics(groups, version - 1),
            **(_turn_metrics(groups) if self._config.environment.name else {}),
            "async/trainer_idle_share": Metric(value=shares.trainer_idle),
            "async/rollout_idle_share": Metric(value=shares.rollout_idle),
            "async/overlap_share": Metric(value=shares.overlap),
            "perf/update_s": Metric(value=shares.wall_s),
            "perf/tokens_per_s": Metric(value=sum(group.num_tokens for group in groups) / shares.wall_s),
            "perf/samples_per_s": Metric(value=sum(len(g.trajectories) for g in groups) / shares.wall_s),
            "groups/filtered": Metric(value=float(statistics.filtered), how="last"),
            "groups/dropped": Metric(value=float(statistics.dropped), how="last"),
            "groups/reissued": Metric(value=float(statistics.reissued), how="last"),
            **accidents,
        }
        values.update({metric: _count(number) for metric, number in left_out.items()})
        self._log.write(version, {**values, "async/lag_histogram": _lag_histogram(groups, version - 1)})
        shown = groups[: self._config.log.train_generations]
        self._log.write_generations(_generation(version, group, prompts[group.item]) for group in shown)

    def validated(self, validation: Validation) -> None:
        """Write down one validation."""
        self.last_validated = validation.version
        self._log.write(validation.version, validation.numbers())
        self._log.write_generations(
            Generation(
                step=validation.version,
                kind="validation",
                version=trajectory.oldest_version,
                prompt=prompt.text,
                completion=trajectory.text,
                reward=reward,
                answer=prompt.answer or "",
                stop_reason=trajectory.stop_reason,
                num_tokens=trajectory.num_tokens,
                images=tuple(picture.preview() for picture in prompt.pictures),
            )
            for prompt, trajectory, reward in validation.samples[: self._config.log.generations]
        )

    def waiting(self, wait: str, idle_s: float) -> None:
        """Say who waits for whom, when nothing has moved for a while; once a minute at most."""
        if idle_s >= WAIT_SHOWN_AFTER_S and clock_s() - self._last_wait_s >= 60:
            self._last_wait_s = clock_s()
            self._log.message(f"nothing moved for {idle_s:.0f} s: {wait}")

    def left_out(self, samples: Mapping[str, int], last: str) -> None:
        """Say that samples were left out: the first time, and then whenever there are twice as many."""
        total = sum(samples.values())
        if total >= 2 * self._num_left_out_told:
            self._num_left_out_told = total
            counts = ", ".join(f"{number} {metric}" for metric, number in sorted(samples.items()))
            self._log.message(f"samples left out: {counts}; the latest: {last}")

    def message(self, text: str) -> None:
        """Print a line above the progress."""
        self._log.message(text)


def _group_metrics(groups: list[SampledGroup], version: int) -> Metrics:
    rewards = [reward for group in groups for reward in group.rewards]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lags = [version - group.oldest_version for group in groups]
    names = sorted({name for group in groups for parts in group.parts for name in parts})
    parts = {
        f"reward/{name}": _mean([parts.get(name, 0.0) for group in groups for parts in group.parts]) for name in names
    }
    return {
        "train/reward": _mean(rewards),
        "train/response_tokens": _mean([trajectory.num_tokens for trajectory in trajectories]),
        "train/cut_off_share": _mean([trajectory.ended != "done" for trajectory in trajectories]),
        "train/mixed_version_share": _mean([trajectory.num_versions > 1 for trajectory in trajectories]),
        "train/lag_mean": _mean(lags),
        "train/lag_max": Metric(value=float(max(lags, default=0)), how="max"),
        **(parts if len(parts) > 1 else {}),
    }


def _turn_metrics(groups: list[SampledGroup]) -> Metrics:
    """How much the environment was asked, and how much it said."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    read = [len(trajectory.ids) - trajectory.num_tokens for trajectory in trajectories]
    return {
        "train/turns": _mean([len(trajectory.turns) for trajectory in trajectories]),
        "train/read_tokens": _mean(read),
    }


def _count(number: int) -> Metric:
    return Metric(value=float(number), how="last")


def _mean(values: "list[float] | list[int] | list[bool]") -> Metric:
    return Metric(value=float(np.mean(values)) if values else 0.0, weight=float(len(values)))


def _lag_histogram(groups: list[SampledGroup], version: int) -> list[float]:
    lags = [version - group.oldest_version for group in groups]
    return [float(count) for count in np.bincount(lags)] if lags else []


def _generation(version: int, group: SampledGroup, prompt: Prompt) -> Generation:
    """The first trajectory of a group, as written down."""
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
