"""A trainer of two ranks: the same run as with one, and an end with a name when a rank dies."""

import signal
from pathlib import Path

import pytest
import torch
from grpo_runs import Main, latest_checkpoint, trained_prompts, values_of
from role_faults import signal_role
from safetensors.torch import load_file

from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

# On policy and greedy enough to be the same run each time: the groups of an update are those of its prompts.
SYNCHRONOUS = ("--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.seed=7")


@pytest.mark.parametrize("num_passes", [1, 2])
def test_two_ranks_train_as_one_process_does(forked_main: Main, config: Path, tmp_path: Path, num_passes: int) -> None:
    for num_ranks in (1, 2):
        words = [*SYNCHRONOUS, f"--engine.num_ranks={num_ranks}", "--algorithm.kl_coefficient=0.1"]
        words += [f"--algorithm.num_passes={num_passes}"]
        with RunningCommand(forked_main, "train", config, "--out", tmp_path / str(num_ranks), *words) as process:
            assert process.wait() == 0, process.output
    one, two = (load_file(latest_checkpoint(tmp_path / n).path / "model.safetensors") for n in ("1", "2"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert set(trained_prompts(tmp_path / "2").values()) == {1}


@pytest.mark.nightly
def test_a_rank_that_may_not_be_started_again_ends_the_run_by_name_and_it_resumes_with_one(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", config, "--out", run, "--engine.num_ranks=2", "--checkpoint.every=1", "--eval.every_updates=0"]
    with RunningCommand(forked_main, *words, "--data.epochs=4", "--cluster.max_restarts=0") as process:
        process.wait_until(lambda: bool(values_of(run, "train/reward")), "an update")
        signal_role(process, "trainer-1", signal.SIGKILL)
        started = process.descendants()
        assert process.wait() == 3, process.output
        assert "trainer-1" in process.output, process.output
    wait_until_gone(started, deadline_s=20)
    with RunningCommand(forked_main, "resume", run, "--engine.num_ranks=1") as process:
        assert process.wait() == 0, process.output
    assert set(trained_prompts(run).values()) == {4}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--engine.num_ranks=2", "--engine.device=cpu:0"], "name the kind alone (cpu)"),
        (["--engine.num_ranks=0"], "engine.num_ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused(command: CommandLine, config: Path, words: list[str], text: str) -> None:
    ended = command("plan", config, *words)
    assert ended.code == 2
    assert text in ended.err


def test_the_plan_shows_the_ranks(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, "--engine.num_ranks=2")
    assert "2 x trainer" in ended.out
