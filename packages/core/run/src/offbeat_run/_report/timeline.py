"""The timeline of a report: when each process worked, read in two passes, without the pauses between sessions."""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat_run._log.timeline import Span, iter_spans
from offbeat_run._report.figures import Figure
from offbeat_run._report.plots import SPEED

_MAX_BARS: Final = 3000
_WINDOW_BARS: Final = 240
_MAX_TRACKS: Final = 64
_MAX_KINDS: Final = 24
_QUIET: Final = ("idle", "wait")
_QUIET_SLOT: Final = -1
_CAPTION: Final = "Work by process. Drag to zoom, double-click to see the whole run; timeline.json opens in Perfetto."
_PAUSES: Final = " Dashed lines: the run was interrupted and resumed; the time between is left out."
_ROLES: Final = ("driver", "trainer", "rollout", "teacher", "scorer")


@dataclass
class _Extent:
    """Result of the first pass: the extent of each session, the tracks, and the number of spans."""

    starts_s: list[float]
    low_s: dict[int, float] = field(default_factory=dict)
    high_s: dict[int, float] = field(default_factory=dict)
    tracks: dict[str, None] = field(default_factory=dict)
    num_spans: int = 0

    def session_of(self, span: Span) -> int:
        return max(bisect_right(self.starts_s, span.start_s) - 1, 0)

    def take(self, span: Span) -> None:
        session = self.session_of(span)
        self.low_s[session] = min(self.low_s.get(session, math.inf), span.start_s)
        self.high_s[session] = max(self.high_s.get(session, -math.inf), span.end_s)
        if len(self.tracks) < _MAX_TRACKS:
            self.tracks[span.track] = None
        self.num_spans += 1

    def offsets_s(self) -> dict[int, float]:
        """Return the shift of each session's times that makes it begin where the one before has ended."""
        offsets, end_s = {}, 0.0
        for session in sorted(self.low_s):
            offsets[session] = end_s - self.low_s[session]
            end_s += self.high_s[session] - self.low_s[session]
        return offsets

    @property
    def length_s(self) -> float:
        return sum(self.high_s[session] - self.low_s[session] for session in self.low_s)


Bars = dict[str, list[tuple[int, float, float]]]
"""(track, start, length) by kind of work."""


def timeline_figure(path: Path, session_starts_s: Sequence[float], damaged: list[str]) -> Figure | None:
    """Draw the spans of a trace, or None when there are none.

    A long run opens on a window in its middle, where steps can be distinguished; a double click shows all of it.

    Args:
        path: of timeline.json.
        session_starts_s: when each session of the run began; the time between two is left out.
        damaged: takes a text for each line that cannot be read.
    """
    extent = _Extent(sorted(session_starts_s))
    for span in iter_spans(path, damaged):
        extent.take(span)
    if not extent.num_spans:
        return None
    order = sorted(extent.tracks, key=_track_order)
    bars = _joined(iter_spans(path, []), extent, {track: at for at, track in enumerate(order)})
    num_bars, length_s = sum(map(len, bars.values())), extent.length_s
    half_s = length_s * _WINDOW_BARS / num_bars / 2
    offsets_s = extent.offsets_s()
    slots = _slots(bars)
    data = {
        "kind": "bars",
        "tracks": order,
        "bars": [{"name": name, "slot": slots[name], "at": bars[name]} for name in slots],
        "breaks": [_rounded(extent.low_s[session] + offsets_s[session]) for session in sorted(offsets_s)[1:]],
        "length": _rounded(length_s),
        "window": [length_s / 2 - half_s, length_s / 2 + half_s] if num_bars > _WINDOW_BARS else None,
    }
    return Figure(
        group=SPEED,
        title="Timeline",
        caption=f"{_CAPTION}{_PAUSES if data['breaks'] else ''}",
        data=data,
        legend=[(name, slot) for name, slot in slots.items()],
        is_wide=True,
    )


def _joined(spans: Iterator[Span], extent: _Extent, places: dict[str, int]) -> Bars:
    """Spans by kind; in a long run, those of a track that are closer than a bar is wide become one."""
    gap_s = extent.length_s / _MAX_BARS if extent.num_spans > _MAX_BARS else 0.0
    offsets_s, bars = extent.offsets_s(), defaultdict[str, list[tuple[int, float, float]]](list)
    last: dict[tuple[str, int, int], int] = {}
    for span in spans:
        session = extent.session_of(span)
        if session not in offsets_s or span.track not in places:  # written since the first pass
            continue
        kind = _kind(span.name)
        kind = kind if kind in bars or len(bars) < _MAX_KINDS else "other work"
        track, start_s = places[span.track], span.start_s + offsets_s[session]
        end_s = start_s + span.end_s - span.start_s
        index = last.get((kind, track, session))
        if index is not None and gap_s > 0:
            _, before_s, length_s = bars[kind][index]
            if start_s - (before_s + length_s) <= gap_s:
                low_s, high_s = min(before_s, start_s), max(before_s + length_s, end_s)
                bars[kind][index] = (track, low_s, high_s - low_s)
                continue
        last[kind, track, session] = len(bars[kind])
        bars[kind].append((track, start_s, end_s - start_s))
    return {
        kind: [(track, _rounded(at), _rounded(length)) for track, at, length in each] for kind, each in bars.items()
    }


def _slots(bars: Bars) -> dict[str, int]:
    """Colours by kind: quiet ones first, so that they are drawn beneath the others, then the busiest."""
    busiest = sorted(bars, key=lambda name: -math.fsum(length for _, _, length in bars[name]))
    quiet = [name for name in busiest if name.startswith(_QUIET)]
    loud = [name for name in busiest if not name.startswith(_QUIET)]
    return {**dict.fromkeys(quiet, _QUIET_SLOT), **{name: slot for slot, name in enumerate(loud)}}


def _kind(name: str) -> str:
    """Return the name without its number: "version 12" and "version 13" are one kind of span, in one colour."""
    return re.sub(r"[\s#_-]*\d+\s*$", "", name) or name


def _track_order(name: str) -> tuple[int, str]:
    return next((i for i, role in enumerate(_ROLES) if name.startswith(role)), len(_ROLES)), name


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
