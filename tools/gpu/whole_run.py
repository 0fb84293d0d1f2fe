"""A whole GRPO run of the application on one device, and what its run folder says of its speed.

8 prompts x 8 samples of 128 new tokens, a model with random weights, everything else as the application settles it.
The first updates, in which kernels are compiled and steps recorded, are left out of the figures.
"""

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpu.piece import Figures, Place, require, sampled_peak

from offbeat_run import read_metrics, read_timeline
from offbeat_testing import RunningCommand, forked_main

GRPO: Final = "grpo_async_app"
ENGINES: Final = ("offbeat_engine_torch", "offbeat_rollout_torch")
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 128
WARM_UPDATES: Final = 4
"""Updates before the figures begin: shapes of packs and of decoding steps come up that were not compiled yet."""
GIB: Final = 2**30
STEPS: Final = {
    "generate": "generation_s",
    "train": "training_s",
    "take weights: merged": "weights_s",
    "sleep": "parking_s",
    "wake": "waking_s",
}
"""Figure of each span of a timeline, by what the span's name begins with."""


def write_config(folder: Path, model: Path, place: Place, name: str, cluster: Mapping[str, object]) -> Path:
    """Write the configuration of a run: the sizes, and nothing else that has a default."""
    settings: dict[str, dict[str, object]] = {
        "model": {"path": str(model)},
        "data": {"path": "arithmetic:2", "max_prompt_tokens": 32},
        "reward": {"name": "number_match"},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": place.pick(8, NEW_TOKENS)},
        "engine": {"max_updates": place.pick(2, WARM_UPDATES + 8)},
        "async": {"mini_batch_size": place.pick(2, PROMPTS)},
        "cluster": dict(cluster),
        "checkpoint": {"every": 0, "save_optimizer": False},
    }
    if not place.is_accelerator:
        settings["rollout"] |= {"device": place.name, "max_model_len": 64}
        settings["engine"] |= {"device": place.name}
    if cluster.get("colocate"):
        settings["async"] |= {"staleness_threshold": 0}
    return write_toml(folder / f"{name}.toml", settings)


def write_toml(path: Path, settings: Mapping[str, Mapping[str, object]]) -> Path:
    """Write a configuration, values by section and key, and return its path."""
    path.write_text("\n".join(_section(title, values) for title, values in settings.items()))
    return path


def _section(title: str, values: Mapping[str, object]) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join([f"[{title}]", *lines, ""])


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def train(folder: Path, model: Path, place: Place, name: str, limit_s: float, **cluster: object) -> Figures:
    """Run the application as a user would, and note what it has written, also where it fails.

    Args:
        folder: for the configuration and the run folder.
        model: its folder.
        place: of the piece.
        name: of the run, behind each of its figures; "" for none.
        limit_s: longest time of the run.
        cluster: settings of section `cluster`.

    Returns:
        The figures that were noted.

    Raises:
        CheckError: the run failed, or did not end in time.
    """
    config, out = write_config(folder, model, place, name or "run", cluster), folder / f"run-{name or 'run'}"
    with sampled_peak(place) as peak:
        ended, said = run_application(GRPO, place, ["train", str(config), "--out", str(out)], limit_s)
    print(said)
    found: dict[str, Any] = {"peak_gib": peak[0] / GIB}
    if (out / "metrics.jsonl").exists():
        lines = [(line.time_s, line.values) for line in read_metrics(out / "metrics.jsonl")]
        found |= figures_of(lines, read_timeline(out / "timeline.json"), place.pick(1, WARM_UPDATES))
    figures = {f"{what}, {name}" if name else what: figure for what, figure in found.items()}
    place.note(figures)
    require_ended(ended, said)
    return figures


def run_application(name: str, place: Place, words: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Run an application; return how it has ended, "" for well, and what it has printed.

    Args:
        name: of its module.
        place: of the piece.
        words: of the command line.
        limit_s: longest time.
    """
    if place.tiny:  # all of its processes are forks, so that a test imports torch once; a GPU does not survive that
        with RunningCommand(forked_main(name, *ENGINES), *words) as command:
            code = command.wait(limit_s)
            return f"ended with {code}" if code else "", command.output
    with tempfile.TemporaryFile("w+") as log:
        line = [sys.executable, "-m", name, *words]
        try:
            code = subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=limit_s).returncode
            ended = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:.0f} s"
        log.seek(0)
        return ended, log.read()


def require_ended(ended: str, said: str) -> None:
    """Raise unless an application has ended well.

    Raises:
        CheckError: with the last lines that it has printed.
    """
    require(not ended, f"{ended}: " + "\n".join(said.splitlines()[-20:]))


def learning_curve(run_folder: Path) -> dict[str, Any]:
    """Return held-out accuracy as a run has learned it: before and after, and by update in the order of updates."""
    lines: list[tuple[int, Mapping[str, Any]]] = [
        (line.step, line.values) for line in read_metrics(run_folder / "metrics.jsonl")
    ]
    update_s = [values["perf/update_s"] for _, values in lines if "perf/update_s" in values]
    curve = [(update, values["eval/accuracy"]) for update, values in lines if "eval/accuracy" in values]
    accuracies = [accuracy for _, accuracy in curve]
    return {
        "updates": len(update_s),
        "seconds_of_updates": sum(update_s),
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[-1],
        "accuracy_gained": accuracies[-1] - accuracies[0],
        "accuracy_by_update": ", ".join(f"{update}: {accuracy:.3f}" for update, accuracy in curve),
    }


def figures_of(
    lines: Iterable[tuple[float, Mapping[str, Any]]], events: Iterable[Mapping[str, Any]], num_warm: int
) -> dict[str, Any]:
    """Return the speed of the updates after the first ones, and the seconds that an update spends in each step.

    Args:
        lines: of the metrics, each the time in seconds and the values.
        events: of the timeline.
        num_warm: updates that are left out, at least one.
    """
    updates = [(at_s, values) for at_s, values in lines if "perf/samples_per_s" in values]
    if len(updates) <= num_warm:
        return {"updates": len(updates)}
    first_s, last_s, counted = updates[num_warm - 1][0], updates[-1][0], updates[num_warm:]
    num_samples = sum(values["perf/samples_per_s"] * values["perf/update_s"] for _, values in counted)
    num_tokens = sum(values["perf/tokens_per_s"] * values["perf/update_s"] for _, values in counted)
    mismatch = [values["mismatch/abs_p99_nats_lag0"] for _, values in counted if "mismatch/abs_p99_nats_lag0" in values]
    return {
        "updates": len(updates),
        "samples_per_s": num_samples / (last_s - first_s),
        "sampled_tokens_per_s": num_tokens / (last_s - first_s),
        "update_s": (last_s - first_s) / len(counted),
        **seconds_of_steps(events, first_s, last_s, len(counted)),
        **({"mismatch_p99_nats_lag0": statistics.median(mismatch)} if mismatch else {}),
    }


def seconds_of_steps(
    events: Iterable[Mapping[str, Any]], first_s: float, last_s: float, num_updates: int
) -> dict[str, float]:
    """Return the seconds of each of `STEPS` in an update, of the spans that end in a stretch of the timeline."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        end_s = (event.get("ts", 0.0) + event.get("dur", 0.0)) / 1e6
        figure = next((each for begin, each in STEPS.items() if str(event.get("name")).startswith(begin)), None)
        if event.get("ph") == "X" and figure and first_s < end_s <= last_s:
            spent[figure] += event["dur"] / 1e6 / num_updates
    return {figure: spent[figure] for figure in STEPS.values() if figure in spent}
