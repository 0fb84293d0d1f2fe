"""A run on a Ray cluster is the same run: one key makes the difference, another joins a cluster of several nodes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import abacus_standin
import pytest
from grpo_runs import role_of, where_once

from offbeat_testing import CommandLine, RunningCommand, ray_nodes

WORDS = [
    "--cluster.launcher=ray",
    "--cluster.connect_timeout_s=300",  # Ray's processes take their time on a busy machine
    "--eval.every_updates=0",
    "--engine.max_updates=2",
    "--rollout.num_engines=2",
]


@pytest.mark.timeout(600)
def test_one_key_trains_on_ray_and_leaves_the_same_promises(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    check_run(config, tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_joins_a_cluster_and_no_two_roles_share_a_machine(nodes: str, config: Path, tmp_path: Path) -> None:
    """With one CPU a node, weights go from the trainer to either engine over TCP."""
    check_run(config, tmp_path / "run", f"--cluster.address={nodes}")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_where_names_the_node_of_each_role_while_a_run_goes_on(
    nodes: str, config: Path, tmp_path: Path, command: CommandLine
) -> None:
    run = tmp_path / "run"
    words = [*WORDS, f"--cluster.address={nodes}", "--engine.max_updates=4000", "--data.epochs=1000"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, *words) as process:
        engines = ("rollout-0", "rollout-1")
        places = where_once(
            process,
            command,
            run,
            lambda seen: all((role_of(seen, name)["version"] or 0) >= 1 for name in engines),
            "weights of an update in both engines",
        )
        placed = {name: role_of(places, name) for name in ("trainer-0", *engines)}
        assert len({role["node"] for role in placed.values()}) == 3
        assert all(role["node"].startswith("127.0.0.") for role in placed.values())
        assert Path(f"/proc/{placed['rollout-1']['pid']}").exists()

        os.kill(placed["rollout-1"]["pid"], signal.SIGKILL)
        again = where_once(
            process,
            command,
            run,
            lambda seen: (
                role_of(seen, "rollout-1")["restarts"] == 1 and role_of(seen, "rollout-1")["version"] is not None
            ),
            "another engine with weights",
        )
        assert role_of(again, "rollout-1")["pid"] != placed["rollout-1"]["pid"]
        assert role_of(again, "rollout-1")["node"] == placed["rollout-1"]["node"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_driver_without_devices_plans_sixteen_ranks_for_the_nodes(nodes: str, config: Path) -> None:
    wanted = ["--engine.num_ranks=16", "--rollout.num_engines=4", "--rollout.tensor_parallel=4"]
    ended = run_command("plan", config, *on_accelerators(nodes, "cuda"), *wanted)
    assert ended.returncode == 0, ended.stderr
    assert "32 of 32 free GPU" in ended.stdout
    assert "T8   T9   T10  T11" in ended.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_each_role_computes_on_the_device_that_it_was_given(nodes: str, config: Path, tmp_path: Path) -> None:
    run, env = tmp_path / "run", abacus_standin.register(tmp_path, num_devices=0)
    words = [*on_accelerators(nodes, "abacus"), "--engine.num_ranks=2", "--rollout.backend=abacus"]
    check_run(config, run, *words, env=env)
    said = [abacus_standin.said(run, role) for role in ("trainer-0", "trainer-1", "rollout-0", "rollout-1")]
    assert [re.sub(r"\d+$", "N", line) for lines in said for line in lines] == [
        *["opened abacus 0 of N"] * 2,
        *["opened abacus 0 of N", "samples on abacus 0 of N"] * 2,
    ]
    assert len({line.split()[-1] for lines in said for line in lines}) == 4, said
    ended = run_command("eval", run, env=env)
    assert ended.returncode == 0, ended.stderr
    [evaluated] = (run / "evals").iterdir()
    for line in abacus_standin.said(evaluated, "rollout-0"):
        assert re.fullmatch(r"(opened|samples on) abacus 0 of \d", line)


def on_accelerators(address: str, kind: str) -> list[str]:
    """Words of a run on the accelerators of a cluster; its CPUs are shared."""
    cluster = ["--cluster.launcher=ray", f"--cluster.address={address}", "--cluster.connect_timeout_s=300"]
    return [
        *cluster,
        "--cluster.trainer_threads=0",
        "--cluster.rollout_threads=0",
        f"--engine.device={kind}",
        f"--rollout.device={kind}",
    ]


def run_command(*words: object, env: dict[str, str] = {}) -> subprocess.CompletedProcess[str]:  # noqa: B006  never changed
    """The command line in a process of its own: what Ray leaves in one shall not be forked."""
    line = [sys.executable, "-m", "grpo_async_app", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=env)


def check_run(config: Path, run: Path, *words: str, env: dict[str, str] = {}) -> None:  # noqa: B006  never changed
    """Train, and check what has come of it."""
    done = run_command("train", config, "--out", run, *WORDS, *words, env=env)
    assert done.returncode == 0, done.stderr
    lines = (run / "generations" / "train.jsonl").read_text().splitlines()
    assert sorted(Counter(json.loads(line)["prompt"] for line in lines).values()) == [1] * 8
    assert {path.stem for path in (run / "logs").glob("*.log")} >= {"trainer-0", "rollout-0", "rollout-1"}
    places = json.loads((run / "places.json").read_text())["roles"]
    assert {"trainer-0", "rollout-0", "rollout-1"} <= {role["role"] for role in places}
    assert all(role["node"] and role["pid"] for role in places)


@pytest.fixture(scope="session")
def nodes() -> Iterator[str]:
    """A Ray cluster of five nodes with an address and one CPU each: host:port of its head.

    All but the head have eight accelerators, in Ray's books only.
    """
    reason = "Ray is not installed: pip install 'offbeat-actors[ray]'"
    pytest.importorskip("ray", reason=reason)
    with ray_nodes(4) as cluster:
        yield cluster.address
