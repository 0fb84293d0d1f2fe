"""A whole run on one device: the quickstart, with its trainer and its engine taking turns on it.

Half of its usual updates, without overlap, which takes two devices. Held-out accuracy has to rise.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import Figures, Place, main, require

from offbeat_run import read_metrics

UPDATES = 60
RISE_AT_LEAST = 0.2
LIMIT_S = 460
IN_TURNS = (
    *("--async.staleness_threshold", "0", "--async.partial_rollout", "false"),
    *("--async.trigger_parameter_sync_step", "1"),
)


def run(place: Place) -> Figures:
    """Run the command as a user would, and read what it wrote."""
    kind = place.device.kind
    devices = ("--engine.device", kind, "--rollout.device", kind, "--rollout.dtype", "float32")
    colocate = ("--cluster.colocate", "true") * place.is_accelerator
    sizes = ("--engine.max_updates", str(place.pick(12, UPDATES)), "--data.eval_size", str(place.pick(16, 256)))
    command = [sys.executable, "-m", "grpo_async_app", "quickstart", "--seed", "0", *devices, *colocate, *sizes]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [*command, *IN_TURNS, "--out", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        require(done.returncode == 0, f"ended with {done.returncode}: {said}")
        lines: list[dict[str, Any]] = [dict(line.values) for line in read_metrics(out / "metrics.jsonl")]
    updates = [line for line in lines if "perf/update_s" in line]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    rise = accuracies[-1] - accuracies[0]
    require(place.tiny or rise >= RISE_AT_LEAST, f"held-out accuracy {accuracies[0]:.3f} to {accuracies[-1]:.3f}")
    seconds = sum(line["perf/update_s"] for line in updates)
    return {
        "updates": len(updates),
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[-1],
        "seconds_of_updates": seconds,
        "tokens_per_s": sum(line["perf/tokens_per_s"] * line["perf/update_s"] for line in updates) / seconds,
    }


if __name__ == "__main__":
    main(run)
