"""One GRPO job on several rollout engines: whether they learn alike, and how fast each is.

    python tools/bench/rollout_backends.py MODEL_FOLDER [--backends torch vllm] [--updates 12] [--json FILE]

The job is apps/grpo-async-app/recipes/smollm2_arithmetic.toml, cut to so many updates; the engines take turns on an
otherwise idle machine, each run started by the installed command. Two curves are alike when their mean rewards differ
by at most two standard errors, taken from how the rewards of the updates scatter about each run's own line. Exit code 1
when they are not.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[2] / "apps/grpo-async-app/recipes/smollm2_arithmetic.toml"
RUN_TIMEOUT_S = 7200
STANDARD_ERRORS = 2.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one engine's run gave.

    Args:
        backend: of the rollout.
        rewards: mean reward of each update.
        before, after: reward on held-out prompts.
        start_s: from the command's start to the first validation's end, engine start included.
        update_s: seconds of an update, the median.
        samples_per_s: completions trained on, per second of training.
    """

    backend: str
    rewards: tuple[float, ...]
    before: float
    after: float
    start_s: float
    update_s: float
    samples_per_s: float

    @property
    def mean(self) -> float:
        """Reward over all updates."""
        return statistics.fmean(self.rewards)

    @property
    def standard_error(self) -> float:
        """Of the mean, from the scatter about a straight line through the updates."""
        steps = range(len(self.rewards))
        slope, intercept = statistics.linear_regression(steps, self.rewards)
        squares = sum(
            (reward - intercept - slope * step) ** 2 for step, reward in zip(steps, self.rewards, strict=True)
        )
        return float((squares / (len(self.rewards) - 2)) ** 0.5 / len(self.rewards) ** 0.5)


def read_curve(rows: Sequence[dict[str, Any]], backend: str, started_s: float) -> Curve:
    """The curve in the rows of a metrics.jsonl; `started_s` is when the command was started, since the epoch."""
    updates = [row for row in rows if "perf/update_s" in row]
    held_out = [row for row in rows if "eval/reward" in row]
    if len(updates) < 3 or len(held_out) < 2:
        raise SystemExit(
            f"{backend}: {len(updates)} updates and {len(held_out)} validations: at least 3 and 2 are needed"
        )
    return Curve(
        backend=backend,
        rewards=tuple(row["train/reward"] for row in updates),
        before=held_out[0]["eval/reward"],
        after=held_out[-1]["eval/reward"],
        start_s=held_out[0]["time_s"] - started_s,
        update_s=statistics.median(row["perf/update_s"] for row in updates),
        samples_per_s=statistics.median(row["perf/samples_per_s"] for row in updates),
    )


def difference(one: Curve, other: Curve) -> float:
    """Difference of two mean rewards, in standard errors of it."""
    error = (one.standard_error**2 + other.standard_error**2) ** 0.5
    return abs(one.mean - other.mean) / error if error else float("inf") * (one.mean != other.mean)


def run(backend: str, model: Path, updates: int, folder: Path) -> Curve:
    """Run the job once."""
    app = shutil.which("grpo-async-app", path=str(Path(sys.executable).parent))
    if app is None:
        raise SystemExit("grpo-async-app is not installed beside this Python: pip install grpo-async-app")
    command = [app, "train", str(RECIPE), f"--model.path={model}", f"--rollout.backend={backend}", f"--out={folder}"]
    command += [f"--engine.max_updates={updates}", f"--eval.every_updates={updates}", f"--checkpoint.every={updates}"]
    started_s = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return read_curve(rows, backend, started_s)


def describe(curve: Curve) -> str:
    """One run in a line."""
    return (
        f"{curve.backend:6} reward {curve.mean:.3f} ± {curve.standard_error:.3f} over {len(curve.rewards)} updates, "
        f"held out {curve.before:.3f} -> {curve.after:.3f}; first validation after {curve.start_s:.0f} s, "
        f"{curve.update_s:.1f} s an update, {curve.samples_per_s:.2f} samples/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every engine, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--backends", nargs="+", default=["torch", "vllm"])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(arguments)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before the first run", flush=True)
    curves = []
    for backend in args.backends:
        with tempfile.TemporaryDirectory() as temporary:
            curves.append(run(backend, args.model.resolve(), args.updates, Path(temporary) / "run"))
        print(describe(curves[-1]), flush=True)
    differences = {curve.backend: difference(curves[0], curve) for curve in curves[1:]}
    for backend, apart in differences.items():
        alike = "alike" if apart <= STANDARD_ERRORS else "NOT alike"
        print(f"{curves[0].backend} and {backend}: {apart:.1f} standard errors apart, {alike}")
    if args.json:
        args.json.write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n")
    return int(any(apart > STANDARD_ERRORS for apart in differences.values()))


if __name__ == "__main__":
    sys.exit(main())
