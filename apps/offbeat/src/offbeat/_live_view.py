"""A run as a notebook shows it while it trains: curves, last metrics, and the last lines of its command."""

import html
import sys
import time
from collections import deque
from importlib import import_module
from typing import Any, Final

from offbeat._run import Event, MessageEvent, MetricsEvent, Run

_CURVES: Final = ("eval/accuracy", "train/reward", "eval/loss", "train/loss", "rewards/margins")
"""Drawn where a run has them, in this order."""
_WIDTH: Final = 280
_HEIGHT: Final = 64
"""Size of a curve, pixels: two fit beside each other in a cell."""
_MAX_POINTS: Final = 1000
"""Points of a curve; of more, every second one goes."""
_MAX_LINES: Final = 8
_DRAW_EVERY_S: Final = 1.0


class LiveView:
    """The output of a notebook's cell, drawn anew as events come.

    Args:
        run: whose events they are.
        display: IPython's: shows an object, and returns a handle that shows it again.
    """

    def __init__(self, run: Run, display: Any) -> None:
        self._run, self._lines = run, deque[str](maxlen=_MAX_LINES)
        self._points: dict[str, list[tuple[int, float]]] = {name: [] for name in _CURVES}
        self._drawn_s = time.monotonic()
        self._handle = display(self, display_id=True)

    def take(self, event: Event) -> None:
        """Note an event, and draw at most once a second."""
        if isinstance(event, MessageEvent):
            self._lines.append(event.text)
        elif isinstance(event, MetricsEvent):
            for name, points in self._points.items():
                if isinstance(value := event.values.get(name), float):
                    points.append((event.step, value))
                    if len(points) > _MAX_POINTS:
                        del points[1::2]
        if time.monotonic() - self._drawn_s > _DRAW_EVERY_S:
            self.draw()

    def draw(self) -> None:
        """Show what is known now."""
        self._drawn_s = time.monotonic()
        self._handle.update(self)

    def _repr_html_(self) -> str:
        curves = "".join(_curve(name, points) for name, points in self._points.items() if points)
        lines = html.escape("\n".join(self._lines))
        return f"<p>{html.escape(repr(self._run))}</p>{curves}<pre>{lines}</pre>"


def live_view(run: Run) -> LiveView | None:
    """Return a view of the run in the cell of a notebook that runs this program; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")  # a program that a kernel runs has it
    if not hasattr(ipython and ipython.get_ipython(), "kernel"):
        return None
    return LiveView(run, import_module("IPython.display").display)


def _curve(name: str, points: list[tuple[int, float]]) -> str:
    """Return a curve as SVG, under its name and its last value."""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    wide, tall = max(steps[-1] - steps[0], 1), (high - low) or 1.0
    drawn = " ".join(
        f"{(step - steps[0]) / wide * _WIDTH:.1f},{_HEIGHT - (value - low) / tall * _HEIGHT:.1f}"
        for step, value in points
    )
    return (
        f'<figure style="display: inline-block; margin: 8px"><figcaption>{name} {values[-1]:.4g}</figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 4}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}">'
        f'<polyline points="{drawn}" fill="none" stroke="#3b6fb5" stroke-width="2"/></svg></figure>'
    )
