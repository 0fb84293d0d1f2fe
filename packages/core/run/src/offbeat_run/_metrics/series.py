"""metrics.jsonl read in one pass into a few points a metric, however long the run is."""

import math
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

from offbeat_run._metrics.metrics import MetricsLine, iter_metrics

MAX_POINTS: Final = 1500
"""Points of one metric: more than a screen has pixels across."""
_MAX_COLUMNS: Final = 300
"""Columns of the lag histogram over the run."""
_MAX_LAGS: Final = 256
_MAX_NAMES: Final = 2000
"""Metrics of one run; a file may name any number."""
_WEIGHT: Final = "perf/update_s"


Points = list[tuple[int, float]]
"""(step, value), by step."""


@dataclass
class _Bucket:
    """Neighbouring values of a metric: the last of them, and what their mean and spread are made of."""

    step: int
    value: float
    count: int
    total: float
    squares: float

    def take(self, other: "_Bucket") -> None:
        self.step, self.value = other.step, other.value
        self.count += other.count
        self.total += other.total
        self.squares += other.squares


@dataclass(frozen=True)
class Mean:
    """A mean of values that spread.

    Args:
        value: the mean.
        error: half of its 95 % interval, from the spread of the values; 0 of one value.
        count: of the values.
    """

    value: float
    error: float
    count: int


class Series:
    """The values of one metric over a run, thinned while they come.

    Neighbours are put together two by two whenever there are too many; the last value is always among the points.

    Attributes:
        low, high: the least and the greatest value.
        first, last: (step, value) of the earliest and the latest step.
    """

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width = 1
        self.low, self.high = math.inf, -math.inf
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        """Take the value of one step, which need not be the latest."""
        self.low, self.high = min(self.low, value), max(self.high, value)
        if self.first is None or step < self.first[0]:
            self.first = (step, value)
        if self.last is None or step >= self.last[0]:
            self.last = (step, value)
        new = _Bucket(step, value, 1, value, value * value)
        if self._buckets and self._buckets[-1].count < self._width:
            self._buckets[-1].take(new)
            return
        if len(self._buckets) == MAX_POINTS:
            self._halve()
        self._buckets.append(new)

    def _halve(self) -> None:
        for first, second in zip(self._buckets[::2], self._buckets[1::2], strict=True):
            first.take(second)
        del self._buckets[1::2]
        self._width *= 2

    @property
    def count(self) -> int:
        """Values that were added."""
        return sum(bucket.count for bucket in self._buckets)

    @property
    def is_constant(self) -> bool:
        return self.low == self.high

    def points(self) -> Points:
        """Return the last value that each point stands for."""
        # A validation that runs beside training is written down after later updates.
        return sorted(((bucket.step, bucket.value) for bucket in self._buckets), key=itemgetter(0))

    def means(self) -> Points:
        """Return the mean of the values that each point stands for."""
        return sorted(((each.step, each.total / each.count) for each in self._buckets), key=itemgetter(0))

    def ends(self, width: int) -> tuple[Mean, Mean]:
        """Return the means over the first and the last `width` values, or over a few more where they are thinned."""
        return _mean(self._buckets, width), _mean(self._buckets[::-1], width)


def _mean(buckets: list[_Bucket], width: int) -> Mean:
    taken = _Bucket(0, 0.0, 0, 0.0, 0.0)
    for bucket in buckets:
        if taken.count >= width:
            break
        taken.take(bucket)
    mean = taken.total / taken.count
    variance = max(taken.squares / taken.count - mean * mean, 0.0) * taken.count / max(taken.count - 1, 1)
    return Mean(mean, 1.96 * math.sqrt(variance / taken.count), taken.count)


class LagColumns:
    """Lag histograms over a run, neighbours added up where there are too many."""

    def __init__(self) -> None:
        self.columns: list[tuple[int, list[float]]] = []
        self._width, self._open = 1, 0

    def add(self, step: int, counts: list[float]) -> None:
        """Take the histogram of one update: element i counts completions of lag i."""
        counts = counts[:_MAX_LAGS]
        if not sum(counts) > 0:
            return
        if self.columns and self._open < self._width:
            self.columns[-1] = (step, _added(self.columns[-1][1], counts))
            self._open += 1
            return
        if len(self.columns) == _MAX_COLUMNS:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [(later, _added(first, second)) for (_, first), (later, second) in pairs]
            self._width *= 2
        self.columns.append((step, counts))
        self._open = 1


def _added(first: list[float], second: list[float]) -> list[float]:
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    return [value + (shorter[at] if at < len(shorter) else 0.0) for at, value in enumerate(longer)]


@dataclass
class RunMetrics:
    """Contents of metrics.jsonl, thinned.

    Args:
        series: the finite numbers, by name.
        lags: of `async/lag_histogram`.
        num_updates: the largest step.
        times_s: when the first and the last line were written; None without lines.
        weighted: by name, the sum of value x seconds of an update, and of the seconds.
    """

    series: dict[str, Series] = field(default_factory=dict)
    lags: LagColumns = field(default_factory=LagColumns)
    num_updates: int = 0
    times_s: tuple[float, float] | None = None
    weighted: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, line: MetricsLine) -> None:
        """Add one line."""
        first_s = self.times_s[0] if self.times_s else line.time_s
        self.times_s = (first_s, line.time_s)
        self.num_updates = max(self.num_updates, line.step)
        weight = line.values.get(_WEIGHT, 1.0)
        for name, value in line.values.items():
            if isinstance(value, list):
                if name == "async/lag_histogram":
                    self.lags.add(line.step, value)
            elif math.isfinite(value) and (name in self.series or len(self.series) < _MAX_NAMES):
                self.series.setdefault(name, Series()).add(line.step, value)
                if isinstance(weight, float) and weight > 0:
                    total, seconds = self.weighted.get(name, (0.0, 0.0))
                    self.weighted[name] = (total + value * weight, seconds + weight)

    def mean(self, name: str) -> float | None:
        """Mean over the run, each update for as long as it took; None where it was not measured."""
        total, seconds = self.weighted.get(name, (0.0, 0.0))
        return total / seconds if seconds else None


def read_run_metrics(path: Path, damaged: list[str] | None = None) -> RunMetrics:
    """Read metrics.jsonl in one pass, in memory that does not grow with it.

    Args:
        path: of the file; a missing one is empty.
        damaged: takes a text for each line that cannot be read, which is then left out.
    """
    found = RunMetrics()
    for line in iter_metrics(path, damaged):
        found.take(line)
    return found
