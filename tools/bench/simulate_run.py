"""The simulator against real runs on this machine: asynchronous runs predicted from two synchronous ones.

    python tools/bench/simulate_run.py [--updates N] [--keep FOLDER]

A tiny model with random weights samples up to 48 tokens of arithmetic (rewards are all alike, so the policy stays as it
is, and lengths with it). Two synchronous runs, of 8 and 32 groups an update, give the costs (`offbeat-simulation
measure`); then each asynchronous run is predicted from them before it is looked at: trained groups per second, and the
idle shares of trainer and engine. Exit code 1 when a prediction is further off than the tolerances below.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offbeat_simulation import ScenarioModel, read_run, read_scenario, scenario_text

SPEED_TOLERANCE = 0.20  # of groups per second
IDLE_TOLERANCE = 0.15  # of the time, absolute
RUN_TIMEOUT_S = 500
COMMON = """
[model]
path = "{model}"
[data]
path = "arithmetic:2"
num_items = 4000
max_prompt_tokens = 8
epochs = 0
[reward]
name = "exact_match"
[rollout]
samples_per_prompt = 8
max_tokens = 48
max_model_len = 64
max_running = 512
[engine]
learning_rate = 1e-9
max_updates = {updates}
[algorithm]
filter_groups = false
[checkpoint]
every = 0
[log]
train_generations = 64
[async]
"""
CALIBRATING: tuple[dict[str, object], ...] = ({"mini_batch_size": 8}, {"mini_batch_size": 32})
PREDICTED: tuple[dict[str, object], ...] = (
    {"mini_batch_size": 8, "staleness_threshold": 1.0, "partial_rollout": True},
    {"mini_batch_size": 16, "staleness_threshold": 0.5, "partial_rollout": True},
    {"mini_batch_size": 16, "staleness_threshold": 0.5},
    {"mini_batch_size": 8, "staleness_threshold": 0.0, "trigger_parameter_sync_step": 4},
)


def train(folder: Path, model: Path, settings: dict[str, object], updates: int) -> Path:
    """Run `grpo-async-app train` with these settings; return its run folder."""
    lines = [f"{key} = {str(value).lower()}" for key, value in {"staleness_threshold": 0.0, **settings}.items()]
    recipe = folder.with_suffix(".toml")
    recipe.write_text(COMMON.format(model=model, updates=updates) + "\n".join(lines) + "\n")
    _app("train", str(recipe), "--out", str(folder))
    return folder


def predict(scenario: Path, recipe: Path) -> ScenarioModel:
    """Return the scenario with the asynchronous settings of a recipe."""
    return ScenarioModel.of(read_scenario(scenario, [("--work.num_syncs", "40")], recipe))


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="of each run")
    parser.add_argument("--only", type=int, default=len(PREDICTED), help="so many of the asynchronous runs")
    parser.add_argument("--keep", type=Path, help="folder for the runs, kept")
    parsed = parser.parse_args()
    with ExitStack() as stack:
        root = parsed.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=True)
        return _compare(root, parsed.updates, PREDICTED[: parsed.only])


def _compare(root: Path, updates: int, predicted: Sequence[dict[str, object]]) -> int:
    model = root / "made" / "model"
    if not model.is_dir():
        _app("quickstart", "--out", str(root / "made"), "--engine.max_updates=8", "--engine.warmup_steps=0")
    measured = [
        read_run(train(root / f"sync-{index}", model, settings, updates)) for index, settings in enumerate(CALIBRATING)
    ]
    scenario = root / "measured.toml"
    scenario.write_text(scenario_text(measured))
    print(scenario.read_text())
    print("settings | groups/s measured, predicted, error | trainer idle | engine idle")
    num_wrong = 0
    for index, settings in enumerate(predicted):
        folder = root / f"async-{index}"
        train(folder, model, settings, updates)
        report = predict(scenario, folder.with_suffix(".toml")).run()
        run = read_run(folder)
        error = report.groups_per_s / run.groups_per_s - 1
        trainer_error = report.trainer_idle_share - run.trainer_idle_share
        engine_error = report.engine_idle_share - run.rollout_idle_share
        num_wrong += abs(error) > SPEED_TOLERANCE or max(abs(trainer_error), abs(engine_error)) > IDLE_TOLERANCE
        print(
            f"{settings} | {run.groups_per_s:.1f}, {report.groups_per_s:.1f}, {error:+.1%} | "
            f"{run.trainer_idle_share:.0%}, {report.trainer_idle_share:.0%} | "
            f"{run.rollout_idle_share:.0%}, {report.engine_idle_share:.0%}",
            flush=True,
        )
    print(f"tolerances: speed {SPEED_TOLERANCE:.0%}, idle shares {IDLE_TOLERANCE:.0%} of the time; {num_wrong} outside")
    return 1 if num_wrong else 0


def _app(*words: str) -> None:
    command = [str(Path(sys.executable).with_name("grpo-async-app")), *words]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
