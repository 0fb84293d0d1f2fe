"""A run whose vLLM engine is stalled in a step: its process answers, its worker does not."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_model, wait_until_gone

SILENT_AFTER_S = 10


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_engine_whose_worker_stands_still_is_replaced(tmp_path: Path) -> None:
    """As one whose kernel never ends: of two ranks one is stopped, and the other waits for it."""
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(16)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vllm.toml").write_text(f"""
[model]
path = "{model}"
[data]
path = "{tmp_path}/sums.jsonl"
max_prompt_tokens = 64
[reward]
name = "grpo_async_app._shrink_reward:variety"
[rollout]
backend = "vllm"
tensor_parallel = 2
samples_per_prompt = 4
max_tokens = 256
max_model_len = 384
max_running = 16
[engine]
learning_rate = 1e-4
[algorithm]
filter_groups = false
[async]
mini_batch_size = 4
[cluster]
silent_after_s = {SILENT_AFTER_S}
start_timeout_s = 400
[eval]
every_updates = 0
""")
    with RunningCommand("grpo_async_app", "train", tmp_path / "vllm.toml", "--out", run) as process:
        process.wait_until(lambda: version_of(run, "rollout-0") >= 1, "an update", deadline_s=500)
        workers = workers_of(run)
        workers[-1].send_signal(signal.SIGSTOP)
        found = f"no token came for {SILENT_AFTER_S} s (cluster.silent_after_s) and was killed"
        process.wait_until(lambda: found in " ".join(process.output.split()), "that it is found", deadline_s=90)
        wait_until_gone([worker.pid for worker in workers], deadline_s=30)
        assert process.wait(deadline_s=500) == 0, process.output
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 4
    assert lines[-1]["engines/restarts"] == 1.0


def version_of(run: Path, name: str) -> int:
    roles = json.loads((run / "places.json").read_text())["roles"] if (run / "places.json").exists() else []
    return max([role["version"] or 0 for role in roles if role["role"] == name], default=0)


def workers_of(run: Path) -> list[psutil.Process]:
    """Return the processes of the engine's ranks."""
    [pid] = [
        each["pid"] for each in json.loads((run / "places.json").read_text())["roles"] if each["role"] == "rollout-0"
    ]
    children = psutil.Process(pid).children(recursive=True)
    workers = [each for each in children if "VLLM" in " ".join(each.cmdline())]
    assert len(workers) == 2, [each.cmdline() for each in children]
    return workers
