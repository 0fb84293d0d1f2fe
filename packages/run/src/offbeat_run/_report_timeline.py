"""The timeline strip of a report: one bar a span, one row a track."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from offbeat_run._report_figures import Figure

_MAX_BARS = 3000
_WINDOW_BARS = 240
_QUIET = ("idle", "wait")


def timeline_figure(events: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw the spans of a trace, or None when there are none.

    A long run opens on a window in its middle, where steps can be told apart; the whole of it is one double click away.
    """
    names = {event["tid"]: str(event["args"]["name"]) for event in events if event.get("ph") == "M"}
    spans = [event for event in events if event.get("ph") == "X" and event["tid"] in names]
    if not spans:
        return None
    start_us = min(float(span["ts"]) for span in spans)
    end_s = max((float(span["ts"]) + float(span["dur"]) - start_us) / 1e6 for span in spans)
    bars = _joined(spans, names, start_us, gap_s=0.0 if len(spans) <= _MAX_BARS else end_s / _MAX_BARS)
    order = sorted(set(names.values()), key=_track_order, reverse=True)
    axis: dict[str, Any] = {"title": {"text": "seconds since the start"}}
    num_bars = sum(len(rows) for rows in bars.values())
    if num_bars > _WINDOW_BARS:
        half = end_s * _WINDOW_BARS / num_bars / 2
        axis["range"] = [end_s / 2 - half, end_s / 2 + half]
    layout = {
        "barmode": "overlay",
        "bargap": 0.35,
        "height": 130 + 42 * len(order),
        "xaxis": axis,
        "yaxis": {"categoryorder": "array", "categoryarray": [html.escape(name) for name in order], "automargin": True},
        "showlegend": True,
    }
    return Figure(
        title="Timeline",
        caption="Who worked when. Drag to zoom, double-click to see the whole run; timeline.json opens in Perfetto.",
        traces=_traces(bars),
        layout=layout,
        wide=True,
    )


Bars = dict[str, list[tuple[str, float, float]]]


def _joined(spans: Sequence[dict[str, Any]], names: dict[int, str], start_us: float, gap_s: float) -> Bars:
    """Spans by name as (track, start, length); in a long run, those closer than `gap_s` become one."""
    bars: Bars = defaultdict(list)
    last: dict[tuple[str, str], int] = {}
    for span in sorted(spans, key=lambda each: float(each["ts"])):
        name, track = _kind(str(span["name"])), names[span["tid"]]
        begin_s, length_s = (float(span["ts"]) - start_us) / 1e6, float(span["dur"]) / 1e6
        index = last.get((name, track))
        if index is not None and gap_s > 0:
            _, before_s, before_length_s = bars[name][index]
            if begin_s - (before_s + before_length_s) <= gap_s:
                bars[name][index] = (track, before_s, max(before_length_s, begin_s + length_s - before_s))
                continue
        last[name, track] = len(bars[name])
        bars[name].append((track, begin_s, length_s))
    return bars


def _kind(name: str) -> str:
    """The name without its number: "version 12" and "version 13" are one kind of span, in one colour."""
    return re.sub(r"[\s#_-]*\d+\s*$", "", name) or name


def _traces(bars: Bars) -> list[dict[str, Any]]:
    busiest = sorted(bars, key=lambda name: -math.fsum(length for _, _, length in bars[name]))
    loud = [name for name in busiest if not name.startswith(_QUIET)]
    quiet = [name for name in busiest if name.startswith(_QUIET)]
    # Quiet spans first: they are drawn beneath the others.
    return [_trace(name, bars[name], "quiet") for name in quiet] + [
        _trace(name, bars[name], slot) for slot, name in enumerate(loud)
    ]


def _trace(name: str, bars: list[tuple[str, float, float]], slot: int | str) -> dict[str, Any]:
    shown = html.escape(name)
    return {
        "type": "bar",
        "orientation": "h",
        "name": shown,
        "y": [html.escape(track) for track, _, _ in bars],
        "base": [round(begin_s, 4) for _, begin_s, _ in bars],
        "x": [round(length_s, 4) for _, _, length_s in bars],
        "meta": {"slot": slot},
        "hovertemplate": f"%{{y}}: {shown}, %{{x:.3f}} s from %{{base:.2f}} s<extra></extra>",
    }


def _track_order(name: str) -> tuple[int, str]:
    roles = ("driver", "trainer", "rollout", "teacher", "scorer")
    return next((i for i, role in enumerate(roles) if name.startswith(role)), len(roles)), name
