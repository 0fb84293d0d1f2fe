"""The run of `grpo-async-app quickstart` on this machine, and whether it keeps its promises.

    python tools/bench/quickstart.py [--seeds 0 1 2] [--json]

Every seed is one run of the command in a folder of its own, as a user would start it; the figures come from its
metrics.jsonl, means over updates weighed by the updates' seconds. Exit code 1 when a seed breaks a promise:
held-out accuracy at most 0.5 before, at least 0.9 after, within 300 s in all.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import Row, parser_of, show

from offbeat_run import read_metrics

BEFORE_AT_MOST = 0.5
AFTER_AT_LEAST = 0.9
SECONDS_AT_MOST = 300.0
RUN_TIMEOUT_S = 3600
MEANS = (
    *("perf/tokens_per_s", "perf/samples_per_s", "async/overlap_share"),
    *("async/trainer_idle_share", "async/rollout_idle_share", "train/lag_mean"),
)


def summarise(lines: Iterable[Row], seed: int, total_s: float, reached_s: float = math.nan) -> Row:
    """Return figures of one run from its metrics; `reached_s` after its start the accuracy was high enough."""
    lines = list(lines)
    updates = [line for line in lines if "perf/update_s" in line]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    if not updates or len(accuracies) < 2:
        raise SystemExit(f"seed {seed}: {len(updates)} updates and {len(accuracies)} validations are no whole run")
    training_s = sum(line["perf/update_s"] for line in updates)
    means = {name: sum(line[name] * line["perf/update_s"] for line in updates) / training_s for name in MEANS}
    lag_max = max(line["train/lag_max"] for line in updates)
    ends = {"before": accuracies[0], "after": accuracies[-1]}
    times = {"total_s": total_s, f"to_{AFTER_AT_LEAST}_s": reached_s, "training_s": training_s}
    return {"seed": seed, **times, **ends, **means, "train/lag_max": lag_max}


def broken(row: Row) -> list[str]:
    """Return the promises that a run broke, as text; NaN breaks all of them."""
    kept = {
        f"before {row['before']:.3f} > {BEFORE_AT_MOST}": row["before"] <= BEFORE_AT_MOST,
        f"after {row['after']:.3f} < {AFTER_AT_LEAST}": row["after"] >= AFTER_AT_LEAST,
        f"{row['total_s']:.0f} s > {SECONDS_AT_MOST:.0f} s": row["total_s"] <= SECONDS_AT_MOST,
    }
    return [f"seed {row['seed']}: {words}" for words, holds in kept.items() if not holds]


def run_quickstart(seed: int, folder: Path) -> Row:
    """Run the command once and read what it wrote."""
    command = [sys.executable, "-m", "grpo_async_app", "quickstart", "--seed", str(seed), "--out", str(folder)]
    start_s, began_s = time.monotonic(), time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    total_s = time.monotonic() - start_s
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"seed {seed}: {' '.join(command)} ended with {done.returncode}:\n{said}")
    lines = list(read_metrics(folder / "metrics.jsonl"))
    accuracies = ((line.time_s, line.values.get("eval/accuracy")) for line in lines)
    reached = (at_s for at_s, value in accuracies if isinstance(value, float) and value >= AFTER_AT_LEAST)
    return summarise((line.values for line in lines), seed, total_s, next(reached, math.nan) - began_s)


def main(arguments: list[str] | None = None) -> int:
    """Run every seed, print, and return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(arguments)
    rows: list[Row] = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(run_quickstart(seed, Path(temporary) / "run"))
        show(rows[-1:], as_json=args.json)
    wrong = [words for row in rows for words in broken(row)]
    print("\n".join(wrong) or "every promise held for all seeds", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
