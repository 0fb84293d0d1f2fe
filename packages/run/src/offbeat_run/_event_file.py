"""TensorBoard's own file of a run: a copy of metrics.jsonl that TensorBoard reads.

Source: the formats are those of tensorboardX, an `Event` in each record, with all that was measured at one step.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """The event file of a folder: it takes the place of those that processes before this one have written.

    A killed process leaves a file that lacks its last seconds and holds steps which the resumed run does again. So
    nothing is mended: whoever opens this one writes down again what metrics.jsonl holds.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # imported late: a report or a plan writes no events

        old = list(folder.glob("events.out.tfevents.*"))
        for path in old:
            path.write_bytes(
                b""
            )  # not removed: a TensorBoard that is running would stay with it, and not go on to ours
        self._writer = EventsWriter(str(folder / "events"))
        if old:
            self._restart()

    def _restart(self) -> None:
        """Tell a TensorBoard that is running, and has the old files in memory, to forget every step of them."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

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
