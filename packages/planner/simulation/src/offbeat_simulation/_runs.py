"""Turns finished runs of grpo-async-app into a scenario: their timeline and metrics give the costs.

Two synchronous runs (staleness_threshold 0) of the same job with different mini_batch_size say what a group costs.
With G groups of S samples on E engines, summed over the decoding steps of a batch, and with R groups in an update:

    generate_s = step_s · E[longest of G·S] + sample_s · G·S·E[length] / E        update_s = step_s + group_s · R / n

One run gives one equation of each kind: then all of the time is attributed to sample_s and group_s.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from offbeat_core import ConfigError, DataError
from offbeat_simulation._calibration import length_moments
from offbeat_simulation._scenario import read_tables
from offbeat_simulation._workload import Lengths, read_lengths


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """Costs that a run folder has measured.

    Args:
        folder: of the run.
        recipe: the run's configuration, with what was chosen for open settings.
        generate_s: time in which engines were busy, for each sync.
        update_s: median time of one update.
        sync_s: median time of one weight sync.
        groups_per_sync: groups generated for each sync, those without learning signal included.
        filtered_share: of these, the share without learning signal.
        elapsed_s: from the first sync to the last update.
        trained: groups.
        trainer_idle_share, rollout_idle_share: over that time.
    """

    folder: Path
    recipe: dict[str, Any]
    generate_s: float
    update_s: float
    sync_s: float
    groups_per_sync: float
    filtered_share: float
    elapsed_s: float
    trained: int
    trainer_idle_share: float
    rollout_idle_share: float

    @property
    def num_engines(self) -> int:
        """Rollout engines."""
        return int(self.recipe["rollout"]["num_engines"])

    @property
    def groups_per_s(self) -> float:
        """Trained groups per second."""
        return self.trained / self.elapsed_s


def read_run(folder: Path) -> RunMeasures:
    """Read the configuration, timeline and metrics of a run.

    Raises:
        DataError: a file is missing or holds something else.
    """
    settled = folder / "settled.toml"
    recipe = read_tables(settled if settled.is_file() else folder / "config.toml")
    spans = _spans(folder / "timeline.json")
    updates, syncs = spans.get("train", []), spans.get("sync", [])
    if len(updates) < 3 or len(syncs) < 3:
        raise DataError(f"run folder {folder}: at least 3 updates and 3 syncs are required to measure anything")
    start_s, end_s = syncs[0][1], updates[-1][1]
    elapsed_s = end_s - start_s
    settings = recipe["async"]
    trained = len(updates) * settings["mini_batch_size"] * settings["require_batches"]
    filtered = _filtered(folder / "metrics.jsonl")
    busy_s = sum(end - start for start, end in spans.get("generate", [])) / recipe["rollout"]["num_engines"]
    num_syncs = len(updates) / settings["trigger_parameter_sync_step"]
    return RunMeasures(
        folder=folder,
        recipe=recipe,
        generate_s=busy_s / num_syncs,
        update_s=median(end - start for start, end in updates),
        sync_s=median(end - start for start, end in syncs),
        groups_per_sync=(trained + filtered) / num_syncs,
        filtered_share=filtered / (trained + filtered),
        elapsed_s=elapsed_s,
        trained=trained,
        trainer_idle_share=1 - sum(end - start for start, end in updates) / elapsed_s,
        rollout_idle_share=1 - busy_s / elapsed_s,
    )


def scenario_text(runs: Sequence[RunMeasures]) -> str:
    """Write a scenario, as TOML, from one synchronous run or two of different mini_batch_size.

    Raises:
        ConfigError: a run was not synchronous, or two runs have the same mini_batch_size.
    """
    _check_runs(runs)
    last = runs[-1]
    rollout, settings = last.recipe["rollout"], last.recipe["async"]
    decode_step_s, sample_s = _solve([_generation_terms(run) for run in runs], [run.generate_s for run in runs])
    num_ranks = last.recipe["engine"]["num_ranks"]
    update_terms = [
        (float(run.recipe["async"]["require_batches"]), run.trained / num_ranks / _num_updates(run)) for run in runs
    ]
    train_step_s, group_s = _solve(update_terms, [run.update_s for run in runs])
    return (
        f"# Measured: {', '.join(run.folder.name for run in runs)}.\n"
        f"[async]\nmini_batch_size = {settings['mini_batch_size']}\nrequire_batches = {settings['require_batches']}\n"
        f"trigger_parameter_sync_step = {settings['trigger_parameter_sync_step']}\nstaleness_threshold = 0.0\n\n"
        f"[work]\ngroup_size = {rollout['samples_per_prompt']}\nfiltered_share = {last.filtered_share:.4f}\n\n"
        f"[lengths]\nlongest = {rollout['max_tokens']}\nfile = {json.dumps(str(last.folder.resolve()))}\n\n"
        f"[machines]\ntrainer = {num_ranks}\nrollout = {last.num_engines}\n\n"
        f"[engines]\nmax_running = {rollout['max_running']}\n"
        f"step_s = {decode_step_s:.3e}\nsample_s = {sample_s:.3e}\n\n"
        f"[trainer]\nstep_s = {train_step_s:.3e}\ngroup_s = {group_s:.3e}\n\n"
        f"[sync]\nsync_s = {fmean(run.sync_s for run in runs):.3e}\n"
    )


def _check_runs(runs: Sequence[RunMeasures]) -> None:
    for run in runs:
        if run.recipe["async"]["staleness_threshold"]:
            raise ConfigError(
                f"run folder {run.folder}: a synchronous run is required, with async.staleness_threshold = 0; in an "
                "asynchronous one trainer and engines slow each other, and their times cannot be separated"
            )
    if len({run.groups_per_sync for run in runs}) < len(runs):
        raise ConfigError("two runs to measure need different async.mini_batch_size")


def _generation_terms(run: RunMeasures) -> tuple[float, float]:
    rollout = run.recipe["rollout"]
    lengths = Lengths(measured=read_lengths(run.folder), longest=rollout["max_tokens"])
    num_samples = round(run.groups_per_sync * rollout["samples_per_prompt"] / run.num_engines)
    mean, longest = length_moments(lengths, num_samples)
    return longest, num_samples * mean


def _num_updates(run: RunMeasures) -> float:
    settings = run.recipe["async"]
    return float(run.trained / (settings["mini_batch_size"] * settings["require_batches"]))


def _solve(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Numbers x, y >= 0 with x · term[0] + y · term[1] = seconds; from the last row alone, x = 0."""
    (a, b), c = terms[-1], seconds[-1]
    if len(terms) == 1:
        return 0.0, c / b
    (d, e), f = terms[0], seconds[0]
    determinant = a * e - b * d
    x, y = (c * e - b * f) / determinant, (a * f - c * d) / determinant
    if x < 0:
        return 0.0, c / b
    return (c / a, 0.0) if y < 0 else (x, y)


def _spans(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Start and end of each span, in s, by name, in order."""
    try:
        text = path.read_text(encoding="utf-8").rstrip().rstrip(",")
        events = json.loads(text if text.endswith("]") else text + "]")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a timeline: {error}") from error
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("ph") == "X":
            start_s = event["ts"] / 1e6
            spans.setdefault(event["name"], []).append((start_s, start_s + event["dur"] / 1e6))
    return {name: sorted(each) for name, each in spans.items()}


def _filtered(path: Path) -> int:
    """Groups filtered in the whole run."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON lines: {error}") from error
    return int(max((line.get("groups/filtered", 0) for line in lines), default=0))
