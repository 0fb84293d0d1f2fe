"""Writes report.html, one page on how a run went, readable without a network; serves it, and ends a run with it."""

import http.client
import http.server
import json
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from offbeat_run._folder import RunFolder
from offbeat_run._metrics import METRIC_NAMES, MetricsLine, read_metrics
from offbeat_run._quantities import duration_text, number_text, size_text
from offbeat_run._report.assets import asset, page_template
from offbeat_run._report.figures import Series, metric_figures, number_series, timeline_figure
from offbeat_run._report.items import item_tables
from offbeat_run._run_log import Generation, GenerationKind, read_alarms, read_generations
from offbeat_run._timeline import read_timeline
from offbeat_types import ConfigError

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
    from plotly.offline import get_plotlyjs  # imported late: training needs none

    damaged: list[str] = []
    lines, samples = read_metrics(run.metrics, damaged), _sample_tables(run, damaged)
    series = number_series(lines)
    figures = metric_figures(lines)
    strip = timeline_figure(read_timeline(run.timeline))
    if strip:
        figures.insert(min(_FIGURES_ABOVE_TIMELINE, len(figures)), strip)
    return page_template("page.html").render(
        name=run.path.name,
        written=time.strftime("%Y-%m-%d %H:%M"),
        alarms=read_alarms(run, damaged),
        tiles=_tiles(lines, series),
        summary=[_summary_row(name, series[name]) for name in _SUMMARY if name in series],
        figures=figures,
        figures_json=_script_json([{"data": each.traces, "layout": each.layout} for each in figures]),
        items=item_tables(run, damaged),
        beside=_beside(run, damaged),
        samples=samples,
        damaged=damaged,
        traces=_traces(run),
        texts=[(path.name, path.read_text()) for path in (run.plan, run.config) if path.is_file()],
        style=asset("page.css"),
        script=asset("page.js"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        nonce=secrets.token_urlsafe(16),
    )


def _traces(run: RunFolder) -> list[tuple[str, str]]:
    """(path within the folder, size) of each trace of a step."""
    found = sorted(run.profile.glob("*.json"), key=lambda path: (path.stem.rpartition("-")[0], path.stat().st_mtime))
    return [(f"{run.profile.name}/{path.name}", size_text(path.stat().st_size)) for path in found]


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


def _summary_row(name: str, points: Series) -> dict[str, str]:
    before, after = _ends(name, points)
    known = METRIC_NAMES[name]
    return {
        "name": name,
        "doc": known.doc + (f" In {known.unit}." if known.unit else ""),
        "before": _number(name, before),
        "after": _number(name, after),
        "change": _change(name, before, after) if len(points) > 1 else "",
    }


def _change(name: str, before: float, after: float) -> str:
    sign = "+" if after >= before else "−"
    change = abs(after - before)
    if _is_share(name):
        return f"{sign}{100 * change:.1f} points"
    decimals = len(number_text(after).partition(".")[2])
    return f"{sign}{change:,.{decimals}f}"


def _is_share(name: str) -> bool:
    return name.endswith(("_share", "_fraction", "accuracy"))


def _ends(name: str, points: Series) -> tuple[float, float]:
    """The first and last value of a validation; the mean over a twentieth of the run at each end otherwise."""
    values = [value for _, value in points]
    width = 1 if name.startswith("eval/") else max(1, len(values) // 20)
    return sum(values[:width]) / width, sum(values[-width:]) / width


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if _is_share(name) else number_text(value)


def _beside(run: RunFolder, damaged: list[str]) -> list[tuple[str, int, int, list[tuple[Generation, Generation]]]]:
    """For each validation set, what its first and its last validation of the run have answered to the same prompts."""
    by_set: dict[str, dict[int, list[Generation]]] = {}
    for each in read_generations(run, "validation", damaged):
        by_set.setdefault(each.set, {}).setdefault(each.step, []).append(each)
    found = []
    for name, steps in by_set.items():
        first, last = min(steps), max(steps)
        later = {each.prompt: each for each in steps[last]}
        pairs = [(each, later[each.prompt]) for each in steps[first] if each.prompt in later]
        if first != last and pairs:
            found.append((name, first, last, pairs[:_SAMPLES]))
    return found


def _sample_tables(run: RunFolder, damaged: list[str]) -> list[tuple[str, list[Generation]]]:
    """The last validation, and the last completions trained on."""
    validation, train = (read_generations(run, kind, damaged) for kind in _KINDS)
    last = max((each.step for each in validation), default=0)
    tables = [(f"Validation after update {last}", [each for each in validation if each.step == last][:_SAMPLES])]
    tables = tables if validation else []
    if train:
        tables.append(("Trained on last", train[-_SAMPLES:][::-1]))
    return tables


HOST = "127.0.0.1"
"""Loopback only: the report holds prompts and completions, and there is no token."""


def serve_report(run: RunFolder, port: int) -> None:
    """Serve until interrupted.

    Args:
        run: open for reading.
        port: on the loopback interface, 1 to 65535.

    Raises:
        ConfigError: the port is out of range or in use.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"--serve needs a port from 1 to 65535: got {port}")

    # Another site may have its own name lead here (DNS rebinding), and a browser would then let it read the report.
    names = {f"{HOST}:{port}", f"localhost:{port}"} | ({HOST, "localhost"} if port == http.client.HTTP_PORT else set())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Host"] not in names:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            page = write_report(run).read_bytes()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} on {HOST} cannot be used: {error.strerror}; choose another") from error
    print(f"report of {run.path} at http://{HOST}:{port}/ (Ctrl-C ends)")
    with server:
        server.serve_forever()
