"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Final

from offbeat_async_policy._advice import advise
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._scenario_model import ScenarioModel
from offbeat_async_policy._search import Candidate, Proposal
from offbeat_async_policy._simulation_report import SimulationReport

COLUMNS: Final = (
    *("sigma", "mode", "s/sync", "groups/s", "tokens/s", "speed-up"),
    *("trainer idle", "engines idle", "mean lag", "max lag", "dropped"),
)
PROPOSED: Final = ("", "train", "generate", "sigma", "partial", "R", "K", "s/512 groups", "speed-up", "groups behind")
BAR_WIDTH: Final = 30


def simulation_text(
    model: ScenarioModel, runs: Sequence[tuple[AsyncConfig, SimulationReport]], colocated: SimulationReport
) -> str:
    """The table of all rows, then where the time of the last row goes, and what would change it."""
    config, report = runs[-1]
    rows = [_row(each, came, colocated) for each, came in runs]
    lines = [
        describe_model(model),
        *align([COLUMNS, *rows, _colocated_row(colocated)]),
        f"speed-up: over colocated training on all {model.scenario.num_accelerators} accelerators, which generate and "
        "train in turn",
        "",
        f"where the time goes, sigma {config.staleness_threshold:g}:",
        *_bars("trainer", report.trainer_shares),
        *_bars("engines", report.engine_shares),
        "",
        *(f"- {line}" for line in advise(config, report)),
    ]
    return "\n".join(lines)


def describe_model(model: ScenarioModel) -> str:
    """One line on the machines and the batch."""
    machines, config = model.scenario.machines, model.scenario.async_
    num_engines = machines.rollout // machines.per_engine
    return (
        f"{machines.trainer} accelerators train, {machines.rollout} generate ({num_engines} engines of "
        f"{machines.per_engine}); {config.groups_per_update} groups of {model.scenario.work.group_size} an update, "
        f"{config.groups_per_sync} between two syncs"
    )


def proposal_text(model: ScenarioModel, proposal: Proposal) -> str:
    """The present settings and those found; and what to change, as keys."""
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


def _bars(name: str, shares: Mapping[str, float]) -> list[str]:
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
