"""A run that is killed or interrupted continues as if nothing had happened."""

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from sft_runs import latest_checkpoint, values_of

from offbeat_testing import CommandLine, RunningCommand
from sft_app._train import deferred_interrupts

LONG = ["--data.epochs=12", "--eval.every_updates=10"]  # 30 updates


def assert_same_end(run: Path, undisturbed: Path) -> None:
    """Every update once, with the same batch, to the same weights."""
    for metric in ("train/loss", "eval/loss"):
        assert list(values_of(run, metric).items()) == [
            (step, pytest.approx(loss, abs=1e-6)) for step, loss in values_of(undisturbed, metric).items()
        ]
    one, other = latest_checkpoint(run), latest_checkpoint(undisturbed)
    assert one.step == other.step
    got, expected = load_file(one.path / "model.safetensors"), load_file(other.path / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert abs(got[name] - array).max() <= 1e-6, name


def test_a_run_killed_at_a_random_moment_resumes_to_the_same_weights(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw, run, undisturbed = random.Random(seed), tmp_path / "run", tmp_path / "undisturbed"
    num_updates, words = draw.randrange(25), [*LONG, "--checkpoint.every=3"]
    with RunningCommand("sft_app", "train", config, "--out", run, *words) as process:
        process.wait_until(run.joinpath("config.toml").exists, "there is a run")
        process.wait_until(lambda: len(values_of(run, "train/loss")) >= num_updates, f"{num_updates} updates")
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
    assert command("train", config, "--out", undisturbed, *words).code == 0
    ended = command("resume", run)
    assert ended.code == 0, ended.err
    assert_same_end(run, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_terminated_it_saves_the_update_in_hand_and_says_how_to_resume(
    command: CommandLine, config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    words = ["--data.epochs=400", "--checkpoint.every=0", "--profile.steps=0:1000"]
    with RunningCommand("sft_app", "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(values_of(run, "train/loss")) >= 2, "two updates")
        os.kill(process.pid, number)
        assert process.wait() == 130, process.output
        assert f"resume {run}" in process.output
    saved = latest_checkpoint(run)
    assert saved.step == max(values_of(run, "train/loss"))
    assert len(list((run / "profile").glob("trainer-0-*.json"))) == saved.step  # what was traced so far
    ended = command("resume", run, f"--engine.max_updates={saved.step + 2}", "--profile.steps=")
    assert ended.code == 0, ended.err
    assert list(values_of(run, "train/loss")) == list(range(1, saved.step + 3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_waits_and_the_second_does_not(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("offbeat_run._command.signals._REPEAT_S", 0.0)
    before = signal.getsignal(number)
    with deferred_interrupts(60.0) as is_asked_to_end:
        assert not is_asked_to_end()
        signal.raise_signal(number)
        assert is_asked_to_end()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_what_does_not_end_in_time_is_cut_off_wherever_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    before_s = time.monotonic()
    with deferred_interrupts(0.5) as is_asked_to_end:
        signal.raise_signal(signal.SIGTERM)
        assert is_asked_to_end()
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(60)  # as for ranks
    assert 0.5 <= time.monotonic() - before_s < 30
    output = capfd.readouterr().err
    assert "SIGTERM: the update in hand is finished and saved, within 0.5 s; once more to end at once" in output
    assert "0.5 s (checkpoint.on_signal_s) are over: not saved, it is trained again" in output


def test_without_time_for_it_the_first_signal_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(0.0):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_a_run_in_two_parts_ends_as_one_in_one(
    command: CommandLine, config: Path, tmp_path: Path, lora_rank: int
) -> None:
    """The first part ends inside an epoch; the learning rate does not depend on where the run ends."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = ["--engine.schedule=constant", "--eval.every_updates=0", f"--engine.lora_rank={lora_rank}"]
    assert command("train", config, "--out", undisturbed, *words).code == 0
    assert command("train", config, "--out", run, *words, "--engine.max_updates=4").code == 0
    ended = command("resume", run, "--engine.max_updates=0")
    assert ended.code == 0, ended.err
    assert_same_end(run, undisturbed)


def test_a_run_without_a_checkpoint_begins_anew_and_one_whose_only_one_is_damaged_does_not(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    for folder in (run, undisturbed):
        assert command("train", config, "--out", folder, "--checkpoint.every=0").code == 0
    (run / "checkpoints" / "step-000008" / "model.safetensors").unlink()
    ended = command("resume", run)
    assert ended.code == 2
    assert "is damaged: step-000008 (model.safetensors is missing); bring one of them back" in ended.err
    shutil.rmtree(run / "checkpoints" / "step-000008")  # as a kill before it was written leaves the folder
    ended = command("resume", run)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0] == "no whole checkpoint: begins anew"
    assert_same_end(run, undisturbed)


def test_a_finished_run_resumes_to_nothing(command: CommandLine, config: Path, tmp_path: Path) -> None:
    assert command("train", config, "--out", tmp_path / "run").code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ended = command("resume", tmp_path / "run")
    assert ended.code == 0
    left = "nothing is left to train: 8 of 8 updates are done; to continue, raise engine.max_updates or data"
    assert left in ended.out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_with_more_epochs_serves_every_sequence(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    """Its last batch had four sequences of eight: the next four of the order belong to the next epoch."""
    run = tmp_path / "run"
    assert command("train", config, "--out", run, "--eval.every_updates=0").code == 0
    ended = command("resume", run, "--data.epochs=6")
    assert ended.code == 0, ended.err
    assert list(values_of(run, "data/epoch").values()) == pytest.approx(
        [min(8 * n, 60) / 20 for n in range(1, 9)] + [min(60 + 8 * n, 120) / 20 for n in range(1, 9)]
    )


def test_other_batches_another_order_or_no_optimizer_cannot_be_resumed(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert command("train", config, "--out", run, "--engine.max_updates=2").code == 0
    for words, said in (
        (["--engine.batch_size=4"], "batch_size = 8"),
        (["--data.num_items=20"], "num_sequences = 20"),
        (["--data.seed=5"], "data_seed = 0"),
        (["--data.shuffle=false"], "shuffle = True"),
        (["--checkpoint.save_optimizer=false"], "save_optimizer"),
    ):
        ended = command("resume", run, *words)
        assert (ended.code, said in ended.err) == (2, True), ended.err
