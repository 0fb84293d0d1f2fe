"""The command `offbeat-simulation`: settings compared on a simulated cluster, and scenarios written from runs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from offbeat_async_policy import AsyncConfig
from offbeat_core import ConfigError, DataError, OffbeatError
from offbeat_simulation._report import advise, chart_page, describe_model, proposal_text, simulation_text
from offbeat_simulation._runs import read_run, scenario_text
from offbeat_simulation._scenario import ScenarioModel, describe_keys, read_scenario
from offbeat_simulation._search import Candidate, propose
from offbeat_simulation._simulate import SimulationReport

INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141
Runs = list[tuple[AsyncConfig, SimulationReport]]
Overrides = list[tuple[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = _parser()
    try:
        words, overrides = _split(list(sys.argv[1:] if argv is None else argv))
        parsed = parser.parse_args(words)
        if overrides and parsed.command in ("measure", "keys"):
            parser.error(f"{parsed.command} takes no keys of a scenario, got {overrides[0][0]}")
        print(_COMMANDS[parsed.command](parsed, overrides), flush=True)
    except OffbeatError as error:
        print(f"offbeat-simulation: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat-simulation", description="Asynchronous RL on a simulated cluster.")
    parser.add_argument("--version", action="version", version=f"{parser.prog} {version(parser.prog)}")
    commands = parser.add_subparsers(dest="command", required=True)
    simulate = commands.add_parser(
        "simulate",
        help="compare settings on a simulated cluster, and say where the time goes",
        description="Run the real control logic on a simulated cluster, beside colocated training on as many machines.",
    )
    _add_scenario(simulate)
    simulate.add_argument("--sigmas", metavar="SIGMA[,SIGMA]", help="a row for each staleness threshold")
    simulate.add_argument("--html", type=Path, metavar="FILE", help="write a chart")
    search = commands.add_parser(
        "propose",
        help="search a better split of the accelerators and better settings",
        description="Simulate other splits, staleness thresholds, R and K, and propose what is fastest.",
    )
    _add_scenario(search)
    search.add_argument(
        "--max-groups-behind", type=float, metavar="GROUPS", help="trained, on average, since a group's oldest token"
    )
    measure = commands.add_parser(
        "measure",
        help="write a scenario from finished runs",
        description="Write a scenario from one synchronous run, or from two of different mini_batch_size.",
    )
    measure.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder of grpo-async-app")
    commands.add_parser("keys", help="explain every key of a scenario")
    return parser


def _add_scenario(command: argparse.ArgumentParser) -> None:
    command.epilog = "Any key of the scenario can be given: --section.key VALUE. See offbeat-simulation keys."
    command.add_argument("scenario", nargs="?", type=Path, help="TOML or JSON; left out: the defaults")
    command.add_argument("--recipe", type=Path, help="of grpo-async-app; its settings win over the scenario's")
    command.add_argument("--json", action="store_true", help="print JSON")


def _simulate(parsed: argparse.Namespace, rest: Overrides) -> str:
    model = _model(parsed, rest)
    runs: Runs = [(config, model.run(config)) for config in _configs(model, parsed.sigmas)]
    colocated = model.run_colocated()
    if parsed.html:
        _write_chart(parsed.html, model, runs, colocated)
    if not parsed.json:
        return simulation_text(model, runs, colocated)
    rows = [
        {
            "staleness_threshold": config.staleness_threshold,
            **asdict(report),
            "speedup": report.speedup_over(colocated),
            "advice": advise(config, report),
        }
        for config, report in runs
    ]
    return json.dumps({"runs": rows, "colocated": asdict(colocated)}, indent=2)


def _propose(parsed: argparse.Namespace, rest: Overrides) -> str:
    model = _model(parsed, rest)
    proposal = propose(model, parsed.max_groups_behind)
    if not parsed.json:
        return proposal_text(model, proposal)
    plain = {
        "present": _plain(proposal.present),
        "best": _plain(proposal.best),
        "front": [_plain(each) for each in proposal.front],
        "num_tried": proposal.num_tried,
    }
    return json.dumps(plain, indent=2)


def _measure(parsed: argparse.Namespace, _: Overrides) -> str:
    if len(parsed.runs) > 2:
        raise ConfigError(f"measure: one run or two required, got {len(parsed.runs)}")
    return scenario_text([read_run(folder) for folder in parsed.runs])


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace, Overrides], str]]] = {
    "simulate": _simulate,
    "propose": _propose,
    "measure": _measure,
    "keys": lambda *_: describe_keys(),
}


def _model(parsed: argparse.Namespace, rest: Overrides) -> ScenarioModel:
    return ScenarioModel.of(read_scenario(parsed.scenario, rest, parsed.recipe))


def _split(words: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take `--section.key value` and `--section.key=value` out of the words."""
    others, pairs, rest = [], [], list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if not (word.startswith("--") and "." in word):
            others.append(word + equals + value)
        elif equals or rest:
            pairs.append((word, value if equals else rest.pop(0)))
        else:
            raise ConfigError(f"{word}: needs a value")
    return others, pairs


def _configs(model: ScenarioModel, sigmas: str | None) -> list[AsyncConfig]:
    """Settings of the rows. With sigma 0 nothing is ever stale, so what is about stale groups is left out there."""
    config = model.scenario.async_
    if sigmas is None:
        return [config]
    try:
        thresholds = [float(word) for word in sigmas.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sigmas: numbers required, separated by commas, got {sigmas!r}") from error
    return [
        replace(config, staleness_threshold=sigma, partial_rollout=config.partial_rollout and sigma > 0)
        for sigma in thresholds
    ]


def _write_chart(path: Path, model: ScenarioModel, runs: Runs, colocated: SimulationReport) -> None:
    page = chart_page(describe_model(model), runs, colocated, advise(*runs[-1]))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"--html {path}: {error.strerror}") from error


def _plain(candidate: Candidate) -> dict[str, Any]:
    return {
        "async": asdict(candidate.config),
        "machines": asdict(candidate.machines),
        "groups_behind": candidate.groups_behind,
        "report": asdict(candidate.report),
    }


if __name__ == "__main__":
    sys.exit(main())
