"""The simulator against what others published and against a real run; and how long it takes itself.

    python tools/bench/simulate.py published [--json]     verl's tables, from the colocated rows alone
    python tools/bench/simulate.py large                  1,000 accelerators

A published total after n steps is compared with n simulated steps, times the growth that the colocated run on the same
number of accelerators showed: its mean step up to n over that of its first 200, which the costs are calibrated on. The
published mean step is that of the whole run, and compared so too.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import parser_of, show

from offbeat_simulation import ScenarioModel, read_scenario

SCENARIOS = Path(__file__).parents[2] / "packages" / "planner" / "simulation" / "scenarios"
PUBLISHED = json.loads((SCENARIOS / "published.json").read_text(encoding="utf-8"))


def compare(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one published row beside its simulation: seconds a step, and minutes after each hundred steps."""
    overrides = [(f"--{key}", json.dumps(value)) for key, value in row["overrides"].items()]
    report = ScenarioModel.of(read_scenario(SCENARIOS / row["scenario"], overrides)).run()
    colocated = PUBLISHED["colocated"][row["colocated"]]["total_min"]
    growths = [total / (100 * number) / (colocated[1] / 200) for number, total in enumerate(colocated, start=1)]
    totals, growth = [], 1.0
    for number, published in enumerate(row["total_min"], start=1):
        growth = growths[number - 1]
        totals.append((f"{100 * number} steps, min", published, report.seconds_per_sync * 100 * number * growth / 60))
    compared = [("step, s", row["step_s"], report.seconds_per_sync * growth), *totals]
    return [
        {"name": row["name"], "what": what, "published": published, "simulated": simulated,
         "error": simulated / published - 1}
        for what, published, simulated in compared
    ]  # fmt: skip


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


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("published", "large"))
    options = parser.parse_args()
    if options.what == "published":
        show([line for row in PUBLISHED["asynchronous"] for line in compare(row)], as_json=options.json)
    else:
        print_large()


if __name__ == "__main__":
    main()
