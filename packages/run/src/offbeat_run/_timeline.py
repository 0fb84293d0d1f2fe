"""Who worked and who waited, in the Chrome trace format: opens in Perfetto and chrome://tracing.

Source: "Trace Event Format", Google, the JSON array form: an array whose closing bracket may be missing, so a run that
was killed still has a timeline that loads.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat_run._files import atomic_write

_PROCESS = 1
# The wall clock can be set back while a run goes on; monotonic clocks of two processes share no zero. So: the
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
        events = read_timeline(self.path)
        self._tracks = {str(event["args"]["name"]): int(event["tid"]) for event in events if _names_track(event)}
        self._mutex = threading.Lock()
        with atomic_write(self.path, "wb") as file:
            file.write(b"[\n" + b",\n".join(msgspec.json.encode(event) for event in events))
        self._empty = not events
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
    """Read the events of a trace file, closed or not; a last event cut short by a kill is left out.

    A missing file has none.
    """
    path = Path(path)
    if not path.is_file():
        return []
    events = []
    for line in path.read_bytes().splitlines():
        text = line.strip().rstrip(b",")
        if text.startswith(b"{"):
            try:
                events.append(msgspec.json.decode(text))
            except msgspec.DecodeError:
                break  # only the last line can be torn
    return events


def _names_track(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "thread_name"
