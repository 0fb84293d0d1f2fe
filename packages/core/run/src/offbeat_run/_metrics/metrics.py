"""Metrics of a run: one JSON line a step, TensorBoard's own file beside it, cut back when a run resumes."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from offbeat_core import Metric
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lines import MAX_LINE_BYTES, UNREADABLE, JsonlFile, cut_lines, read_lines


class EventFile:
    """The event file of a folder: it takes the place of those that processes before this one have written.

    A killed process leaves a file that lacks its last seconds and holds steps which the resumed run does again. So
    nothing is mended: the process that opens this one writes down again what metrics.jsonl holds.

    Source: the formats are those of tensorboardX, an `Event` in each record, with all that was measured at one step.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: Path) -> None:
        # Imported late: a report or a plan writes no events.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        old = list(folder.glob("events.out.tfevents.*"))
        for path in old:  # emptied, not removed: a TensorBoard that is running would stay with it, and not see ours
            path.write_bytes(b"")
        self._writer = EventsWriter(str(folder / "events"))
        if old:  # a TensorBoard that is running has them in memory: it is to forget every step of them
            self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time_s: float, values: Mapping[str, float | list[float]]) -> None:
        """Add what was measured at one step; it is in the file before this returns.

        Args:
            step: updates done.
            time_s: wall clock, seconds since 1970.
            values: numbers and histograms by name; numbers that are not finite are left out: TensorBoard draws none.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        found = [summary for name, value in values.items() for summary in _summaries(name, value)]
        self._writer.write_event(Event(step=step, wall_time=time_s, summary=Summary(value=found)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _summaries(name: str, value: float | list[float]) -> list[Any]:
    from tensorboardX.summary import histogram_raw, scalar

    if isinstance(value, list):
        return list(histogram_raw(name, *_histogram(value)).value) if sum(value) > 0 else []
    return list(scalar(name, value).value) if math.isfinite(value) else []


def _histogram(counts: list[float]) -> tuple[float, float, float, float, float, list[float], list[float]]:
    """Least, greatest, count, sum, sum of squares, upper bounds and counts, where element i counts what had i."""
    return (
        0.0,
        float(len(counts) - 1),
        sum(counts),
        sum(i * count for i, count in enumerate(counts)),
        sum(i * i * count for i, count in enumerate(counts)),
        [i + 0.5 for i in range(len(counts))],
        counts,
    )


MetricValue = float | int | Metric | Sequence[float]
"""A number, a `Metric`, or a histogram: element i counts what had the whole number i."""


_MAX_STEP: Final = 2**53
_MAX_TIME_S: Final = 2.0**36
"""No run is in the year 4147: such a line is damaged, and no calendar would take it."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one step.

    Args:
        step: updates done.
        time_s: wall clock, seconds since 1970.
        values: numbers and histograms by name.
    """

    step: int
    time_s: float
    values: dict[str, float | list[float]]


class Tracker:
    """Something else that wants the numbers, such as W&B: see `open_trackers`.

    Args:
        write: takes the finite numbers of one step, and the step; histograms are left out.
        close: sends what is held back.
        write_table: takes the name of a table, the step, and completions as plain data by the names of `Generation`.
    """

    def __init__(
        self,
        write: Callable[[dict[str, float], int], Any],
        close: Callable[[], Any],
        write_table: Callable[[str, int, Sequence[Mapping[str, Any]]], Any],
    ) -> None:
        self._write, self.close, self._write_table = write, close, write_table

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on the numbers that are finite, if there are any."""
        if finite := {name: value for name, value in values.items() if math.isfinite(value)}:
            self._write(finite, step)

    def write_table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass on a table of completions, if there are any."""
        if rows:
            self._write_table(name, step, rows)


class MetricsLog:
    """Writes metrics.jsonl, one flushed line a step, and TensorBoard.

    Args:
        run: where; lines after a kill in the middle of one are mended.
        tensorboard: write an event file too.
        trackers: others to send them to, see `open_trackers`.
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
            cut_lines(run.metrics, lambda line: int(line["step"]) <= resume_step)
        self._file = JsonlFile(run.metrics)
        self._trackers = tuple(trackers)
        self._events = EventFile(run.tensorboard) if tensorboard else None
        if self._events:
            for before in iter_metrics(run.metrics):
                self._events.write(before.step, before.time_s, before.values)

    def write(self, step: int, metrics: Mapping[str, MetricValue], *, time_s: float | None = None) -> dict[str, float]:
        """Add what was measured at `step`; a number that is not finite is kept as such.

        Args:
            step: updates done.
            metrics: by name, see `METRIC_NAMES`.
            time_s: wall clock; now when None.

        Returns:
            The numbers among them, without histograms.
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
        return numbers

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

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path | str, damaged: list[str] | None = None) -> list[MetricsLine]:
    """Read metrics.jsonl, in the order written; a line cut short by a kill is left out, a missing file is empty.

    Args:
        path: of the file.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, with its number, and `damaged` is None.
    """
    return list(iter_metrics(path, damaged))


def iter_metrics(path: Path | str, damaged: list[str] | None = None) -> Iterator[MetricsLine]:
    """Yield what `read_metrics` lists, a line at a time."""
    return read_lines(Path(path), _metrics_line, "a line of metrics", damaged)


class MetricsTail:
    """Reads what a run in progress adds to metrics.jsonl.

    Args:
        path: of the file, which may not be there yet.
        resume_step: of a run that is resumed: the step of its checkpoint, up to which the file is kept. What is there
            is passed over. None: the run is new.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._path, self._resume_step = path, resume_step
        self._file: BinaryIO | None = None
        if resume_step is not None and path.is_file():  # the resume puts another file in its place
            self._file = path.open("rb")
            self._file.seek(0, os.SEEK_END)

    def read(self) -> list[MetricsLine]:
        """Return the lines that were added since the last call; damaged ones are left out."""
        if self._is_another():
            self.close()
            with suppress(OSError):  # not there yet
                self._file = self._path.open("rb")
        found: list[MetricsLine] = []
        while self._file and (raw := self._file.readline(MAX_LINE_BYTES)):
            if not raw.endswith(b"\n"):
                self._file.seek(-len(raw), os.SEEK_CUR)  # its end is still to come
                break
            with suppress(*UNREADABLE):
                found.append(_metrics_line(msgspec.json.decode(raw, type=dict[str, Any])))
        return [line for line in found if self._resume_step is None or line.step > self._resume_step]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file:
            self._file.close()
            self._file = None

    def _is_another(self) -> bool:
        """Return whether a file was put in place of the one that is open, as by a resume."""
        with suppress(OSError):
            return self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False


def _metrics_line(line: dict[str, Any]) -> MetricsLine:
    held = {name: _from_json(value) for name, value in line.items() if name not in ("step", "time_s")}
    step, time_s = int(line["step"]), float(line["time_s"])
    if not (-1 <= step < _MAX_STEP and 0 <= time_s < _MAX_TIME_S):
        raise ValueError(f"step {step} or time_s {time_s:g} is out of range")
    return MetricsLine(step=step, time_s=time_s, values=held)


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
