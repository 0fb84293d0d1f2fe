"""Ranks on the nodes of a job of torchrun: the run is the same as on one machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sft_runs import RANKS, WORDS, latest_checkpoint, values_of

from offbeat_core import installed_backends
from offbeat_testing import CommandLine, TorchrunNodes, wait_until_gone

SHORT = [*RANKS, *WORDS, "--eval.every_updates=0", "--engine.max_updates=3"]
LONG = [*RANKS, *WORDS, "--eval.every_updates=0", "--data.epochs=4000"]

pytestmark = [
    pytest.mark.skipif("torchrun" not in installed_backends("offbeat.launcher"), reason="install offbeat-actors again"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a node of one CPU needs sched_setaffinity"),
]


GONE_WITHIN_S = 10.0
"""The processes of roles find out by themselves that their parent was killed."""
ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def start(config: Path, run: Path, *words: str, num_processes: int = 1, only: Sequence[str] = ()) -> TorchrunNodes:
    """Train on two nodes; `only` the second gets these further words."""
    line = ("train", config, "--out", run, "--cluster.launcher=torchrun", *words)
    return TorchrunNodes("sft_app", *line, logs=run.parent, num_processes=num_processes, only={1: only})


def wait_updates(nodes: TorchrunNodes, run: Path, number: int) -> None:
    nodes.wait_until(lambda: len(values_of(run, "train/loss")) >= number, f"{number} updates", 300)


def assert_same_as_on_one_machine(run: Path, command: CommandLine, config: Path) -> None:
    local = run.with_name("local")
    assert command("train", config, "--out", local, *SHORT).code == 0
    expected = values_of(local, "train/loss")
    assert len(expected) == 3
    assert values_of(run, "train/loss") == pytest.approx(expected, abs=1e-5)


@pytest.mark.timeout(400)
def test_two_nodes_train_to_the_losses_of_two_ranks_on_one(command: CommandLine, config: Path, tmp_path: Path) -> None:
    """The nodes are network namespaces, of which the first takes its own name for loopback."""
    probe = subprocess.run([*ISOLATED, "ip", "link", "add", "va", "type", "veth"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    words = ["sft_app", "train", config, "--out", tmp_path / "run", "--cluster.launcher=torchrun", *SHORT]
    script = Path(__file__).with_name("torchrun_hosts.py")
    line = [*ISOLATED, sys.executable, script, tmp_path, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=350)
    said = "\n".join(log.read_text() for log in tmp_path.glob("host-*.log"))
    assert done.returncode == 0, done.stderr + said
    assert json.loads(done.stdout) == [0, 0], said
    assert_same_as_on_one_machine(tmp_path / "run", command, config)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_processes_that_are_no_agent_wait_for_the_end(command: CommandLine, config: Path, tmp_path: Path) -> None:
    """As with `--nproc-per-node 8`, which people type: `engine.num_ranks` says how many ranks train."""
    run = tmp_path / "run"
    with start(config, run, *SHORT, num_processes=2) as nodes:
        assert nodes.wait(300) == [0, 0], nodes.output
    assert_same_as_on_one_machine(run, command, config)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("asked", [0, 1])
def test_a_node_that_is_asked_to_end_lets_the_driver_save_first(config: Path, tmp_path: Path, asked: int) -> None:
    run = tmp_path / "run"
    with start(config, run, *LONG, "--checkpoint.every=0") as nodes:
        wait_updates(nodes, run, 2)
        nodes.agents[asked].terminate()  # torchrun passes it on, and kills after 30 s
        assert all(code != 0 for code in nodes.wait(100)), nodes.output
        assert ("was asked to end (SIGTERM), and so is the run" in nodes.output) == (asked == 1)
        assert "interrupted; resume with: " in nodes.output
        assert not nodes.processes()
    assert latest_checkpoint(run).step == max(values_of(run, "train/loss"))


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_node_that_does_not_come_is_named(config: Path, tmp_path: Path) -> None:
    with start(config, tmp_path / "run", *SHORT, "--cluster.start_timeout_s=20", only=["--help"]) as nodes:
        assert nodes.wait(150)[0] != 0
        assert "rank 1 of 2" in nodes.output
        assert "20 s" in nodes.output
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_node_with_other_options_is_refused(config: Path, tmp_path: Path) -> None:
    with start(config, tmp_path / "run", *SHORT, only=["--engine.weight_decay=0.5"]) as nodes:
        assert all(code != 0 for code in nodes.wait(150)), nodes.output
        assert "has another configuration than rank 0, in [engine]: use the same file and options" in nodes.output
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_job_and_leaves_none_behind(config: Path, tmp_path: Path, killed: int) -> None:
    run = tmp_path / "run"
    with start(config, run, *LONG, "--cluster.max_restarts=0") as nodes:
        wait_updates(nodes, run, 2)
        [pid] = [pid for pid, env in nodes.processes().items() if env.get("RANK") == str(killed)]
        os.kill(pid, signal.SIGKILL)
        assert all(code != 0 for code in nodes.wait(60)), nodes.output
        said = "was lost: the connection to its agent has ended" if killed else "the driver (rank 0) is gone"
        assert said in nodes.output
        wait_until_gone(nodes.processes(), GONE_WITHIN_S)
