"""The figures of a report: plain plotly figures built from the metrics that are there. No figure without data."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat_run._metrics import CORRECTION_PREFIX, METRIC_NAMES, MetricsLine

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


@dataclass(frozen=True)
class _Lines:
    """A figure of lines over the updates; `labels` by the metric's name."""

    title: str
    caption: str
    labels: dict[str, str]
    y_axis: dict[str, Any] = field(default_factory=dict)
    hide_zeros: bool = False
    smooth: bool = True

    def has_data(self, series: dict[str, Series]) -> bool:
        """Whether there is something to see."""
        return any(name in series and (not self.hide_zeros or any(v for _, v in series[name])) for name in self.labels)


def _from_zero(unit: str = "", **more: Any) -> dict[str, Any]:
    return {"rangemode": "tozero", **({"title": {"text": unit}} if unit else {}), **more}


_LINES = (
    _Lines(
        "Reward",
        "In training, and on held-out prompts.",
        {"train/reward": "training", "eval/reward": "held-out", "eval/accuracy": "held-out accuracy"},
    ),
    _Lines("Loss", "In training, and on held-out sequences.", {"train/loss": "training", "eval/loss": "held-out"}),
    _Lines(
        "Response length",
        "Mean tokens of a completion. A jump to the limit means that answers no longer end.",
        {"train/response_tokens": "training"},
        _from_zero("tokens"),
    ),
    _Lines(
        "Overlap and idle time",
        "Trainer and rollout working at once, and each waiting for the other.",
        {
            "async/overlap_share": "overlap",
            "async/trainer_idle_share": "trainer idle",
            "async/rollout_idle_share": "rollout idle",
        },
        _SHARE,
    ),
    _Lines(
        "Tokens per second",
        "Sampled, or trained on in a fine-tuning run.",
        {"perf/tokens_per_s": "tokens/s"},
        _from_zero("tokens/s"),
    ),
    _Lines(
        "Entropy",
        "Of the policy, in nats per token. A fall to zero means it has stopped exploring.",
        {"train/entropy": "entropy"},
        _from_zero("nats"),
    ),
    _Lines(
        "KL to the reference",
        "How far the policy has moved from where it began, in nats per token.",
        {"train/kl_ref": "KL"},
        {"title": {"text": "nats"}},
    ),
    _Lines(
        "Divergence from the teacher",
        "Of the policy on its own samples, in nats per token. k3 estimates the same without negative values.",
        {"distillation/kl": "KL", "distillation/kl_k3": "KL, k3"},
        {"title": {"text": "nats"}},
    ),
    _Lines(
        "Mismatch of trainer and rollout engines",
        "Nats that 99 of 100 log-probabilities differ by at most. A rise under the weights in training is an error.",
        {"mismatch/abs_p99_nats_lag0": "weights in training", "mismatch/abs_p99_nats_lagged": "older weights"},
        _from_zero("nats"),
    ),
    _Lines(
        "Effective sample size",
        "Share of the tokens that an update would be worth if each were weighed by trainer's / engine's probability.",
        {"mismatch/ess_share": "all tokens", "mismatch/ess_share_lag0": "weights in training"},
        _SHARE,
    ),
    _Lines(
        "Clip fraction",
        "Share of tokens whose update was cut by the clip range.",
        {"train/clip_fraction": "clipped"},
        _from_zero(tickformat=".1%"),
    ),
    _Lines(
        "Largest ratio",
        "New to old policy, at the token where they differ most.",
        {"train/ratio_max": "largest ratio"},
    ),
    _Lines(
        "What the critic explains",
        "Share of the returns' variance that its values explain, before the update. Near 0 it has learned nothing yet.",
        {"critic/explained_variance": "explained"},
        {"tickformat": ".0%"},
    ),
    _Lines(
        "Values and returns",
        "What the critic expects of a token, and what it should: means over the tokens of an update.",
        {"critic/value": "value", "critic/return": "return"},
        {"title": {"text": "reward"}},
    ),
    _Lines("Loss of the critic", "Half the squared error of its values.", {"critic/loss": "loss"}, _from_zero()),
    _Lines(
        "Groups left out",
        "Filtered: all rewards equal, nothing to learn. Dropped: sampled by too old a policy.",
        {"groups/filtered": "filtered", "groups/dropped": "dropped"},
        _from_zero("groups"),
    ),
    _Lines(
        "Curriculum",
        "Share of the prompts of which success is known, and of those drawn less often for it.",
        {"curriculum/known": "known", "curriculum/too_easy": "too easy", "curriculum/too_hard": "too hard"},
        _SHARE,
        smooth=False,
    ),
    _Lines(
        "Scoring time",
        "From asking for a reward to having it, the wait for a scorer included.",
        {"scoring/latency_p50_s": "median", "scoring/latency_p95_s": "95 %", "scoring/latency_max_s": "longest"},
        _from_zero("s"),
    ),
    _Lines(
        "Scorers at work",
        "Share of the time. Near 1 with completions in the queue, more processes would score sooner.",
        {"scoring/busy_share": "busy"},
        _SHARE,
    ),
    _Lines(
        "Waiting for a scorer",
        "Completions in the queue.",
        {"scoring/queue": "queue"},
        _from_zero("completions"),
        hide_zeros=True,
    ),
    _Lines(
        "Replies of the judge",
        "Since the start. Cached replies were known from before and cost nothing.",
        {"judge/requests": "asked", "judge/cached": "cached", "judge/retries": "failed in passing"},
        _from_zero("requests"),
        smooth=False,
    ),
    _Lines(
        "Tokens of the judge",
        "Read and written since the start: what it costs.",
        {"judge/prompt_tokens": "read", "judge/completion_tokens": "written"},
        _from_zero("tokens"),
        smooth=False,
    ),
    _Lines("Gradient norm", "Before clipping.", {"engine/grad_norm": "gradient norm"}, _from_zero()),
    _Lines(
        "Learning rate",
        "Of the last optimizer step.",
        {"engine/learning_rate": "learning rate"},
        _from_zero(exponentformat="e"),
        smooth=False,
    ),
    _Lines(
        "Refused steps",
        "Optimizer steps with a gradient that was not finite.",
        {"engine/steps_refused": "refused"},
        _from_zero(),
        hide_zeros=True,
    ),
    _Lines("Samples per second", "Trained on.", {"perf/samples_per_s": "samples/s"}, _from_zero("samples/s")),
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
    figures += [_line_figure(spec, series) for spec in [*_source_lines(series), *_set_lines(series)]]
    return figures + [_line_figure(spec, series) for spec in _unknown_groups(series)]


def number_series(lines: Iterable[MetricsLine]) -> dict[str, Series]:
    """Collect (step, value) by name: numbers only, finite ones only."""
    series: dict[str, Series] = defaultdict(list)
    for line in lines:
        for name, value in line.values.items():
            if isinstance(value, float) and math.isfinite(value):
                series[name].append((line.step, value))
    # A validation that went on beside training is written down after later updates.
    return {name: sorted(points, key=lambda point: point[0]) for name, points in series.items()}


def _line_figure(spec: _Lines, series: dict[str, Series]) -> Figure:
    traces: list[dict[str, Any]] = []
    for slot, (name, label) in enumerate(spec.labels.items()):
        if name in series:
            rough = spec.smooth and not name.startswith("eval/") and len(series[name]) >= _SMOOTH_FROM
            drawn = _line_traces(series[name], html.escape(label), slot, marked=name.startswith("eval/"), rough=rough)
            drawn[-1] |= _interval(name, series)
            traces += drawn
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


def _interval(name: str, series: dict[str, Series]) -> dict[str, Any]:
    """Bars from the low to the high end of a validation's estimate, where it has an interval."""
    low, middle, high = (dict(series.get(key, ())) for key in (f"{name}_low", name, f"{name}_high"))
    if not low or not low.keys() == middle.keys() == high.keys() or len(middle) > _MAX_POINTS:
        return {}
    up = [round(high[step] - value, 6) for step, value in middle.items()]
    down = [round(value - low[step], 6) for step, value in middle.items()]
    return {
        "error_y": {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "width": 3}
    }


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
        "Lag",
        "Policy versions between sampling the oldest token of a completion and training on it.",
        {"train/lag_mean": "mean", "train/lag_max": "largest"},
        _from_zero("versions"),
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


_OF_A_SET = re.compile(r"eval/([^/]+)/(.+)")
_ESTIMATE = re.compile(r"accuracy|(pass|maj)_at_(\d+)")


_OF_A_SOURCE = re.compile(r"mix/([^/]+)/([^/]+)")
_SOURCE_FIGURES = {
    "share": ("Mix: groups", "Share of each source in the groups that ended since the update before.", _SHARE),
    "success_rate": ("Mix: success", "Share of the samples of each source that succeed.", _SHARE),
    "reward": ("Mix: reward", "Mean reward of the samples of each source.", {}),
    "known": ("Mix: known prompts", "Share of each source's prompts of which success is known.", _SHARE),
    "too_easy": ("Mix: too easy", "Share of each source's prompts that lately succeed too often.", _SHARE),
    "too_hard": ("Mix: too hard", "Share of each source's prompts that lately succeed too seldom.", _SHARE),
}


def _source_lines(series: dict[str, Series]) -> list[_Lines]:
    """Figures of the sources that training prompts are mixed from, each with a line for every source."""
    found: dict[str, dict[str, str]] = {what: {} for what in _SOURCE_FIGURES}
    for metric in sorted(series):
        if (parts := _OF_A_SOURCE.fullmatch(metric)) and parts[2] in found:
            found[parts[2]][metric] = parts[1]
    return [
        _Lines(title, caption, dict(labels[first : first + _MAX_TRACES]), y_axis)
        for what, (title, caption, y_axis) in _SOURCE_FIGURES.items()
        for labels in [list(found[what].items())]
        for first in range(0, len(labels), _MAX_TRACES)
    ]


def _set_lines(series: dict[str, Series]) -> list[_Lines]:
    """Figures of the validation sets that have a name: what is right of each, and how long the answers of all are."""
    sets: dict[str, dict[str, str]] = defaultdict(dict)
    lengths: dict[str, str] = {}
    for metric in series:
        if found := _OF_A_SET.fullmatch(metric):
            name, what = found.groups()
            if what == "response_tokens":
                lengths[metric] = name
            elif estimate := _ESTIMATE.fullmatch(what):
                sets[name][metric] = f"{estimate[1]}@{estimate[2]}" if estimate[1] else "mean (avg@n)"
    caption = "Share that is right, with 95 % intervals: of the samples, of k at least one, of k the majority."
    lines = [
        _Lines(f"Validation: {name}", caption, dict(list(labels.items())[:_MAX_TRACES]), _SHARE)
        for name, labels in sets.items()
    ]
    mean = "Mean tokens of a sample of each validation set."
    return lines + ([_Lines("Length of validation answers", mean, lengths, _from_zero("tokens"))] if lengths else [])


def _unknown_groups(series: dict[str, Series]) -> list[_Lines]:
    """Figures for the rollout correction, then for every group of metrics nobody told the report about."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(series):
        is_interval = name.startswith("eval/") and name.endswith(("_low", "_high"))
        of_a_source = _OF_A_SOURCE.fullmatch(name)
        is_drawn = _OF_A_SET.fullmatch(name) or (of_a_source and of_a_source[2] in _SOURCE_FIGURES)
        if name not in METRIC_NAMES and not is_interval and not is_drawn:
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
        "Rollout correction" if correction else f"Other: {group}" if group else "Other",
        ("Weights and rejections that make up for the lag: " if correction else "") + ", ".join(names),
        {name: name.rpartition("/")[2] for name in names},
    )


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
        traces=_bar_traces(bars),
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


def _bar_traces(bars: Bars) -> list[dict[str, Any]]:
    busiest = sorted(bars, key=lambda name: -math.fsum(length for _, _, length in bars[name]))
    loud = [name for name in busiest if not name.startswith(_QUIET)]
    quiet = [name for name in busiest if name.startswith(_QUIET)]
    # Quiet spans first: they are drawn beneath the others.
    return [_bar_trace(name, bars[name], "quiet") for name in quiet] + [
        _bar_trace(name, bars[name], slot) for slot, name in enumerate(loud)
    ]


def _bar_trace(name: str, bars: list[tuple[str, float, float]], slot: int | str) -> dict[str, Any]:
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
