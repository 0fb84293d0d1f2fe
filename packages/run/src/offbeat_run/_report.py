"""Writes report.html: one page that says how a run went, readable without a network."""

import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from offbeat_run._folder import RunFolder
from offbeat_run._generations import Generation, GenerationKind, read_generations
from offbeat_run._metrics import MetricsLine, read_metrics
from offbeat_run._names import METRIC_NAMES
from offbeat_run._progress import duration_text, number_text
from offbeat_run._quantities import size_text
from offbeat_run._report_figures import Series, metric_figures, number_series
from offbeat_run._report_timeline import timeline_figure
from offbeat_run._timeline import read_timeline

_SAMPLES = 8
_FIGURES_ABOVE_TIMELINE = 6
_MAX_TILES = 6
_TILES = {
    "eval/accuracy": "held-out accuracy",
    "eval/loss": "held-out loss",
    "train/reward": "training reward",
    "async/overlap_share": "overlap",
    "perf/tokens_per_s": "tokens/s",
    "eval/reward": "held-out reward",
    "train/loss": "training loss",
}
_KINDS: Final[tuple[GenerationKind, ...]] = ("validation", "train")
_SUMMARY = (
    "eval/accuracy",
    "eval/reward",
    "eval/loss",
    "train/reward",
    "train/loss",
    "train/response_tokens",
    "train/entropy",
    "train/lag_mean",
    "async/overlap_share",
    "async/trainer_idle_share",
    "async/rollout_idle_share",
    "perf/tokens_per_s",
    "perf/samples_per_s",
)


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One metric at both ends of the run."""

    name: str
    doc: str
    before: str
    after: str
    change: str


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Completions of one moment of the run."""

    title: str
    samples: list[Generation]


def write_report(folder: Path | str | RunFolder) -> Path:
    """Write the report of a run, finished, killed or still running, from what its folder holds.

    Everything is inside the one file, plotly.js included; the page's own policy forbids it to load anything, and
    to run any script but ours, whatever a completion holds.

    Args:
        folder: the run folder, or its path.

    Returns:
        The path of report.html.

    Raises:
        RunFolderError: not a run folder, or no space left.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder, write=False)
    run.write_text(run.report, _page(run))
    return run.report


def _page(run: RunFolder) -> str:
    from jinja2 import Environment, PackageLoader  # imported late, like plotly: training needs neither
    from plotly.offline import get_plotlyjs

    damaged: list[str] = []
    lines, samples = read_metrics(run.metrics, damaged), _sample_tables(run, damaged)
    series = number_series(lines)
    figures = metric_figures(lines)
    strip = timeline_figure(read_timeline(run.timeline))
    if strip:
        figures.insert(min(_FIGURES_ABOVE_TIMELINE, len(figures)), strip)
    environment = Environment(loader=PackageLoader("offbeat_run", "_report"), autoescape=True, trim_blocks=True)
    environment.tests["drawable"] = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+").fullmatch
    return environment.get_template("page.html").render(
        name=run.path.name,
        written=time.strftime("%Y-%m-%d %H:%M"),
        tiles=_tiles(lines, series),
        summary=[_summary_row(name, series[name]) for name in _SUMMARY if name in series],
        figures=figures,
        figures_json=_script_json([{"data": each.traces, "layout": each.layout} for each in figures]),
        samples=samples,
        damaged=damaged,
        traces=_traces(run),
        texts=[(path.name, path.read_text()) for path in (run.plan, run.config) if path.is_file()],
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        nonce=secrets.token_urlsafe(16),
    )


def _traces(run: RunFolder) -> list[tuple[str, str]]:
    """(path within the folder, size) of each trace of a step."""
    found = sorted(run.profile.glob("*.json"), key=lambda path: (path.stem.rpartition("-")[0], path.stat().st_mtime))
    return [(f"{run.profile.name}/{path.name}", size_text(path.stat().st_size)) for path in found]


def _asset(name: str) -> str:
    return files("offbeat_run").joinpath("_report", name).read_text(encoding="utf-8")


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tiles(lines: Sequence[MetricsLine], series: dict[str, Series]) -> list[tuple[str, str]]:
    """The figures a reader looks for first."""
    if not lines:
        return []
    tiles = [("updates", str(max(line.step for line in lines)))]
    tiles += [("time", duration_text(lines[-1].time_s - lines[0].time_s))] if len(lines) > 1 else []
    for name, label in _TILES.items():
        points = series.get(name)
        if points:
            before, after = _ends(name, points)
            both = name.startswith("eval/") and len(points) > 1
            tiles.append((label, f"{_number(name, before)} → {_number(name, after)}" if both else _number(name, after)))
    return tiles[:_MAX_TILES]


def _summary_row(name: str, points: Series) -> SummaryRow:
    before, after = _ends(name, points)
    known = METRIC_NAMES[name]
    return SummaryRow(
        name=name,
        doc=known.doc + (f" In {known.unit}." if known.unit else ""),
        before=_number(name, before),
        after=_number(name, after),
        change=_change(name, before, after) if len(points) > 1 else "",
    )


def _change(name: str, before: float, after: float) -> str:
    sign = "+" if after >= before else "−"
    change = abs(after - before)
    if _is_share(name):
        return f"{sign}{100 * change:.1f} points"
    decimals = len(number_text(float(after)).partition(".")[2])
    return f"{sign}{change:,.{decimals}f}"


def _is_share(name: str) -> bool:
    return name.endswith(("_share", "_fraction", "accuracy"))


def _ends(name: str, points: Series) -> tuple[float, float]:
    """The first and last value of a validation; the mean over a twentieth of the run at each end otherwise."""
    values = [value for _, value in points]
    width = 1 if name.startswith("eval/") else max(1, len(values) // 20)
    return sum(values[:width]) / width, sum(values[-width:]) / width


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if _is_share(name) else number_text(float(value))


def _sample_tables(run: RunFolder, damaged: list[str]) -> list[SampleTable]:
    """The last validation, the first one to compare with, and the last completions trained on."""
    validation, train = (read_generations(run, kind, damaged) for kind in _KINDS)
    steps = sorted({each.step for each in validation})
    tables = [
        SampleTable(title=f"Validation after update {step}", samples=_of_step(validation, step))
        for step in dict.fromkeys((*steps[-1:], *steps[:1]))
    ]
    if train:
        tables.append(SampleTable(title="Trained on last", samples=train[-_SAMPLES:][::-1]))
    return tables


def _of_step(generations: Sequence[Generation], step: int) -> list[Generation]:
    return [each for each in generations if each.step == step][:_SAMPLES]
