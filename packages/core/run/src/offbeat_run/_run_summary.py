"""A run in a few figures: both the terminal's last lines and the head of a report are made here."""

import math
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec

from offbeat_core import MAX_CONFIG_BYTES, read_small
from offbeat_run._config.described import describe_task
from offbeat_run._console.quantities import duration_text, number_text, share_text, times_text
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lock import writer_of
from offbeat_run._folder.sessions import Session, last_written_s
from offbeat_run._metrics.names import is_share, label_of
from offbeat_run._metrics.series import RunMetrics, Series
from offbeat_run._validation.summary import Estimate

_SHARES: Final = ("async/trainer_idle_share", "async/rollout_idle_share", "async/overlap_share")
_TRAINED: Final = ("train/response_tokens", "train/entropy", "train/cut_off_share")
"""Compared beside the reward, or else the loss, and what validations have measured."""
_NOT_COMPARED: Final = ("_low", "_high", "_p95", "/versions", "/items")
_LEAST_UPDATES: Final = 10
"""A mean over fewer updates says more of its samples than of the run."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A metric at the beginning and at the end of a run.

    Args:
        metric: its name in metrics.jsonl.
        label: its name for people.
        before, after: with 95 % intervals, of no width where none is known.
        of: what each is the mean of, such as "256 items".
    """

    metric: str
    label: str
    before: Estimate
    after: Estimate
    of: str = ""

    def texts(self) -> tuple[str, str, str]:
        """Before, after and the change, for people."""
        write = share_text if is_share(self.metric) else number_text
        return estimate_text(self.before, write), estimate_text(self.after, write), self._change_text()

    def _change_text(self) -> str:
        if not is_share(self.metric):
            return change_text(self.before, self.after)
        change, error = (100 * part for part in _change(self.before, self.after))
        digits = 0 if max(abs(change), error) >= 10 else 1
        return f"{change:+.{digits}f}" + (f" ± {error:.{digits}f}" if error else "") + " points"


def estimate_text(estimate: Estimate, write: Callable[[float], str] = number_text) -> str:
    """Write a value with its interval, where it has one: "0.371 (0.313 to 0.430)"."""
    if estimate.low == estimate.high:
        return write(estimate.value)
    return f"{write(estimate.value)} ({write(estimate.low)} to {write(estimate.high)})"


def change_text(before: Estimate, after: Estimate) -> str:
    """Write a difference with half of its 95 % interval, where there is one: "+0.313 ± 0.080"."""
    change, error = _change(before, after)
    digits = 3 if abs(after.value) < 10 else 1 if abs(after.value) < 100 else 0
    return f"{change:+,.{digits}f}" + (f" ± {error:,.{digits}f}" if error else "")


def _change(before: Estimate, after: Estimate) -> tuple[float, float]:
    """Return the difference and half of its interval, as of two values that know nothing of each other."""
    errors = ((each.high - each.low) / 2 for each in (before, after))
    return after.value - before.value, math.hypot(*errors)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run at a glance.

    Args:
        task: rows of (what, name): model, data, reward and others.
        status: such as "finished", "running" or "failed".
        history: what happened before that, and the reason of a failure; may be empty.
        commands: that worked on it, the first and the latest.
        started_s: seconds since 1970; None where nothing is known.
        tiles: (name, value) of the figures that a reader looks for first.
    """

    task: list[tuple[str, str]]
    status: str
    history: str
    commands: list[str]
    started_s: float | None
    tiles: list[tuple[str, str]]

    @property
    def headline(self) -> str:
        """Model and data, such as "SmolLM2-135M on gsm8k"; empty where the configuration names neither."""
        named = dict(self.task)
        return " on ".join(named[what] for what in ("model", "data") if what in named)


def summarize_run(run: RunFolder, metrics: RunMetrics, sessions: Sequence[Session]) -> RunSummary:
    """Sum up a run, running or not, from what its folder holds.

    Args:
        run: open for reading or writing.
        metrics: of the run.
        sessions: of the run.
    """
    settled = _settled(run, sessions)
    status, history = _status(settled)
    return RunSummary(
        task=describe_task(_configuration(run)),
        status=status,
        history=history,
        commands=list(dict.fromkeys(each.command for each in (*settled[:1], *settled[-1:]) if each.command)),
        started_s=settled[0].started_s if settled else metrics.times_s[0] if metrics.times_s else None,
        tiles=_tiles(metrics, _working_s(settled, metrics)),
    )


def _configuration(run: RunFolder) -> dict[str, Any]:
    path = run.settled if run.settled.is_file() else run.config
    try:
        return tomllib.loads(read_small(path, MAX_CONFIG_BYTES).decode(errors="replace"))
    except (OSError, ValueError, RecursionError):  # a heading with less in it, rather than no report
        return {}


def _settled(run: RunFolder, sessions: Sequence[Session]) -> list[Session]:
    """Return the sessions with an end to a last one whose process is gone."""
    settled = list(sessions)
    if settled and settled[-1].ended_s is None and writer_of(run.path) is None:
        settled[-1] = msgspec.structs.replace(
            settled[-1], ended_s=last_written_s(run, settled[-1].started_s), end="killed"
        )
    return settled


def _status(sessions: Sequence[Session]) -> tuple[str, str]:
    if not sessions:
        return "", ""
    ended = [each.end for each in sessions]
    counts = {end: ended[:-1].count(end) for end in ("interrupted", "killed", "failed")}
    parts = [f"{end} {times_text(count)}" for end, count in counts.items() if count]
    if len(sessions) > 1:
        parts.append(f"resumed {times_text(len(sessions) - 1)}")
    history = ", ".join(parts)
    if ended[-1] == "failed":
        history = sessions[-1].reason + (f" (before that {history})" if history else "")
    return ended[-1] or "running", history


def _working_s(sessions: Sequence[Session], metrics: RunMetrics) -> float | None:
    """Wall clock without the pauses between sessions."""
    if sessions:
        return sum(max((each.ended_s or time.time()) - each.started_s, 0.0) for each in sessions)
    return metrics.times_s[1] - metrics.times_s[0] if metrics.times_s else None


def _tiles(metrics: RunMetrics, working_s: float | None) -> list[tuple[str, str]]:
    if not metrics.times_s:
        return []
    tiles = [("updates", f"{metrics.num_updates:,}")]
    tiles += [("time", duration_text(working_s))] if working_s else []
    tiles += [_validated(name, metrics.series[name]) for name in ("eval/accuracy", "eval/loss") if _has(metrics, name)]
    for trained in _trained(metrics):
        mean = metrics.series[trained].ends(_LEAST_UPDATES)[1]
        over = f", last {mean.count} updates" if mean.count > 1 else ""
        tiles.append((f"{label_of(trained)}{over}", number_text(mean.value)))
    tokens_per_s = metrics.mean("perf/tokens_per_s")
    tiles += [("tokens/s", number_text(tokens_per_s))] if tokens_per_s is not None else []
    shares = [(label_of(name), metrics.mean(name)) for name in _SHARES]
    return tiles + [(label, share_text(share)) for label, share in shares if share is not None]


def _has(metrics: RunMetrics, name: str) -> bool:
    return name in metrics.series


def _validated(name: str, series: Series) -> tuple[str, str]:
    assert series.first is not None
    assert series.last is not None
    (first_step, first), (last_step, last) = series.first, series.last
    before = f"{number_text(first)} → " if last_step > first_step else ""
    return label_of(name), f"{before}{number_text(last)}"


def compare_ends(metrics: RunMetrics, names: Mapping[str, str] | None = None) -> list[Change]:
    """Compare the end of a run with its beginning: validations, and means over updates where there are enough.

    Args:
        metrics: of the run.
        names: labels by metric of those to compare; None: all that validations have measured, and a few of training.
    """
    if names is None:
        validated = (name for name in metrics.series if name.startswith("eval/") and not name.endswith(_NOT_COMPARED))
        names = {name: label_of(name) for name in (*validated, *_trained(metrics), *_TRAINED)}
    found = [
        _compared(name, label, metrics)
        for name, label in names.items()
        if _has(metrics, name) and not says_the_same(name, metrics.series)
    ]
    return [change for change in found if change]


def _trained(metrics: RunMetrics) -> list[str]:
    """Return the metric that says how training goes: a policy's loss says little."""
    return [name for name in ("train/reward", "train/loss") if _has(metrics, name)][:1]


def says_the_same(name: str, series: Mapping[str, Series]) -> bool:
    """Return whether a metric is left out for another: a 0-1 reward is the accuracy, a part may be all of a sum."""
    same = {"eval/reward": "eval/accuracy", "train/loss_policy": "train/loss"}.get(name, "")
    same = "train/reward" if name.startswith("reward/") else same
    if same in series and series[same].points() == series[name].points():
        return True
    return name.endswith("cut_off_share") and series[name].high == 0


def _compared(name: str, label: str, metrics: RunMetrics) -> Change | None:
    series = metrics.series[name]
    if name.startswith("eval/"):
        return _validation_change(name, label, metrics)
    if series.count < 2 * _LEAST_UPDATES:
        return None
    least = 0.0 if is_share(name) else -math.inf
    before, after = (
        Estimate(
            value=mean.value,
            low=max(mean.value - mean.error, least),
            high=mean.value + mean.error,
            num_items=mean.count,
        )
        for mean in series.ends(max(_LEAST_UPDATES, series.count // 10))
    )
    return Change(metric=name, label=label, before=before, after=after, of=f"{after.num_items} updates")


def _validation_change(name: str, label: str, metrics: RunMetrics) -> Change | None:
    series = metrics.series[name]
    if series.first is None or series.last is None or series.first[0] == series.last[0]:
        return None
    before, after = (_validated_at(name, metrics, end) for end in (attrgetter("first"), attrgetter("last")))
    of = f"{after.num_items:,} items" if after.num_items else ""
    return Change(metric=name, label=label, before=before, after=after, of=of)


def _validated_at(name: str, metrics: RunMetrics, end: Callable[[Series], tuple[int, float]]) -> Estimate:
    """Return the value of the first or the last validation, with its interval where it wrote one."""
    step, value = end(metrics.series[name])
    found = {}
    for key in (f"{name}_low", f"{name}_high", f"{name.rpartition('/')[0]}/items"):
        beside = end(metrics.series[key]) if key in metrics.series else None
        found[key.removeprefix(name)] = beside[1] if beside and beside[0] == step else None
    low, high, items = found.values()
    return Estimate(
        value=value,
        low=value if low is None or high is None else low,
        high=value if low is None or high is None else high,
        num_items=int(items or 0),
    )


def shown_path(path: os.PathLike[str]) -> str:
    """Write a path as short as it can be typed: relative to the current folder where it lies below it."""
    text, here = os.fspath(path), os.getcwd()
    return os.path.relpath(text, here) if text.startswith(here + os.sep) else text
