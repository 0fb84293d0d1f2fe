"""The command `offbeat-async-policy`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._simulate import Cluster, SimulationReport, Workload, simulate
from offbeat_async_policy._workload import DecodeCurve, Lengths
from offbeat_types import ConfigError, OffbeatError

COLUMNS: Final = (
    *("sigma", "mode", "hours", "groups/s", "tokens/s", "speed-up"),
    *("trainer idle", "engines idle", "slots used", "mean lag", "max lag", "dropped"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parsed = _parser().parse_args(argv)
    try:
        runs, baseline = _simulate_all(parsed)
    except OffbeatError as error:
        print(f"offbeat-async-policy: {error}", file=sys.stderr)
        return error.exit_code
    print(_as_json(runs, baseline) if parsed.json else _as_table(runs, baseline))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat-async-policy", description="Control logic of asynchronous RL.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "simulate",
        help="compare settings on a simulated cluster",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Run the real control logic on a simulated cluster, beside synchronous training (sigma 0, K 1).",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_policy_options(command.add_argument_group("settings, as in section async"))
    _add_workload_options(command.add_argument_group("workload"))
    _add_cluster_options(command.add_argument_group("cluster"))
    return parser


def _add_policy_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--staleness-threshold", default="0,0.1,0.5,1", metavar="SIGMA[,SIGMA]", help="one row of the table for each")
    add("--trigger-parameter-sync-step", type=int, default=1, metavar="K", help="updates between two syncs")
    add("--require-batches", type=int, default=1, metavar="N", help="mini batches of one update")
    add("--mini-batch-size", type=int, default=64, metavar="GROUPS", help="prompt groups of one mini batch")
    add("--partial-rollout", action="store_true", help="go on with what is in flight after a sync; not for sigma 0")
    add("--max-version-lag", type=int, metavar="M", help="bound on the lag, in updates")
    add("--on-exceed", choices=("wait", "drop"), default="wait", help="how the bound is kept; not for sigma 0")
    add("--max-in-flight", type=int, default=0, metavar="GROUPS", help="groups generating at once; 0: no own bound")


def _add_workload_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--num-groups", type=int, default=1280, help="prompt groups of the run")
    add("--group-size", type=int, default=8, help="samples of one group")
    add("--median-length", type=float, default=1000.0, metavar="TOKENS", help="of log-normal completion lengths")
    add("--length-spread", type=float, default=0.8, help="standard deviation of the logarithm of the lengths")
    add("--longest", type=int, default=8192, metavar="TOKENS", help="limit on every length; 0: none")
    add("--lengths-file", type=Path, metavar="FILE", help="measured lengths in tokens, separated by blanks")
    add("--filtered-share", type=float, default=0.0, help="groups without learning signal, in [0, 1]")
    add("--seed", type=int, default=0, help="of everything random")


def _add_cluster_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--num-engines", type=int, default=8, help="rollout engines")
    add("--max-running", type=int, default=128, metavar="SAMPLES", help="samples one engine decodes at once")
    add("--decode-curve", default="1:60,16:700,128:3000", metavar="SAMPLES:TOKENS_PER_S,...", help="of one engine")
    add("--update-s", type=float, default=60.0, metavar="S", help="time of one update")
    add("--update-tokens-per-s", type=float, default=0.0, metavar="N", help="trained on top of update-s; 0: none")
    add("--sync-s", type=float, default=5.0, metavar="S", help="time of one weight sync")


def _simulate_all(parsed: argparse.Namespace) -> tuple[dict[float, SimulationReport], SimulationReport]:
    """Return one report per staleness threshold, and that of synchronous training on the same cluster."""
    workload, cluster = _workload(parsed), _cluster(parsed)
    configs = {sigma: _config(parsed, sigma) for sigma in _staleness_thresholds(parsed.staleness_threshold)}
    synchronous = AsyncConfig(
        staleness_threshold=0.0, require_batches=parsed.require_batches, mini_batch_size=parsed.mini_batch_size
    )
    reports = {sigma: simulate(config, workload=workload, cluster=cluster) for sigma, config in configs.items()}
    return reports, simulate(synchronous, workload=workload, cluster=cluster)


def _staleness_thresholds(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--staleness-threshold: numbers required, separated by commas, got {text!r}") from error


def _config(parsed: argparse.Namespace, sigma: float) -> AsyncConfig:
    """Settings of one row. With sigma 0 nothing is ever stale, so what is about stale groups does not apply to it."""
    return AsyncConfig(
        staleness_threshold=sigma,
        trigger_parameter_sync_step=parsed.trigger_parameter_sync_step,
        require_batches=parsed.require_batches,
        mini_batch_size=parsed.mini_batch_size,
        partial_rollout=parsed.partial_rollout and sigma > 0,
        max_version_lag=parsed.max_version_lag,
        on_exceed=parsed.on_exceed,
        max_in_flight=parsed.max_in_flight,
    )


def _workload(parsed: argparse.Namespace) -> Workload:
    lengths = (
        Lengths.read(parsed.lengths_file, parsed.longest)
        if parsed.lengths_file
        else Lengths(median=parsed.median_length, spread=parsed.length_spread, longest=parsed.longest)
    )
    return Workload(
        num_groups=parsed.num_groups,
        group_size=parsed.group_size,
        lengths=lengths,
        filtered_share=parsed.filtered_share,
        seed=parsed.seed,
    )


def _cluster(parsed: argparse.Namespace) -> Cluster:
    return Cluster(
        num_engines=parsed.num_engines,
        max_running=parsed.max_running,
        decode_curve=DecodeCurve.parse(parsed.decode_curve),
        update_s=parsed.update_s,
        update_tokens_per_s=parsed.update_tokens_per_s,
        sync_s=parsed.sync_s,
    )


def _as_json(runs: dict[float, SimulationReport], baseline: SimulationReport) -> str:
    rows = [
        {"staleness_threshold": sigma, **report.to_plain(), "speedup": report.speedup_over(baseline)}
        for sigma, report in runs.items()
    ]
    return json.dumps({"runs": rows, "synchronous": baseline.to_plain()}, indent=2)


def _as_table(runs: dict[float, SimulationReport], baseline: SimulationReport) -> str:
    rows = [COLUMNS, *(_row(sigma, report, baseline) for sigma, report in runs.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "speed-up: over synchronous training (sigma 0, K 1) on the same engines and trainer"])


def _row(sigma: float, report: SimulationReport, baseline: SimulationReport) -> tuple[str, ...]:
    return (
        f"{sigma:g}",
        report.mode,
        f"{report.elapsed_s / 3600:.2f}",
        f"{report.groups_per_s:.2f}",
        f"{report.tokens_per_s:,.0f}",
        f"{report.speedup_over(baseline):.2f}",
        f"{report.trainer_idle_share:.0%}",
        f"{report.engine_idle_share:.0%}",
        f"{report.slot_use:.0%}",
        f"{report.mean_lag:.2f}",
        f"{report.max_lag}",
        f"{report.dropped}",
    )
