"""What the folder of a run of sft-app holds."""

from pathlib import Path

from offbeat_run import Checkpoint, RunFolder, read_metrics


def values_of(run: Path, metric: str) -> dict[int, float]:
    """By update, each of which is there once; none before the run has a folder."""
    path = run / "metrics.jsonl"
    lines = [line for line in read_metrics(path) if metric in line.values] if path.exists() else []
    values = {line.step: float(line.values[metric]) for line in lines}  # type: ignore[arg-type]
    assert len(values) == len(lines), f"{metric} of an update is there twice"
    return values


def latest_checkpoint(run: Path) -> Checkpoint:
    found = RunFolder.open(run, write=False).checkpoints.latest()
    assert found is not None
    return found
