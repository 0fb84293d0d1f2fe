"""The figures of a report, built from the metrics that are there. No figure without data, and none of a constant."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from offbeat_run._console.quantities import number_text, share_text
from offbeat_run._metrics.names import CORRECTION_PREFIX, METRIC_NAMES, is_share, label_of
from offbeat_run._metrics.series import LagColumns, Points, RunMetrics, Series
from offbeat_run._report.plots import DATA, DISTANCE, DRAWN, OTHER, PLOTS, SCORING, VALIDATION, LinePlot
from offbeat_run._run_summary import says_the_same

_SMOOTHED_FROM: Final = 30
_MAX_LINES: Final = 6
_NOT_DRAWN: Final = ("eval/items", "eval/versions", "eval/response_tokens_p95")
"""Said elsewhere on the page."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    Args:
        group: of the page.
        title: heading.
        caption: how to read it, in a sentence or two.
        data: what page.js draws; its `kind` is lines, columns or bars.
        legend: (name, number of its colour) of what is drawn.
        is_wide: whether it takes the whole width of the page.
    """

    group: str
    title: str
    caption: str
    data: dict[str, Any]
    legend: list[tuple[str, int]]
    is_wide: bool = False


@dataclass(frozen=True)
class Constant:
    """A metric that has not changed over the run: one line of text says more than a plot.

    Args:
        group: of the page.
        label: its name for people.
        value: as text.
    """

    group: str
    label: str
    value: str


def metric_figures(metrics: RunMetrics) -> tuple[list[Figure], list[Constant]]:
    """Build every figure the metrics have data for, and the constants among them, in the order of the page."""
    held = metrics.series
    series = {name: each for name, each in held.items() if name not in _NOT_DRAWN and not says_the_same(name, held)}
    figures: list[Figure] = []
    constants: list[Constant] = []
    for plot in [*PLOTS, *_reward_plots(series), *_source_plots(series), *_set_plots(series), *_unknown_plots(series)]:
        found = {name: series[name] for name in plot.names if name in series}
        if plot.title == "Lag" and len(metrics.lags.columns) > 1:
            figures.append(_lag_figure(plot, metrics.lags, series))
            continue
        constant = {name: each for name, each in found.items() if each.is_constant}
        varying = {name: each for name, each in found.items() if not each.is_constant}
        constants += _constants(plot, constant)
        if varying:
            figures.append(_line_figure(plot, varying, series))
    return figures, constants


def _constants(plot: LinePlot, found: Mapping[str, Series]) -> list[Constant]:
    return [
        Constant(plot.group, _label(plot, name), _constant_text(plot, _label(plot, name), each.low))
        for name, each in found.items()
        if each.low or not plot.hides_zeros
    ]


def _constant_text(plot: LinePlot, label: str, value: float) -> str:
    if plot.unit == "%":
        return share_text(value)
    text = f"{value:,.0f}" if value.is_integer() else number_text(value)
    return text if plot.unit in label or plot.unit == "reward" else f"{text} {plot.unit}"


def _label(plot: LinePlot, name: str) -> str:
    return dict(plot.labels).get(name) or label_of(name)


def _line_figure(plot: LinePlot, found: Mapping[str, Series], series: Mapping[str, Series]) -> Figure:
    lines = [line for slot, (name, each) in enumerate(found.items()) for line in _lines(plot, name, each, slot, series)]
    steps = sorted({step for line in lines for step, _ in line["points"]})
    for line in lines:
        values = dict(line.pop("points"))
        line["values"] = [_rounded(values.get(step)) for step in steps]
        for end in ("low", "high"):
            if end in line:
                line[end] = [_rounded(line[end].get(step)) for step in steps]
    return Figure(
        group=plot.group,
        title=plot.title,
        caption=plot.caption,
        data={"kind": "lines", "unit": plot.unit, "zero": plot.from_zero, "x": steps, "lines": lines},
        legend=[(_label(plot, name), slot) for slot, name in enumerate(found)],
    )


def _lines(
    plot: LinePlot, name: str, each: Series, slot: int, series: Mapping[str, Series]
) -> Iterator[dict[str, Any]]:
    """A line; a rough one is drawn faintly under its running mean."""
    is_validated = name.startswith("eval/")
    if plot.is_smoothed and not is_validated and each.count >= _SMOOTHED_FROM:
        yield {"slot": slot, "points": each.points(), "faint": True}
        yield {"slot": slot, "points": _smoothed(each.means())}
        return
    ends = {end: dict(series[f"{name}_{end}"].points()) for end in ("low", "high") if f"{name}_{end}" in series}
    ends = ends if is_validated and len(ends) == 2 else {}
    yield {"slot": slot, "points": each.points(), "marked": is_validated or each.count < 3, **ends}


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _smoothed(points: Points) -> Points:
    """Mean over about a twentieth of the run around each point, so that a trend is not shown late."""
    half = max(1, len(points) // 40)
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    ranges = ((max(0, at - half), min(len(points), at + half + 1)) for at in range(len(points)))
    return [
        (step, (sums[stop] - sums[start]) / (stop - start))
        for (step, _), (start, stop) in zip(points, ranges, strict=True)
    ]


def _lag_figure(plot: LinePlot, lags: LagColumns, series: Mapping[str, Series]) -> Figure:
    columns = sorted(lags.columns, key=itemgetter(0))
    height = max(len(counts) for _, counts in columns)
    shares = [[_rounded(count / sum(counts)) for count in counts] for _, counts in columns]
    mean = dict(series["train/lag_mean"].points()) if "train/lag_mean" in series else {}
    steps = [step for step, _ in columns]
    data = {"kind": "columns", "x": steps, "shares": shares, "height": height, "unit": "versions"}
    return Figure(
        group=DISTANCE,
        title=plot.title,
        caption="Share of completions by policy versions between sampling the oldest token and training on it.",
        data={**data, "lines": [{"slot": 1, "values": [_rounded(mean.get(step)) for step in steps]}] if mean else []},
        legend=[("completions by lag", 0), *([(label_of("train/lag_mean"), 1)] if mean else [])],
    )


_OF_A_SET: Final = re.compile(r"eval/([^/]+)/(.+)")
_ESTIMATE: Final = re.compile(r"accuracy|(pass|maj)_at_(\d+)")
_OF_A_SOURCE: Final = re.compile(r"mix/([^/]+)/([^/]+)")
_OF_REWARD: Final = re.compile(r"reward/([^/]+)")
_SOURCE_PLOTS: Final = {
    "share": ("Mix: groups", "Share of each source in the groups that ended since the update before.", "%"),
    "success_rate": ("Mix: success", "Share of the samples of each source that succeed.", "%"),
    "reward": ("Mix: reward", "Mean reward of the samples of each source.", ""),
    "known": ("Mix: known prompts", "Share of each source's prompts whose success rate is known.", "%"),
    "too_easy": ("Mix: too easy", "Share of each source's prompts that lately succeed too often.", "%"),
    "too_hard": ("Mix: too hard", "Share of each source's prompts that lately succeed too seldom.", "%"),
}


def _split(plot: LinePlot) -> Iterator[LinePlot]:
    """The plot, as several where one would have too many lines."""
    for first in range(0, len(plot.names), _MAX_LINES):
        yield replace(plot, names=plot.names[first : first + _MAX_LINES])


def _reward_plots(series: Mapping[str, Series]) -> Iterator[LinePlot]:
    """The parts of a reward that is a sum."""
    names = tuple(sorted(name for name in series if _OF_REWARD.fullmatch(name)))
    caption = "Mean of each part of the reward, before its weight."
    yield from _split(LinePlot(group=SCORING, title="Parts of the reward", caption=caption, names=names))


def _source_plots(series: Mapping[str, Series]) -> Iterator[LinePlot]:
    """Plots of the sources that training prompts are mixed from, each with a line for every source."""
    found: dict[str, dict[str, str]] = {what: {} for what in _SOURCE_PLOTS}
    for name in sorted(series):
        if (parts := _OF_A_SOURCE.fullmatch(name)) and parts[2] in found:
            found[parts[2]][name] = parts[1]
    for what, (title, caption, unit) in _SOURCE_PLOTS.items():
        labels = found[what]
        yield from _split(
            LinePlot(
                group=DATA,
                title=title,
                caption=caption,
                names=tuple(labels),
                labels=tuple(labels.items()),
                unit=unit,
                from_zero=bool(unit),
            )
        )


def _set_plots(series: Mapping[str, Series]) -> Iterator[LinePlot]:
    """Plots of the validation sets that have a name: what is right of each, and how long the answers of all are."""
    sets: dict[str, dict[str, str]] = defaultdict(dict)
    lengths: dict[str, str] = {}
    for name in series:
        if found := _OF_A_SET.fullmatch(name):
            set_name, what = found.groups()
            if what == "response_tokens":
                lengths[name] = set_name
            elif estimate := _ESTIMATE.fullmatch(what):
                sets[set_name][name] = f"{estimate[1]}@{estimate[2]}" if estimate[1] else "mean (avg@n)"
    right = "Share that is right, with 95 % intervals: of the samples, of k at least one, of k the majority."
    for set_name, labels in sets.items():
        yield from _set_plot(f"Validation: {set_name}", right, labels, "%")
    yield from _set_plot(
        "Length of validation answers", "Mean tokens of a sample of each validation set.", lengths, "tokens"
    )


def _set_plot(title: str, caption: str, labels: dict[str, str], unit: str) -> Iterator[LinePlot]:
    names, shown = tuple(labels), tuple(labels.items())
    yield from _split(LinePlot(group=VALIDATION, title=title, caption=caption, names=names, labels=shown, unit=unit))


def _unknown_plots(series: Mapping[str, Series]) -> Iterator[LinePlot]:
    """Plots for the rollout correction, then for every group of metrics unknown to the report."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(series):
        if not _is_drawn(name):
            groups[name.rpartition("/")[0], _unit(name)].append(name)
    for (group, unit), names in sorted(groups.items(), key=lambda item: (f"{item[0][0]}/" != CORRECTION_PREFIX, item)):
        is_correction = f"{group}/" == CORRECTION_PREFIX
        yield from _split(
            LinePlot(
                group=DISTANCE if is_correction else OTHER,
                title="Rollout correction" if is_correction else f"Other: {group}" if group else "Other",
                caption="Weights and rejections that make up for the lag." if is_correction else "",
                names=tuple(names),
                unit=unit,
                from_zero=False,
            )
        )


def _is_drawn(name: str) -> bool:
    """Return whether a plot that is known here has it."""
    of_a_source = _OF_A_SOURCE.fullmatch(name)
    of_a_set = name.startswith("eval/") and (
        name.endswith(("_low", "_high", "_p95", "/versions")) or name.count("/") > 1
    )
    return bool(
        name in DRAWN
        or of_a_set
        or (of_a_source and of_a_source[2] in _SOURCE_PLOTS)
        or _OF_REWARD.fullmatch(name)
        or (name.startswith("mismatch/") and name in METRIC_NAMES)
    )


def _unit(name: str) -> str:
    """Return the unit that the name shows, so that shares and times do not share an axis."""
    if name in METRIC_NAMES and METRIC_NAMES[name].unit:
        return METRIC_NAMES[name].unit
    found = re.search(r"_(tokens|nats|bytes|s)$", name)
    return "%" if is_share(name) else found[1] if found else ""


def figure_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return the input of page.js, in the order of the page."""
    return [{**each.data, "title": each.title, "legend": [name for name, _ in each.legend]} for each in figures]
