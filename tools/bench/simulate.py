"""The simulator against what others published and against a real run; and how long it takes itself.

    python tools/bench/simulate.py published [--json]     verl's tables, from the colocated rows alone
    python tools/bench/simulate.py large                  1,000 accelerators

A published total after n steps is compared with n simulated steps, times the growth that the colocated run on the same
number of accelerators showed: its mean step up to n over that of its first 200, which the costs are calibrated on. The
published mean step is that of the whole run, and compared so too.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_async_policy import ScenarioModel, SimulationReport, read_scenario

SCENARIOS = Path(__file__).parents[2] / "packages" / "async-policy" / "scenarios"
PUBLISHED = json.loads((SCENARIOS / "published.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Compared:
    """One published row beside its simulation.

    Args:
        name: of the row.
        report: of the simulation.
        step_s: simulated, mean over as many steps as the row has totals for.
        published_step_s: the table's column "step".
        totals_min: (steps, published, simulated) minutes.
    """

    name: str
    report: SimulationReport
    step_s: float
    published_step_s: float
    totals_min: tuple[tuple[int, float, float], ...]


def compare(row: dict[str, Any]) -> Compared:
    """Simulate one published row."""
    overrides = [(f"--{key}", json.dumps(value)) for key, value in row["overrides"].items()]
    report = ScenarioModel.of(read_scenario(SCENARIOS / row["scenario"], overrides)).run()
    colocated = PUBLISHED["colocated"][row["colocated"]]["total_min"]
    totals = []
    growth = 1.0
    for index, published in enumerate(row["total_min"]):
        steps = 100 * (index + 1)
        growth = colocated[index] / steps / (colocated[1] / 200)
        totals.append((steps, published, report.seconds_per_sync * steps * growth / 60))
    return Compared(row["name"], report, report.seconds_per_sync * growth, row["step_s"], tuple(totals))


def print_published(as_json: bool) -> None:
    """Print all rows: step, totals, errors."""
    rows = [compare(row) for row in PUBLISHED["asynchronous"]]
    if as_json:
        plain = [{"name": row.name, "step_s": row.step_s, "totals_min": row.totals_min} for row in rows]
        print(json.dumps(plain, indent=2))
        return
    for row in rows:
        step = f"step {row.published_step_s:7.1f} {row.step_s:7.1f} s {_error(row.step_s, row.published_step_s)}"
        print(f"{row.name:38s} {step}")
        for steps, published, simulated in row.totals_min:
            total = f"{_hours(published):>8s} {_hours(simulated):>8s}  {_error(simulated, published)}"
            print(f"{'':38s} {steps} steps {total}")


def print_large() -> None:
    """Simulate 500 + 500 accelerators, and print how long that took."""
    overrides = [
        *[("--machines.trainer", "500"), ("--machines.rollout", "500"), ("--machines.trainer_multiple", "4")],
        *[("--async.mini_batch_size", "256"), ("--work.num_syncs", "20")],
    ]
    model = ScenarioModel.of(read_scenario(SCENARIOS / "verl_qwen2.5_math_7b.toml", overrides))
    started_s = time.perf_counter()
    report = model.run()
    took_s = time.perf_counter() - started_s
    num_samples = report.trained * model.scenario.work.group_size
    print(
        f"1,000 accelerators (500 train, 125 engines of 4), {report.trained:,} groups, {num_samples:,} samples, "
        f"{report.elapsed_s / 3600:.1f} simulated hours in {took_s:.1f} s"
    )


def _error(simulated: float, published: float) -> str:
    return f"{simulated / published - 1:+6.1%}"


def _hours(minutes: float) -> str:
    return f"{int(minutes) // 60} h {int(minutes) % 60:02d}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "large"))
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    if parsed.what == "published":
        print_published(parsed.json)
    else:
        print_large()
    return 0


if __name__ == "__main__":
    sys.exit(main())
