"""Writes report.html, one page on how a run went, readable without a network."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_run._console.quantities import moment_text, size_text
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lines import MAX_DAMAGED
from offbeat_run._folder.sessions import read_sessions
from offbeat_run._log.run_log import read_alarms
from offbeat_run._metrics.series import read_run_metrics
from offbeat_run._report.assets import asset, page_template
from offbeat_run._report.diagnosis import read_diagnosis
from offbeat_run._report.figures import Constant, Figure, figure_json, metric_figures
from offbeat_run._report.items import item_tables
from offbeat_run._report.plots import GROUPS
from offbeat_run._report.samples import sample_tables
from offbeat_run._report.timeline import timeline_figure
from offbeat_run._run_summary import compare_ends, shown_path, summarize_run

_MAX_ALARMS: Final = 20
_MAX_TEXT_BYTES: Final = 2**20
"""Limit of a text file of the run that the page shows whole."""


def write_report(folder: Path | str | RunFolder) -> Path:
    """Write the report of a run, finished, killed or still running, from what its folder holds.

    Everything is inside the one file, the library that plots included; the page's own policy forbids it
    to load anything, and to run any script but ours, whatever a completion holds.

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
    damaged: list[str] = []
    metrics, sessions = read_run_metrics(run.metrics, damaged), read_sessions(run, damaged)
    figures, constants = metric_figures(metrics)
    strip = timeline_figure(run.timeline, [each.started_s for each in sessions], damaged)
    groups = _grouped([*figures, *([strip] if strip else [])], constants)
    ordered = [figure for group in groups for figure in group.figures]
    beside, samples = sample_tables(run, damaged)
    summary = summarize_run(run, metrics, sessions)
    return page_template("page.html").render(
        name=run.path.name,
        folder=shown_path(run.path),
        written=moment_text(time.time()),
        started=moment_text(summary.started_s) if summary.started_s is not None else "",
        summary=summary,
        alarms=read_alarms(run, damaged)[-_MAX_ALARMS:],
        changes=compare_ends(metrics),
        diagnosis=read_diagnosis(run, damaged),
        groups=groups,
        figures_json=_script_json(figure_json(ordered)),
        items=item_tables(run, damaged),
        beside=beside,
        samples=samples,
        damaged=damaged,
        is_more_damaged=len(damaged) >= MAX_DAMAGED,
        traces=_traces(run),
        texts=[(path.name, _text(path)) for path in (run.plan, run.config) if path.is_file()],
        style=asset("uplot.min.css") + asset("page.css"),
        script=asset("page.js"),
        library=asset("uplot.min.js"),
        nonce=secrets.token_urlsafe(16),
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Figures that belong together, and what does not change beside them."""

    title: str
    figures: list[Figure]
    constants: list[Constant]


def _grouped(figures: Sequence[Figure], constants: Sequence[Constant]) -> list[Group]:
    groups = [
        Group(
            title=title,
            figures=[each for each in figures if each.group == title],
            constants=[each for each in constants if each.group == title],
        )
        for title in GROUPS
    ]
    return [group for group in groups if group.figures or group.constants]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_TEXT_BYTES).decode(errors="replace")


def _traces(run: RunFolder) -> list[tuple[str, str]]:
    """(path within the folder, size) of each trace of a step."""
    files = (path for path in run.profile.glob("*.json") if path.is_file())
    found = sorted(files, key=lambda path: (path.stem.rpartition("-")[0], path.stat().st_mtime))
    return [(f"{run.profile.name}/{path.name}", size_text(path.stat().st_size)) for path in found]


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element."""
    return (
        json.dumps(value, separators=(",", ":"), allow_nan=False)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )
