"""Timeline of work and waits, in the Chrome trace format: opens in Perfetto and chrome://tracing.

Source: "Trace Event Format", Google, the JSON array form: an array whose closing bracket may be missing, so a run that
was killed still has a timeline that loads.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat_core import atomic_write, require_file
from offbeat_run._folder.lines import UNREADABLE, note_damage, read_raw_lines

_PROCESS = 1
_LONGEST_S: Final = 1e9
# The wall clock can be set back during a run; monotonic clocks of two processes share no zero. So: the
# monotonic clock, moved once to where the wall clock stood when this process began.
_WALL_OFFSET_S = time.time() - time.monotonic()


def clock_s() -> float:
    """Now, in seconds since 1970, never going back within a process, and the same in every process of a host."""
    return time.monotonic() + _WALL_OFFSET_S


class Timeline:
    """Appends events to a trace file, each flushed. Safe to use from several threads.

    Spans of one track must nest or follow each other; give work that overlaps a track of its own.

    Args:
        path: of the file; an older one is continued, whether it was closed or its process killed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        require_file(self.path)
        self._tracks: dict[str, int] = {}
        self._mutex, self._empty = threading.Lock(), True
        with atomic_write(self.path, "wb") as file:  # an event at a time: a long run has millions
            file.write(b"[\n")
            for _, event in _events(self.path, []):
                if _names_track(event):
                    self._tracks[str(event["args"]["name"])] = int(event["tid"])
                file.write((b"" if self._empty else b",\n") + msgspec.json.encode(event))
                self._empty = False
        self._file = self.path.open("ab")

    def span(self, track: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Add what `track` did from `start_s` to `end_s`.

        Args:
            track: such as "trainer-0", "rollout-0", "driver".
            name: such as "update", "generate", "idle", "weight_sync".
            start_s: of `clock_s`.
            end_s: of `clock_s`.
            args: plain data shown when the span is clicked.
        """
        duration_us = max(end_s - start_s, 0.0) * 1e6
        self._add(track, {"ph": "X", "name": name, "ts": start_s * 1e6, "dur": duration_us, "args": dict(args or {})})

    def _add(self, track: str, event: dict[str, Any]) -> None:
        with self._mutex:
            if self._file.closed:
                return  # a late thread; the run is over and its timeline with it
            tid = self._tracks.get(track)
            if tid is None:
                tid = self._tracks[track] = len(self._tracks) + 1
                named = {"ph": "M", "name": "thread_name", "args": {"name": track}}
                self._write({"pid": _PROCESS, "tid": tid, **named})
            self._write({"pid": _PROCESS, "tid": tid, **event})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((b"" if self._empty else b",\n") + msgspec.json.encode(event))
        self._file.flush()
        self._empty = False

    def close(self) -> None:
        """End the array; a second call does nothing."""
        with self._mutex:
            if not self._file.closed:
                self._file.write(b"\n]\n")
                self._file.close()

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_timeline(path: Path | str) -> list[dict[str, Any]]:
    """Read the events of a trace file, closed or not; an event that is damaged or cut short by a kill is left out.

    A missing file has none.
    """
    return [event for _, event in _events(Path(path), [])]


def _events(path: Path, damaged: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, event) of a trace file, without the lines that cannot be read."""
    for number, line in read_raw_lines(path, damaged):
        text = line.strip().rstrip(b",")
        if text.startswith(b"{"):
            try:
                event = msgspec.json.decode(text, type=dict[str, Any])
                msgspec.convert(event, _SHAPES.get(str(event.get("ph")), dict[str, Any]))
                yield number, event
            except UNREADABLE as error:
                if line.endswith(b"\n"):  # a torn last line is no damage
                    note_damage(damaged, f"{path}:{number}: not an event: {error}")


@dataclass(frozen=True)
class Span:
    """A stretch of work.

    Args:
        track: the process that worked.
        name: at what.
        start_s, end_s: of `clock_s`.
    """

    track: str
    name: str
    start_s: float
    end_s: float


def iter_spans(path: Path, damaged: list[str]) -> Iterator[Span]:
    """Yield the spans of a trace file, in the order written; `damaged` takes a text for what cannot be read."""
    tracks: dict[Any, str] = {}
    for number, event in _events(path, damaged):
        try:
            if _names_track(event):
                tracks[event["tid"]] = str(event["args"]["name"])
            elif event.get("ph") == "X" and event["tid"] in tracks:
                start_s, length_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
                if not (math.isfinite(start_s) and 0 <= length_s < _LONGEST_S):
                    raise ValueError(f"a span of {length_s:g} s from {start_s:g} s")
                yield Span(tracks[event["tid"]], str(event["name"]), start_s, start_s + length_s)
        except UNREADABLE as error:
            note_damage(damaged, f"{path}:{number}: not an event: {error}")


class _Label(msgspec.Struct):
    name: str


class _Track(msgspec.Struct):
    tid: int
    args: _Label


class _Span(msgspec.Struct):
    tid: int
    name: str
    ts: float
    dur: float


_SHAPES: Final[dict[str, Any]] = {"M": _Track, "X": _Span}
"""Fields that an event must have, by its kind: those that its readers use."""


def _names_track(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "thread_name"
