"""What `grpo-async-app quickstart` does on this machine, and whether it keeps its promises.

    python tools/bench/quickstart.py [--seeds 0 1 2] [--json FILE]

Every seed is one run of the installed command in a folder of its own, as a user would start it; the figures come from
its metrics.jsonl. Exit code 1 when a seed breaks a promise: held-out accuracy at most 0.5 before, at least 0.9 after,
within 300 s in all.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEFORE_AT_MOST = 0.5
AFTER_AT_LEAST = 0.9
SECONDS_AT_MOST = 300.0
RUN_TIMEOUT_S = 3600

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one seed gave.

    Args:
        seed: of the run.
        total_s: from the command's start to its end, making and warming up the model included.
        training_s: of the asynchronous loop, validations included.
        tokens_per_s: completion tokens trained on, per second of training.
        samples_per_s: completions trained on, per second of training.
        overlap: share of training in which trainer and rollout were at work together.
        trainer_idle: share in which the trainer was not.
        rollout_idle: share in which the rollout was not.
        lag_mean: updates between the oldest token of a group and its training.
        lag_max: the largest of them.
        before: held-out accuracy of the first policy.
        after: held-out accuracy of the last.
    """

    seed: int
    total_s: float
    training_s: float
    tokens_per_s: float
    samples_per_s: float
    overlap: float
    trainer_idle: float
    rollout_idle: float
    lag_mean: float
    lag_max: float
    before: float
    after: float

    @property
    def broken(self) -> list[str]:
        """The promises this run broke, in words; NaN keeps none."""
        kept = {
            f"before {self.before:.3f} > {BEFORE_AT_MOST}": self.before <= BEFORE_AT_MOST,
            f"after {self.after:.3f} < {AFTER_AT_LEAST}": self.after >= AFTER_AT_LEAST,
            f"{self.total_s:.0f} s > {SECONDS_AT_MOST:.0f} s": self.total_s <= SECONDS_AT_MOST,
        }
        return [f"seed {self.seed}: {words}" for words, holds in kept.items() if not holds]


def summarise(rows: Rows, seed: int, total_s: float) -> Figures:
    """Figures of one run from the rows of its metrics.jsonl: means over updates are weighed by the updates' seconds."""
    updates = [row for row in rows if "perf/update_s" in row]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    if not updates or len(accuracies) < 2:
        raise SystemExit(f"seed {seed}: {len(updates)} updates and {len(accuracies)} validations are no whole run")
    training_s = sum(row["perf/update_s"] for row in updates)

    def mean(name: str) -> float:
        return float(sum(row[name] * row["perf/update_s"] for row in updates) / training_s)

    return Figures(
        seed=seed,
        total_s=total_s,
        training_s=training_s,
        tokens_per_s=mean("perf/tokens_per_s"),
        samples_per_s=mean("perf/samples_per_s"),
        overlap=mean("async/overlap_share"),
        trainer_idle=mean("async/trainer_idle_share"),
        rollout_idle=mean("async/rollout_idle_share"),
        lag_mean=mean("train/lag_mean"),
        lag_max=max(row["train/lag_max"] for row in updates),
        before=accuracies[0],
        after=accuracies[-1],
    )


def read_rows(path: Path) -> Rows:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_quickstart(seed: int, folder: Path) -> Figures:
    """Run the command once and read what it wrote."""
    # Beside this Python first: the command of this environment, activated or not.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    app = shutil.which("grpo-async-app", path=places)
    if app is None:
        raise SystemExit("grpo-async-app is not installed: pip install grpo-async-app")
    command = [app, "quickstart", "--seed", str(seed), "--out", str(folder)]
    start_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    total_s = time.monotonic() - start_s
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"seed {seed}: {' '.join(command)} ended with {done.returncode}:\n{said}")
    return summarise(read_rows(folder / "metrics.jsonl"), seed, total_s)


def describe(figures: Figures) -> str:
    """One seed in three lines."""
    one = figures
    return (
        f"seed {one.seed}: {one.total_s:.0f} s in all, {one.training_s:.0f} s of training; "
        f"held-out accuracy {one.before:.3f} -> {one.after:.3f}\n"
        f"  {one.tokens_per_s:.0f} tokens/s, {one.samples_per_s:.0f} samples/s; "
        f"lag {one.lag_mean:.2f} on average, {one.lag_max:.0f} at most\n"
        f"  both at work {one.overlap:.0%}, trainer idle {one.trainer_idle:.0%}, rollout idle {one.rollout_idle:.0%}"
    )


def verdict(runs: Iterable[Figures]) -> tuple[bool, str]:
    """Whether every seed kept every promise, and the line that says so."""
    broken = [words for figures in runs for words in figures.broken]
    promises = f"before <= {BEFORE_AT_MOST}, after >= {AFTER_AT_LEAST}, seconds <= {SECONDS_AT_MOST:.0f}"
    return not broken, f"{promises}: " + ("held for all seeds" if not broken else "BROKEN: " + "; ".join(broken))


def main(arguments: list[str] | None = None) -> int:
    """Run every seed, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(arguments)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before the first run")
    runs = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            runs.append(run_quickstart(seed, Path(temporary) / "run"))
        print(describe(runs[-1]), flush=True)
    kept, line = verdict(runs)
    print(line)
    if args.json:
        args.json.write_text(json.dumps({"kept": kept, "runs": [asdict(figures) for figures in runs]}, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
