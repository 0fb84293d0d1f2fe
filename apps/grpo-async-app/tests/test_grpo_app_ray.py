"""A run on a Ray cluster of its own is the same run: one key makes the difference."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_one_key_trains_on_ray_and_leaves_the_same_promises(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-cluster[ray]'")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "grpo_async_app", "train", str(config), "--out", str(run)]
    words = ["--cluster.launcher=ray", "--eval.every_updates=0", "--engine.max_updates=2", "--rollout.num_engines=2"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=230, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    lines = (run / "generations" / "train.jsonl").read_text().splitlines()
    assert sorted(Counter(json.loads(line)["prompt"] for line in lines).values()) == [1] * 8
    assert {path.stem for path in (run / "logs").glob("*.log")} >= {"trainer-0", "rollout-0", "rollout-1"}
