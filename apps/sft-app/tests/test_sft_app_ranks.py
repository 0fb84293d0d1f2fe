"""Ranks that train together: the same run as with one process, interrupted, killed, started again and resumed."""

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from role_faults import signal_role
from sft_runs import RANKS, WORDS, assert_same, latest_checkpoint, values_of

from offbeat_actors import Notify
from offbeat_core import LossFunction, Metrics, OffbeatError, PeerFailedError, TrainSequence, load_config
from offbeat_run import RunFolder
from offbeat_testing import CommandLine, RunningCommand, forked_main, wait_until_gone
from sft_app import _cli
from sft_app._config import SftConfig
from sft_app._preflight import check_run
from sft_app._ranks import RanksEngine
from sft_app._train import train


@pytest.mark.nightly
def test_two_ranks_train_as_one_and_end_on_ctrl_c(command: CommandLine, config: Path, tmp_path: Path) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*WORDS, "--data.epochs=400", "--checkpoint.every=0", "--eval.every_updates=1"]
    with RunningCommand(_cli.main, "train", config, "--out", run, *words, *RANKS) as process:
        process.wait_until(lambda: len(values_of(run, "train/loss")) >= 8, "eight updates")
        ranks = process.descendants()
        process.press_ctrl_c()
        assert process.wait() == 130, process.output
        assert f"resume {run}" in process.output
        wait_until_gone(ranks, deadline_s=30)
    done = latest_checkpoint(run).step
    assert done == max(values_of(run, "train/loss"))
    ended = command("train", config, "--out", undisturbed, *words, f"--engine.max_updates={done}")
    assert ended.code == 0, ended.err
    assert_same(run, undisturbed)


def test_a_rank_that_is_killed_is_started_again_and_nothing_is_lost(config: Path, tmp_path: Path) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    main, words = forked_main("sft_app", "offbeat_engine_torch"), [*WORDS, "--data.epochs=15", "--checkpoint.every=3"]
    with RunningCommand(main, "train", config, "--out", run, *words, *RANKS) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint")
        signal_role(process, "trainer-1", signal.SIGKILL)
        assert process.wait() == 0, process.output
        assert "trainer: trainer-1 failed: its process was killed by SIGKILL" in process.output
        assert "the run continues from update" in process.output
    assert set(values_of(run, "trainer/restarts").values()) == {1}
    with RunningCommand(main, "train", config, "--out", undisturbed, *words) as process:
        assert process.wait() == 0, process.output
    assert_same(run, undisturbed)


class DyingRanks(RanksEngine):
    """A run of ranks, one of which dies in the first update, just after the user has asked the run to end."""

    def __init__(self) -> None:
        """Start none."""

    def traced(self, number: int) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        signal.raise_signal(signal.SIGINT)
        raise PeerFailedError("trainer-1", "its process was killed by SIGKILL")

    def death(self, error: OffbeatError) -> PeerFailedError | None:
        assert isinstance(error, PeerFailedError)
        return error

    def restart(self, death: PeerFailedError, notify: Notify) -> None:
        raise AssertionError("the ranks were started again")


def test_ranks_that_die_after_the_user_asked_to_end_stay_dead(config: Path, tmp_path: Path) -> None:
    preflight = check_run(load_config(config, SftConfig, ["--eval.every_updates=0"]))
    with RunFolder.create(tmp_path / "run") as run, pytest.raises(PeerFailedError, match="killed by SIGKILL"):
        train(preflight, run, DyingRanks())


@pytest.mark.nightly
def test_a_run_that_was_asked_to_end_starts_no_rank_again(config: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", [*WORDS, *RANKS, "--data.epochs=3000", "--checkpoint.every=3"]
    with RunningCommand(_cli.main, "train", config, "--out", run, *words) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint")
        signal_role(process, "trainer-1", signal.SIGSTOP)  # no update comes to its end
        process.press_ctrl_c()
        process.wait_until(lambda: "the update in hand is finished and saved" in process.output, "the notice")
        signal_role(process, "trainer-1", signal.SIGKILL)
        assert process.wait(60) == 3, process.output
        assert "trainer-1 failed: its process was killed by SIGKILL" in process.output
        assert f"resume {run}" in process.output


@pytest.mark.nightly
def test_a_rank_that_says_nothing_is_named_and_started_again(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, *RANKS, "--data.epochs=15", "--checkpoint.every=3", "--cluster.silent_after_s=5"]
    with RunningCommand(_cli.main, "train", config, "--out", run, *words) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint")
        signal_role(process, "trainer-1", signal.SIGSTOP)
        assert process.wait() == 0, process.output
        assert "trainer-1 failed: it answered nothing for 5 s (cluster.silent_after_s)" in process.output
    assert list(values_of(run, "train/loss")) == list(range(1, 39))


@pytest.mark.nightly
def test_a_rank_that_may_not_be_started_again_ends_the_run_and_one_rank_goes_on(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*WORDS, "--data.epochs=3000", "--checkpoint.every=3"]  # longer than it may live
    once = "--cluster.max_restarts=0"
    with RunningCommand(_cli.main, "train", config, "--out", run, *words, *RANKS, once) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint")
        signal_role(process, "trainer-1", signal.SIGKILL)
        assert process.wait(30) == 3, process.output
        assert "trainer-1 failed: its process was killed by SIGKILL" in process.output
        assert f"resume {run}" in process.output
        assert process.descendants() == []
    until = f"--engine.max_updates={latest_checkpoint(run).step + 2}"
    ended = command("resume", run, "--engine.num_ranks=1", until)
    assert ended.code == 0, ended.err
    assert command("train", config, "--out", undisturbed, *words, until).code == 0
    assert_same(run, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel"])
def test_two_ranks_that_share_layers_or_tokens_train_as_one(
    command: CommandLine, config: Path, tmp_path: Path, axis: str
) -> None:
    words = ["train", config, *WORDS, "--engine.max_updates=3", "--eval.every_updates=1"]
    shared = [*RANKS, "--engine.options", f"{{{axis} = 2}}"]
    with RunningCommand(_cli.main, *words, "--out", tmp_path / "run", *shared) as process:
        assert process.wait() == 0, process.output
    ended = command(*words, "--out", tmp_path / "undisturbed")
    assert ended.code == 0, ended.err
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


def test_the_plan_shows_the_ranks(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, "--engine.num_ranks=2")
    assert ended.code == 0, ended.err
    assert "2 that train together as dp 2" in " ".join(ended.out.split())
    assert "a rank: weights" in " ".join(ended.out.split())


@pytest.mark.nightly
def test_the_ranks_that_are_named_are_traced(command: CommandLine, config: Path, tmp_path: Path) -> None:
    words = ["--profile.steps=1:3", "--eval.every_updates=0", "--engine.max_updates=4"]
    ended = command("train", config, "--out", tmp_path / "all", *WORDS, *RANKS, *words)
    assert ended.code == 0, ended.err
    traces = {f"trainer-{rank}-{step}.json" for rank in (0, 1) for step in (1, 2)}
    assert {path.name for path in (tmp_path / "all" / "profile").iterdir()} == traces
    ended = command(
        "train", config, "--out", tmp_path / "none", *WORDS, *RANKS, *words, '--profile.roles=["trainer-2"]'
    )
    assert ended.code == 2
    assert "no role 'trainer-2' to trace in this run; it has trainer-0, trainer-1" in ended.err
