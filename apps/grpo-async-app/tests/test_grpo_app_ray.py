"""A run on a Ray cluster is the same run: one key makes the difference, another joins a cluster of several nodes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = [
    "--cluster.launcher=ray",
    "--cluster.connect_timeout_s=300",  # Ray's processes take their time on a busy machine
    "--eval.every_updates=0",
    "--engine.max_updates=2",
    "--rollout.num_engines=2",
]


@pytest.mark.timeout(600)
def test_one_key_trains_on_ray_and_leaves_the_same_promises(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-cluster[ray]'")
    check_run(config, tmp_path / "run")


@pytest.mark.timeout(600)
def test_a_run_joins_a_cluster_and_no_two_roles_share_a_machine(config: Path, tmp_path: Path) -> None:
    """With one CPU a node, weights go from the trainer to either engine over TCP."""
    with three_nodes() as address:
        check_run(config, tmp_path / "run", f"--cluster.address={address}")


def check_run(config: Path, run: Path, *words: str) -> None:
    """Train, and check what has come of it."""
    command = [sys.executable, "-m", "grpo_async_app", "train", str(config), "--out", str(run), *WORDS, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    lines = (run / "generations" / "train.jsonl").read_text().splitlines()
    assert sorted(Counter(json.loads(line)["prompt"] for line in lines).values()) == [1] * 8
    assert {path.stem for path in (run / "logs").glob("*.log")} >= {"trainer-0", "rollout-0", "rollout-1"}


@contextlib.contextmanager
def three_nodes() -> Iterator[str]:
    """Start a Ray cluster of three nodes with an address and one CPU each: host:port of its head."""
    reason = "Ray is not installed: pip install 'offbeat-cluster[ray]'"
    cluster = pytest.importorskip("ray.cluster_utils", reason=reason).Cluster()
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray puts sockets into it
    try:
        switches = {"prestart_worker_first_driver": False}
        cluster.add_node(num_cpus=1, include_dashboard=False, temp_dir=folder, _system_config=switches)
        for number in (2, 3):
            cluster.add_node(node_ip_address=f"127.0.0.{number}", num_cpus=1, wait=False)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
