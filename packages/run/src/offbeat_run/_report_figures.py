"""The figures of a report: plain plotly figures built from the metrics that are there. No figure without data."""

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat_run._metrics import MetricsLine
from offbeat_run._names import CORRECTION_PREFIX, METRIC_NAMES

Series = list[tuple[int, float]]

_MAX_POINTS = 1500
_SMOOTH_FROM = 30
_MAX_TRACES = 6
_SHARE = {"tickformat": ".0%", "range": [0, 1.02]}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: plotly traces and layout, with a heading and one sentence on how to read it."""

    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """A figure of lines over the updates."""

    title: str
    caption: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    y_axis: dict[str, Any] = field(default_factory=dict)
    hide_zeros: bool = False
    smooth: bool = True

    def has_data(self, series: dict[str, Series]) -> bool:
        """Whether there is something to see."""
        return any(name in series and (not self.hide_zeros or any(v for _, v in series[name])) for name in self.names)


_LINES = (
    _Lines(
        title="Reward",
        caption="In training, and on held-out prompts.",
        names=("train/reward", "eval/reward", "eval/accuracy"),
        labels=("training", "held-out", "held-out accuracy"),
    ),
    _Lines(
        title="Loss",
        caption="In training, and on held-out sequences.",
        names=("train/loss", "eval/loss"),
        labels=("training", "held-out"),
    ),
    _Lines(
        title="Response length",
        caption="Mean tokens of a completion. A jump to the limit means that answers no longer end.",
        names=("train/response_tokens",),
        labels=("training",),
        y_axis={"title": {"text": "tokens"}, "rangemode": "tozero"},
    ),
    _Lines(
        title="Overlap and idle time",
        caption="Trainer and rollout working at once, and each waiting for the other.",
        names=("async/overlap_share", "async/trainer_idle_share", "async/rollout_idle_share"),
        labels=("overlap", "trainer idle", "rollout idle"),
        y_axis=_SHARE,
    ),
    _Lines(
        title="Tokens per second",
        caption="Sampled, or trained on in a fine-tuning run.",
        names=("perf/tokens_per_s",),
        labels=("tokens/s",),
        y_axis={"title": {"text": "tokens/s"}, "rangemode": "tozero"},
    ),
    _Lines(
        title="Entropy",
        caption="Of the policy, in nats per token. A fall to zero means it has stopped exploring.",
        names=("train/entropy",),
        labels=("entropy",),
        y_axis={"title": {"text": "nats"}, "rangemode": "tozero"},
    ),
    _Lines(
        title="KL to the reference",
        caption="How far the policy has moved from where it began, in nats per token.",
        names=("train/kl_ref",),
        labels=("KL",),
        y_axis={"title": {"text": "nats"}},
    ),
    _Lines(
        title="Clip fraction",
        caption="Share of tokens whose update was cut by the clip range.",
        names=("train/clip_fraction",),
        labels=("clipped",),
        y_axis={"tickformat": ".1%", "rangemode": "tozero"},
    ),
    _Lines(
        title="Largest ratio",
        caption="New to old policy, at the token where they differ most.",
        names=("train/ratio_max",),
        labels=("largest ratio",),
    ),
    _Lines(
        title="Groups left out",
        caption="Filtered: all rewards equal, nothing to learn. Dropped: sampled by too old a policy.",
        names=("groups/filtered", "groups/dropped"),
        labels=("filtered", "dropped"),
        y_axis={"title": {"text": "groups"}, "rangemode": "tozero"},
    ),
    _Lines(
        title="Gradient norm",
        caption="Before clipping.",
        names=("engine/grad_norm",),
        labels=("gradient norm",),
        y_axis={"rangemode": "tozero"},
    ),
    _Lines(
        title="Learning rate",
        caption="Of the last optimizer step.",
        names=("engine/learning_rate",),
        labels=("learning rate",),
        smooth=False,
        y_axis={"rangemode": "tozero", "exponentformat": "e"},
    ),
    _Lines(
        title="Refused steps",
        caption="Optimizer steps with a gradient that was not finite.",
        names=("engine/steps_refused",),
        labels=("refused",),
        hide_zeros=True,
        y_axis={"rangemode": "tozero"},
    ),
    _Lines(
        title="Samples per second",
        caption="Trained on.",
        names=("perf/samples_per_s",),
        labels=("samples/s",),
        y_axis={"title": {"text": "samples/s"}, "rangemode": "tozero"},
    ),
)
_LAG_AFTER = "Overlap and idle time"


def metric_figures(lines: Sequence[MetricsLine]) -> list[Figure]:
    """Build every figure the metrics have data for, the important ones first, metrics unknown here last."""
    series = number_series(lines)
    figures = []
    for spec in _LINES:
        if spec.has_data(series):
            figures.append(_line_figure(spec, series))
        if spec.title == _LAG_AFTER:
            figures += _lag_figures(lines, series)
    return figures + [_line_figure(spec, series) for spec in _unknown_groups(series)]


def number_series(lines: Iterable[MetricsLine]) -> dict[str, Series]:
    """Collect (step, value) by name: numbers only, finite ones only."""
    series: dict[str, Series] = defaultdict(list)
    for line in lines:
        for name, value in line.values.items():
            if isinstance(value, float) and math.isfinite(value):
                series[name].append((line.step, value))
    return dict(series)


def _line_figure(spec: _Lines, series: dict[str, Series]) -> Figure:
    traces: list[dict[str, Any]] = []
    for slot, (name, label) in enumerate(zip(spec.names, spec.labels, strict=True)):
        if name in series:
            rough = spec.smooth and not name.startswith("eval/") and len(series[name]) >= _SMOOTH_FROM
            traces += _line_traces(series[name], html.escape(label), slot, marked=name.startswith("eval/"), rough=rough)
    layout = {"yaxis": spec.y_axis, "showlegend": sum("showlegend" not in trace for trace in traces) > 1}
    return Figure(title=spec.title, caption=spec.caption, traces=traces, layout=layout)


def _line_traces(points: Series, label: str, slot: int, *, marked: bool, rough: bool) -> list[dict[str, Any]]:
    """A line; a rough one is drawn faint under its running mean. `meta.slot` picks the colour of the theme."""
    thin = thinned(points)
    marks = {"mode": "lines+markers" if marked or len(thin) < 3 else "lines", "meta": {"slot": slot}}
    if not rough:
        return [_trace(thin, label, marks)]
    faint = {**marks, "opacity": 0.3, "showlegend": False, "hoverinfo": "skip", "line": {"width": 1}}
    return [_trace(thin, label, faint), _trace(_smoothed(thin), label, marks)]


def _trace(points: Series, label: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": label,
        "x": [step for step, _ in points],
        "y": [float(f"{value:.6g}") for _, value in points],
        **extra,
    }


def _smoothed(points: Series) -> Series:
    """Mean over about a twentieth of the run around each point, so that a trend is not shown late."""
    half = max(1, len(points) // 40)
    values = [value for _, value in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def thinned(points: Series, limit: int = _MAX_POINTS) -> Series:
    """At most `limit` points, evenly chosen, the last one always among them."""
    if len(points) <= limit:
        return points
    stride = math.ceil(len(points) / limit)
    return points[::-1][::stride][::-1]


def _lag_figures(lines: Sequence[MetricsLine], series: dict[str, Series]) -> list[Figure]:
    counts = [(line.step, line.values["async/lag_histogram"]) for line in lines if "async/lag_histogram" in line.values]
    rows = [(step, value) for step, value in counts if isinstance(value, list) and sum(value) > 0]
    if rows:
        return [_lag_heatmap(rows, series)]
    if "train/lag_mean" not in series and "train/lag_max" not in series:
        return []
    spec = _Lines(
        title="Lag",
        caption="Policy versions between sampling the oldest token of a completion and training on it.",
        names=("train/lag_mean", "train/lag_max"),
        labels=("mean", "largest"),
        y_axis={"title": {"text": "versions"}, "rangemode": "tozero"},
    )
    return [_line_figure(spec, series)]


def _lag_heatmap(rows: Sequence[tuple[int, list[float]]], series: dict[str, Series]) -> Figure:
    rows = rows[:: math.ceil(len(rows) / 300)]
    height = max(len(counts) for _, counts in rows)
    columns = [[*counts, *[0.0] * (height - len(counts))] for _, counts in rows]
    shares = [[round(column[lag] / sum(column), 4) for column in columns] for lag in range(height)]
    heatmap = {
        "type": "heatmap",
        "x": [step for step, _ in rows],
        "y": list(range(height)),
        "z": shares,
        "zmin": 0,
        "zmax": 1,
        "ygap": 1,
        "colorscale": [[0, "rgba(59,111,201,0)"], [0.02, "rgba(59,111,201,0.15)"], [1, "rgba(59,111,201,0.95)"]],
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "update %{x}, lag %{y}: %{z:.0%}<extra></extra>",
    }
    mean = series.get("train/lag_mean", [])
    line = [_trace(thinned(mean), "mean lag", {"mode": "lines", "meta": {"slot": 1}})] if mean else []
    return Figure(
        title="Lag",
        caption="Share of completions by policy versions between sampling the oldest token and training on it.",
        traces=[heatmap, *line],
        layout={"yaxis": {"title": {"text": "versions"}, "dtick": max(1, height // 6)}, "showlegend": False},
    )


def _unknown_groups(series: dict[str, Series]) -> list[_Lines]:
    """Figures for the rollout correction, then for every group of metrics nobody told the report about."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(series):
        if name not in METRIC_NAMES:
            groups[name.rpartition("/")[0]].append(name)
    ordered = sorted(groups.items(), key=lambda item: (f"{item[0]}/" != CORRECTION_PREFIX, item[0]))
    return [
        _unknown_figure(group, names[first : first + _MAX_TRACES])
        for group, names in ordered
        for first in range(0, len(names), _MAX_TRACES)
    ]


def _unknown_figure(group: str, names: Sequence[str]) -> _Lines:
    correction = f"{group}/" == CORRECTION_PREFIX
    return _Lines(
        title="Rollout correction" if correction else f"Other: {group}" if group else "Other",
        caption=("Weights and rejections that make up for the lag: " if correction else "") + ", ".join(names),
        names=tuple(names),
        labels=tuple(name.rpartition("/")[2] for name in names),
    )
