"""Learn the quickstart's lessons at several lags, with the default correction and with others.

    python tools/bench/lags.py FOLDER [--lessons addition calculator] [--lags 0 1 4 8] [--seeds 5]
        [--corrections auto none] [--at-once 1] [--only-page]

Each run trains a fixed number of updates, so that all have seen equally many samples, from one warmed-up model a seed.
Lag 0 is synchronous training; lag M lets the engine run ahead as far as async.max_version_lag = M allows. What a run
measured is added to FOLDER/lags.jsonl, and runs that are there already are left out: the study continues where it was
interrupted. At the end FOLDER/lags.md and FOLDER/lags.svg hold the table and the figure of docs/losses.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import Row

from grpo_async_app._commands.quickstart import MODEL_VARIABLE, find_lesson
from offbeat_run import MetricsLine, read_metrics

UPDATES: Final = {"addition": 100, "calculator": 24}
"""Updates after which training on policy has learned nearly everything, and the learning rate has gone down on the way.

At least three times the largest lag: in fewer updates a lagged run shows little but that it begins later.
"""
STEPS: Final = {
    "addition": ("--engine.learning_rate=2.5e-4", "--engine.min_learning_rate_ratio=0.1", "--engine.warmup_steps=5"),
    "calculator": ("--engine.learning_rate=3e-4",),
}
"""Written out, so that a lesson may be tuned without another study of lag."""
CORRECTIONS: Final = {"auto": "default", "token_tis": "token weights", "none": "none"}
"""Corrections to compare, and how the page calls them. All but the default in the decoupled form."""
RUN_TIMEOUT_S: Final = 3600


def words_of(lag: int, correction: str, num_updates: int) -> list[str]:
    """Return the settings of one run, as words of the command line."""
    return [
        f"--engine.max_updates={num_updates}",
        "--engine.max_time_s=0",
        "--eval.stop_at_accuracy=0",
        f"--eval.every_updates={max(num_updates // 4, 1)}",
        "--checkpoint.every=0",
        f"--async.staleness_threshold={lag}",
        *(["--async.partial_rollout=false"] if lag == 0 else [f"--async.max_version_lag={lag}"]),
        f"--algorithm.correction={correction}",
        f"--algorithm.correction_form={'auto' if correction == 'auto' else 'decoupled'}",
    ]


def warm_model(lesson: str, seed: int, folder: Path) -> Path:
    """Return the lesson's model of one seed after its warm-up, made once."""
    run = folder / f"{lesson}-warm-{seed}"
    if not (run / "report.html").exists():
        shutil.rmtree(run, ignore_errors=True)
        # Only the warm-up is wanted; a run has to be longer than the lesson's engine.warmup_steps.
        words = [f"--lesson={lesson}", f"--seed={seed}", f"--out={run}", "--engine.max_updates=12"]
        run_command(["quickstart", *words, "--eval.every_updates=0", "--eval.stop_at_accuracy=0"])
    return run / "model-warm"


def run_lesson(lesson: str, lag: int, correction: str, seed: int, folder: Path, num_updates: int) -> Row:
    """Train once and return what the run measured."""
    model = warm_model(lesson, seed, folder)
    run = folder / f"{lesson}-{lag}-{correction}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    seeds = [f"--{section}.seed={seed}" for section in ("data", "rollout", "engine")]
    words = [*words_of(lag, correction, num_updates), *STEPS[lesson], *seeds, f"--out={run}"]
    run_command(["train", str(files("grpo_async_app") / find_lesson(lesson).config_file), *words], model)
    return {
        "lesson": lesson, "lag": lag, "correction": correction, "seed": seed, "updates": num_updates,
        **measure(list(read_metrics(run / "metrics.jsonl"))),
    }  # fmt: skip


def run_command(words: Sequence[str], model: Path | None = None) -> None:
    """Run grpo-async-app; `model` is what its lessons' files call the quickstart's model.

    Raises:
        SystemExit: it failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "grpo_async_app", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({MODEL_VARIABLE: str(model)} if model else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S, env=environment)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")


def measure(lines: Sequence[MetricsLine]) -> dict[str, float]:
    """Return accuracies before and after, and means over the updates of the metrics of off-policy training."""
    accuracies = [line.values["eval/accuracy"] for line in lines if "eval/accuracy" in line.values]
    updates = [line.values for line in lines if "train/lag_mean" in line.values]
    names = ("train/lag_mean", "train/reward", "mismatch/kl", "mismatch/ess_share", "perf/update_s")
    means = {name: statistics.fmean(_number(each, name) for each in updates) for name in names}
    first, last = (float(accuracies[at]) for at in (0, -1))  # type: ignore[arg-type]
    return {"before": first, "after": last, **means, "lag_max": max(_number(each, "train/lag_max") for each in updates)}


def _order(row: Row) -> int:
    return list(CORRECTIONS).index(row["correction"])


def _number(values: Mapping[str, Any], name: str) -> float:
    return float(values[name])


def missing_runs(
    known: Sequence[Row],
    lessons: Sequence[str],
    lags: Sequence[int],
    num_seeds: int,
    corrections: Sequence[str] = ("auto", "none"),
) -> Iterator[tuple[str, int, str, int]]:
    """Yield (lesson, lag, correction, seed) of the runs that are still to be made, seed by seed."""
    done = {(row["lesson"], row["lag"], row["correction"], row["seed"]) for row in known}
    for seed in range(num_seeds):
        for lesson in lessons:
            for lag in lags:
                # On policy the default is none, and weights are 1: one run covers all corrections.
                for correction in corrections if lag else ("none",):
                    key = (lesson, lag, correction, seed)
                    if key not in done:
                        yield key


def page(rows: Sequence[Row]) -> str:
    """Return the table: accuracy after equally many samples, mean and standard deviation over seeds."""
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["lesson"], row["lag"], row["correction"]].append(row)
    lines = [
        "| lesson | lag at most | correction | accuracy after | over seeds | mean lag | KL(rollout ‖ train) | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (lesson, lag, correction), found in sorted(groups.items()):
        after = [row["after"] for row in found]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        name = "on policy" if lag == 0 else CORRECTIONS[correction]
        means = [statistics.fmean(row[key] for row in found) for key in ("train/lag_mean", "mismatch/kl")]
        lines.append(
            f"| {lesson} | {lag} | {name} | {statistics.fmean(after):.3f} | ± {spread:.3f} | {means[0]:.2f} | "
            f"{means[1]:.1e} | {len(after)} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the figure: a panel a lesson, accuracy over lag, with a bar of one standard deviation."""
    import matplotlib as mpl  # imported late: a page without a figure does not need it

    mpl.use("svg")
    from matplotlib import pyplot as plt

    lessons = sorted({row["lesson"] for row in rows})
    figure, panels = plt.subplots(1, len(lessons), figsize=(4.5 * len(lessons), 3.2), squeeze=False)
    for panel, lesson in zip(panels[0], lessons, strict=True):
        of_lesson = [row for row in rows if row["lesson"] == lesson]
        for correction in dict.fromkeys(row["correction"] for row in sorted(of_lesson, key=_order) if row["lag"]):
            found = [row for row in of_lesson if row["correction"] == correction or row["lag"] == 0]
            lags = sorted({row["lag"] for row in found})
            after = [[row["after"] for row in found if row["lag"] == lag] for lag in lags]
            spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in after]
            label = "no correction" if correction == "none" else CORRECTIONS[correction]
            panel.errorbar(lags, [statistics.fmean(each) for each in after], spread, marker="o", capsize=3, label=label)
        panel.set(title=lesson, xlabel="lag at most (updates)", ylabel="held-out accuracy", ylim=(0, 1.02))
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Make the runs that are missing, then the table and the figure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lessons", nargs="+", default=list(UPDATES), choices=list(UPDATES))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--corrections", nargs="+", default=["auto", "none"], choices=list(CORRECTIONS))
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other; each has about one busy CPU")
    parser.add_argument("--updates", type=int, default=0, help="of each run; 0: as the lesson needs")
    parser.add_argument("--only-page", action="store_true", help="make no runs")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "lags.jsonl"
    lengths = {lesson: args.updates or num_updates for lesson, num_updates in UPDATES.items()}
    kept: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in kept if row["updates"] == lengths[row["lesson"]]]  # equal samples, or no comparison
    wanted = list(missing_runs(rows, args.lessons, args.lags, args.seeds, args.corrections))
    missing = [] if args.only_page else wanted
    with ThreadPoolExecutor(args.at_once) as pool:
        lessons = {(key[0], key[3]): None for key in missing}
        for _ in pool.map(lambda each: warm_model(each[0], each[1], args.folder), lessons):
            pass  # an error is raised here
        made = [pool.submit(run_lesson, *key, args.folder, lengths[key[0]]) for key in missing]
        for each in as_completed(made):
            row = each.result()
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print("{lesson}, lag {lag}, {correction}, seed {seed}: {after:.3f}".format_map(row), flush=True)
    (args.folder / "lags.md").write_text(page(rows))
    draw(rows, args.folder / "lags.svg")
    print(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
