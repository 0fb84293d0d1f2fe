"""A run on the nodes of torchrun is the same run: the trainer on one, an engine on the other, no Ray."""

import os
import signal
from pathlib import Path

import pytest
from grpo_runs import latest_checkpoint, trained_prompts, values_of

from offbeat_core import installed_backends
from offbeat_testing import TorchrunNodes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif("torchrun" not in installed_backends("offbeat.launcher"), reason="install offbeat-actors again"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a node of one CPU needs sched_setaffinity"),
]
WORDS = ("--cluster.launcher=torchrun", "--eval.every_updates=0")


def start(config: Path, run: Path, *words: str) -> TorchrunNodes:
    return TorchrunNodes("grpo_async_app", "train", config, "--out", run, *WORDS, *words, logs=run.parent)


def test_trainer_and_engine_on_two_nodes_train_every_prompt_once(config: Path, tmp_path: Path) -> None:
    """Each node has one CPU: weights and samples go over the network."""
    run = tmp_path / "run"
    with start(config, run) as nodes:
        assert nodes.wait(300) == [0, 0], nodes.output
        assert not nodes.processes()
    assert sorted(values_of(run, "train/reward")) == [1, 2, 3, 4, 5]
    assert set(trained_prompts(run).values()) == {1}
    assert len(trained_prompts(run)) == 20


def test_a_lost_node_ends_the_run_by_name_and_torchrun_starts_it_again(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(config, run, "--data.epochs=400", "--checkpoint.every=2") as nodes:
        nodes.wait_until(lambda: len(values_of(run, "train/reward")) >= 4, "4 updates", 300)
        [agent] = [pid for pid, env in nodes.processes().items() if env.get("RANK") == "1"]
        os.kill(agent, signal.SIGKILL)
        assert all(code != 0 for code in nodes.wait(100)), nodes.output
        assert "was lost: the connection to its agent has ended" in nodes.output
        assert not nodes.processes()
    saved = latest_checkpoint(run).step
    words = ("--cluster.launcher=torchrun", f"--engine.max_updates={saved + 2}")
    with TorchrunNodes("grpo_async_app", "resume", run, *words, logs=tmp_path) as nodes:
        assert nodes.wait(300) == [0, 0], nodes.output
    assert sorted(values_of(run, "train/reward")) == list(range(1, saved + 3))
