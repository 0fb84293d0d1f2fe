"""A chart of simulated settings: one HTML page that needs nothing else."""

import html
from collections.abc import Mapping, Sequence
from typing import Final

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._simulation_report import SimulationReport
from offbeat_async_policy._time_account import ENGINE_KINDS, TRAINER_KINDS

WIDTH: Final = 560  # of a bar that is full
LEFT: Final = 210
ROW: Final = 22
COLOURS: Final = {
    "training": "#2a78d6",
    "decoding": "#2a78d6",
    "supply": "#eb6834",
    "bound": "#eda100",
    "drain": "#e87ba4",
    "sync": "#4a3aa7",
    "tail": "#86b6ef",
    "end": "#c3c2b7",
    "open": "#8a8a8a",
}
MEANINGS: Final = {
    "training": "an update runs",
    "decoding": "samples run",
    "supply": "trainer waits for engines that are busy",
    "bound": "nothing more may start: the trainer waits for the last samples, or engines are empty",
    "drain": "a sync waits for what is in flight",
    "sync": "weights travel",
    "tail": "an engine runs at most an eighth of its most samples",
    "end": "no prompts are left",
    "open": "empty although a group might start",
}
STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #fcfcfb; --soft: #6b6b70 }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --paper: #1a1a19; --soft: #a0a0a8 } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 960px;
  margin: 2em auto; padding: 0 1em }
text { fill: var(--ink); font-size: 12px } p, td, li { color: var(--soft) } i { display: inline-block; width: 1em;
  height: 1em; vertical-align: -2px; margin-right: .4em; border-radius: 2px } table { border-collapse: collapse }
td, th { text-align: right; padding: .1em .8em } svg { max-width: 100%; height: auto }
"""


def chart_page(
    title: str,
    runs: Sequence[tuple[AsyncConfig, SimulationReport]],
    colocated: SimulationReport,
    advice: Sequence[str],
) -> str:
    """Seconds between two syncs, and where the trainer's and the engines' time goes, for each setting.

    Args:
        title: of the page.
        runs: settings and what came of them.
        colocated: the baseline.
        advice: lines below the chart.

    Returns:
        HTML, with inline SVG and nothing to load.
    """
    names = [_name(config, report) for config, report in runs]
    speed = [("colocated", colocated), *zip(names, [report for _, report in runs], strict=True)]
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>",
            "<h2>Seconds between two syncs</h2>",
            _speed_bars([(name, report.seconds_per_sync) for name, report in speed]),
            "<h2>The trainer's time</h2>",
            _share_bars([(name, report.trainer_shares) for name, (_, report) in zip(names, runs, strict=True)]),
            _legend(TRAINER_KINDS),
            "<h2>The engines' time</h2>",
            _share_bars([(name, report.engine_shares) for name, (_, report) in zip(names, runs, strict=True)]),
            _legend(ENGINE_KINDS),
            "<h2>What would change it</h2><ul>",
            *(f"<li>{html.escape(line)}</li>" for line in advice),
            "</ul></html>",
        ]
    )


def _name(config: AsyncConfig, report: SimulationReport) -> str:
    return f"\u03c3 {config.staleness_threshold:g}, {report.mode}"


def _speed_bars(rows: Sequence[tuple[str, float]]) -> str:
    longest = max(seconds for _, seconds in rows) or 1.0
    bars = [
        _bar(0, row, seconds / longest, COLOURS["training"], f"{seconds:.1f} s")
        + f'<text x="{LEFT + WIDTH * seconds / longest + 6:.1f}" y="{row * ROW + 15}">{seconds:.1f} s</text>'
        for row, (_, seconds) in enumerate(rows)
    ]
    return _figure([name for name, _ in rows], bars)


def _share_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    bars = []
    for row, (_, shares) in enumerate(rows):
        done = 0.0
        for kind, share in shares.items():
            if share > 0:
                bars.append(_bar(done, row, share, COLOURS[kind], f"{kind}: {share:.1%}"))
            done += share
    return _figure([name for name, _ in rows], bars)


def _bar(start: float, row: int, share: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{LEFT + WIDTH * start:.1f}" y="{row * ROW + 3}" width="{WIDTH * share:.1f}" height="{ROW - 6}" '
        f'fill="{colour}"><title>{html.escape(tip)}</title></rect>'
    )


def _figure(names: Sequence[str], bars: Sequence[str]) -> str:
    labels = [
        f'<text x="{LEFT - 8}" y="{row * ROW + 15}" text-anchor="end">{html.escape(name)}</text>'
        for row, name in enumerate(names)
    ]
    size = f"{LEFT + WIDTH + 80} {len(names) * ROW + 4}"
    return f'<svg viewBox="0 0 {size}" role="img">{"".join([*labels, *bars])}</svg>'


def _legend(kinds: Sequence[str]) -> str:
    items = [f'<i style="background:{COLOURS[kind]}"></i>{kind}: {html.escape(MEANINGS[kind])}' for kind in kinds]
    return f"<p>{'<br>'.join(items)}</p>"
