"""What the folder of a run of sft-app holds."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from offbeat_run import Checkpoint, RunFolder, read_metrics

# Adam's first steps turn a rounding difference into a multiple of the learning rate: the smaller, the closer.
LEARNING_RATE = 1e-3
WORDS = ["--engine.schedule=constant", f"--engine.learning_rate={LEARNING_RATE}"]
RANKS = ["--engine.num_ranks=2", "--engine.max_tokens_per_microbatch=128"]  # both have something to do


def values_of(run: Path, metric: str) -> dict[int, float]:
    """Return the values by update, each update once; none before the run has a folder."""
    path = run / "metrics.jsonl"
    lines = [line for line in read_metrics(path) if metric in line.values] if path.exists() else []
    values = {line.step: float(line.values[metric]) for line in lines}  # type: ignore[arg-type]
    assert len(values) == len(lines), f"{metric} of an update is there twice"
    return values


def latest_checkpoint(run: Path) -> Checkpoint:
    found = RunFolder.open(run, write=False).checkpoints.latest()
    assert found is not None
    return found


def assert_same(run: Path, undisturbed: Path) -> None:
    """Every update once, to the same losses and weights."""
    for name in ("train/loss", "eval/loss"):
        expected = values_of(undisturbed, name)
        assert len(expected) > 1
        assert values_of(run, name) == pytest.approx(expected, abs=1e-5)
    one, other = latest_checkpoint(run), latest_checkpoint(undisturbed)
    assert one.step == other.step
    got, wanted = load_file(one.path / "model.safetensors"), load_file(other.path / "model.safetensors")
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        # Where a gradient is hardly more than its rounding, the order of a sum says where Adam goes.
        difference = abs(got[name] - array)
        assert np.quantile(difference, 0.999) <= 1e-5, name
        assert difference.max() <= LEARNING_RATE / 10, name
