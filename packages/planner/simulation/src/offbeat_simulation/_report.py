"""Report of a simulation: where the time goes and what would change that, as tables for the terminal or as a chart."""

import html
from collections.abc import Mapping, Sequence
from typing import Final

from offbeat_async_policy import AsyncConfig
from offbeat_simulation._scenario import ScenarioModel
from offbeat_simulation._search import Candidate, Proposal
from offbeat_simulation._simulate import ENGINE_KINDS, TRAINER_KINDS, SimulationReport

WORTH_SAYING = 0.05


def advise(config: AsyncConfig, report: SimulationReport) -> list[str]:
    """Return one line for each waste of at least 5 % of the trainer's or the engines' time, the greatest first.

    Args:
        config: the settings simulated.
        report: what came of them.
    """
    found = [*_of_trainer(config, report), *_of_engines(config, report), *_of_tokens(config, report)]
    lines = [line for share, line in sorted(found, reverse=True) if share >= WORTH_SAYING]
    return lines or ["nothing stands out: trainer and engines are busy at least 95 % of what they could be"]


def _of_trainer(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    bound = "raise staleness_threshold" if config.staleness_threshold else "set staleness_threshold above 0"
    bound += " or max_in_flight" if config.max_in_flight else ""
    advice = {
        "supply": "trainer waits {:.0%} of the time for engines that are busy: move accelerators to rollout",
        "bound": "trainer waits {:.0%} of the time for the last samples of what may be in flight: " + bound,
        "drain": "trainer waits {:.0%} of the time until what is in flight ends before a sync: "
        "set partial_rollout = true",
        "sync": "weight syncs take {:.0%} of the time: raise trigger_parameter_sync_step, or sync faster",
    }
    return _filled(advice, report.trainer_shares)


def _of_engines(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    trainer_is_busy = report.trainer_shares["training"] >= 0.85
    change = "move accelerators to the trainer" if trainer_is_busy else "raise staleness_threshold"
    if config.max_in_flight and not trainer_is_busy:
        change = "raise max_in_flight, or staleness_threshold"
    tail = "move accelerators to the trainer" if trainer_is_busy else "more groups in flight would fill them"
    advice = {
        "bound": "engines are empty {:.0%} of the time, at their bound: " + change,
        "tail": "engines run at most an eighth of their most samples {:.0%} of the time: " + tail,
        "drain": "engines are empty {:.0%} of the time, as a sync waits for others: set partial_rollout = true",
    }
    return _filled(advice, report.engine_shares)


def _filled(advice: Mapping[str, str], shares: Mapping[str, float]) -> list[tuple[float, str]]:
    return [(shares[kind], text.format(shares[kind])) for kind, text in advice.items()]


def _of_tokens(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    wasted = report.wasted_token_share
    dropped = report.dropped > 0
    change = "raise max_version_lag, or on_exceed = 'wait'" if dropped else "prompts of middling difficulty waste less"
    what = "dropped as too old, or filtered" if dropped else "filtered: no learning signal"
    return [(wasted, f"{wasted:.0%} of the sampled tokens are never trained ({what}): {change}")]


COLUMNS: Final = (
    *("sigma", "mode", "s/sync", "groups/s", "tokens/s", "speed-up"),
    *("trainer idle", "engines idle", "mean lag", "max lag", "dropped"),
)
PROPOSED: Final = ("", "train", "generate", "sigma", "partial", "R", "K", "s/512 groups", "speed-up", "groups behind")
BAR_WIDTH: Final = 30


def simulation_text(
    model: ScenarioModel, runs: Sequence[tuple[AsyncConfig, SimulationReport]], colocated: SimulationReport
) -> str:
    """Return the table of all rows, then where the time of the last row goes, and what would change it."""
    config, report = runs[-1]
    rows = [_row(each, came, colocated) for each, came in runs]
    lines = [
        describe_model(model),
        *align([COLUMNS, *rows, _colocated_row(colocated)]),
        f"speed-up: over colocated training on all {model.scenario.num_accelerators} accelerators, which generate and "
        "train in turn",
        "",
        f"where the time goes, sigma {config.staleness_threshold:g}:",
        *_text_bars("trainer", report.trainer_shares),
        *_text_bars("engines", report.engine_shares),
        "",
        *(f"- {line}" for line in advise(config, report)),
    ]
    return "\n".join(lines)


def describe_model(model: ScenarioModel) -> str:
    """Return one line on the machines and the batch."""
    machines, config = model.scenario.machines, model.scenario.async_
    num_engines = machines.rollout // machines.per_engine
    return (
        f"{machines.trainer} accelerators train, {machines.rollout} generate ({num_engines} engines of "
        f"{machines.per_engine}); {config.groups_per_update} groups of {model.scenario.work.group_size} an update, "
        f"{config.groups_per_sync} between two syncs"
    )


def proposal_text(model: ScenarioModel, proposal: Proposal) -> str:
    """Return the present settings and those found; and what to change, as keys."""
    present = proposal.present
    rows = [
        _proposed_row("now", present, present),
        *(_proposed_row("best" if each is proposal.best else "", each, present) for each in proposal.front),
    ]
    return "\n".join(
        [
            describe_model(model),
            *align([PROPOSED, *rows]),
            f"{proposal.num_tried} candidates simulated; each row is faster than all that are less far behind; best is "
            "the least far behind within 3 % of the fastest",
            "",
            *_changes(present, proposal.best),
        ]
    )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-align the columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(config: AsyncConfig, report: SimulationReport, colocated: SimulationReport) -> tuple[str, ...]:
    return (
        f"{config.staleness_threshold:g}",
        report.mode,
        f"{report.seconds_per_sync:.1f}",
        f"{report.groups_per_s:.2f}",
        f"{report.tokens_per_s:,.0f}",
        f"{report.speedup_over(colocated):.2f}",
        f"{report.trainer_idle_share:.0%}",
        f"{report.engine_idle_share:.0%}",
        f"{report.mean_lag:.2f}",
        f"{report.max_lag}",
        f"{report.dropped}",
    )


def _colocated_row(colocated: SimulationReport) -> tuple[str, ...]:
    return (
        *("", "colocated", f"{colocated.seconds_per_sync:.1f}", f"{colocated.groups_per_s:.2f}"),
        *(f"{colocated.tokens_per_s:,.0f}", "1.00", "", "", "0.00", "0", "0"),
    )


def _text_bars(name: str, shares: Mapping[str, float]) -> list[str]:
    return [
        f"  {name if index == 0 else '':8s} {kind:9s} {share:4.0%} {'#' * round(share * BAR_WIDTH)}".rstrip()
        for index, (kind, share) in enumerate(shares.items())
    ]


def _proposed_row(name: str, candidate: Candidate, present: Candidate) -> tuple[str, ...]:
    config, machines = candidate.config, candidate.machines
    return (
        *(name, f"{machines.trainer}", f"{machines.rollout}", f"{config.staleness_threshold:g}"),
        *("yes" if config.partial_rollout else "no", f"{config.groups_per_update}"),
        f"{config.trigger_parameter_sync_step}",
        f"{512 / candidate.report.groups_per_s:.1f}",
        f"{candidate.report.speedup_over(present.report):.2f}",
        f"{candidate.groups_behind:.0f}",
    )


def _changes(present: Candidate, best: Candidate) -> list[str]:
    lines = []
    for section, before, after in (
        ("async", present.config, best.config),
        ("machines", present.machines, best.machines),
    ):
        for key, value in vars(after).items():
            if value != getattr(before, key):
                text = str(value).lower() if isinstance(value, bool) else value
                lines.append(f"  --{section}.{key} {text}")
    if not lines:
        return ["keep what there is: nothing found is both faster and no further behind"]
    return [f"for {best.report.speedup_over(present.report):.2f} times the speed, change:", *lines]


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
    names = [f"\u03c3 {config.staleness_threshold:g}, {report.mode}" for config, report in runs]
    reports = [report for _, report in runs]
    seconds = {"colocated": colocated.seconds_per_sync}
    seconds |= dict(zip(names, (report.seconds_per_sync for report in reports), strict=True))
    longest = max(seconds.values()) or 1.0
    speed = {name: {"training": each / longest} for name, each in seconds.items()}
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>",
            "<h2>Seconds between two syncs</h2>",
            _figure(speed, [f"{each:.1f} s" for each in seconds.values()]),
            "<h2>The trainer's time</h2>",
            _figure({name: report.trainer_shares for name, report in zip(names, reports, strict=True)}),
            _legend(TRAINER_KINDS),
            "<h2>The engines' time</h2>",
            _figure({name: report.engine_shares for name, report in zip(names, reports, strict=True)}),
            _legend(ENGINE_KINDS),
            "<h2>What would change it</h2><ul>",
            *(f"<li>{html.escape(line)}</li>" for line in advice),
            "</ul></html>",
        ]
    )


def _figure(rows: Mapping[str, Mapping[str, float]], notes: Sequence[str] = ()) -> str:
    """Return a row of bars for each name, one bar after the other; and a note behind it."""
    drawn = []
    for row, (name, shares) in enumerate(rows.items()):
        drawn.append(_text(LEFT - 8, row, name, ' text-anchor="end"'))
        done = 0.0
        for kind, share in shares.items():
            if share > 0:
                tip = notes[row] if notes else f"{kind}: {share:.1%}"
                drawn.append(_bar(done, row, share, COLOURS[kind], tip))
            done += share
        if notes:
            drawn.append(_text(LEFT + WIDTH * done + 6, row, notes[row]))
    size = f"{LEFT + WIDTH + 80} {len(rows) * ROW + 4}"
    return f'<svg viewBox="0 0 {size}" role="img">{"".join(drawn)}</svg>'


def _text(left: float, row: int, text: str, attributes: str = "") -> str:
    return f'<text x="{left:.1f}" y="{row * ROW + 15}"{attributes}>{html.escape(text)}</text>'


def _bar(start: float, row: int, share: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{LEFT + WIDTH * start:.1f}" y="{row * ROW + 3}" width="{WIDTH * share:.1f}" height="{ROW - 6}" '
        f'fill="{colour}"><title>{html.escape(tip)}</title></rect>'
    )


def _legend(kinds: Sequence[str]) -> str:
    items = [f'<i style="background:{COLOURS[kind]}"></i>{kind}: {html.escape(MEANINGS[kind])}' for kind in kinds]
    return f"<p>{'<br>'.join(items)}</p>"
