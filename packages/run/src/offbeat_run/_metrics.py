"""Metrics of a run: one JSON line a step, TensorBoard beside it, cut back when a run resumes."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from offbeat_run._event_file import EventFile
from offbeat_run._folder import RunFolder
from offbeat_run._jsonl import JsonlFile, cut_lines, read_lines
from offbeat_types import Metric, RunFolderError

MetricValue = float | int | Metric | Sequence[float]
"""A number, a `Metric`, or a histogram: element i counts what had the whole number i."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one step.

    Args:
        step: updates done.
        time_s: wall clock, seconds since 1970.
        values: numbers and histograms by name.
    """

    step: int
    time_s: float
    values: dict[str, float | list[float]]


class Tracker(Protocol):
    """Something else that wants the numbers, such as W&B."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step; histograms are left out."""
        ...

    def close(self) -> None:
        """Send what is held back."""
        ...


class MetricsLog:
    """Writes metrics.jsonl, one flushed line a step, and TensorBoard.

    Args:
        run: where; lines after a kill in the middle of one are mended.
        tensorboard: write an event file too.
        trackers: others to tell, see `open_trackers`.
        resume_step: on resume, the step of the checkpoint: what was written after it vanishes.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
        resume_step: int | None = None,
    ) -> None:
        if resume_step is not None:
            _cut_after(run.metrics, resume_step)
        self._file = JsonlFile(run.metrics)
        self._trackers = tuple(trackers)
        self._events = EventFile(run.tensorboard) if tensorboard else None
        if self._events:
            for before in _lines(run.metrics):
                self._events.write(before.step, before.time_s, before.values)

    def write(self, step: int, metrics: Mapping[str, MetricValue], *, time_s: float | None = None) -> None:
        """Add what was measured at `step`; a number that is not finite is kept as such.

        Args:
            step: updates done.
            metrics: by name, see `METRIC_NAMES`.
            time_s: wall clock; now when None.
        """
        now_s = time.time() if time_s is None else time_s
        values = {name: _plain(value) for name, value in metrics.items()}
        line = {name: _jsonable(value) for name, value in values.items()}
        self._file.write({"step": step, "time_s": round(now_s, 3), **line})
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        for tracker in self._trackers:
            tracker.write(step, numbers)
        if self._events:
            self._events.write(step, now_s, values)

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        self._file.close()
        if self._events:
            self._events.close()
            self._events = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = ()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path | str, damaged: list[str] | None = None) -> list[MetricsLine]:
    """Read metrics.jsonl, in the order written; a line cut short by a kill is left out, a missing file is empty.

    Args:
        path: of the file.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, with its number, and nobody takes note of it.
    """
    return list(_lines(Path(path), damaged))


def _lines(path: Path, damaged: list[str] | None = None) -> Iterator[MetricsLine]:
    for line in read_lines(path, damaged):
        try:
            held = {name: _from_json(value) for name, value in line.items() if name not in ("step", "time_s")}
            found = MetricsLine(step=int(line["step"]), time_s=float(line["time_s"]), values=held)
        except (KeyError, TypeError, ValueError) as error:
            if damaged is None:
                raise RunFolderError(
                    f"{path}: not a line of metrics: {error!r}; remove it, or restore the file"
                ) from error
            damaged.append(f"{path}: not a line of metrics: {error!r}")
        else:
            yield found


def _cut_after(path: Path, step: int) -> None:
    cut_lines(path, lambda line: int(line["step"]) <= step)


def _plain(value: MetricValue) -> float | list[float]:
    if isinstance(value, Metric):
        return float(value.value)
    if isinstance(value, Iterable):
        return [float(item) for item in value]
    return float(value)


def _jsonable(value: float | list[float]) -> Any:
    """JSON has no NaN and no infinity, so they are written as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _from_json(value: Any) -> float | list[float]:
    return [float(item) for item in value] if isinstance(value, list) else float(value)
