"""A signal ends a run with the update in progress saved, or in seconds, and leaves a folder that resumes exactly."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import latest_checkpoint, values_of
from role_faults import accounting_complaints, role_pids

from grpo_async_app._run.interruption import Interruption, run_interruptible
from grpo_async_app._run.session import _while_cluster_lives
from offbeat_core import PeerFailedError
from offbeat_run import read_metrics, read_timeline
from offbeat_testing import RunningCommand, wait_until_gone

GONE_WITHIN_S = 15.0
"""It takes two or three; politeness towards a trainer in the middle of a long update would take 18."""


SIGN_OF_LIFE = r"^(starting the roles|update \d+ of \d+|stopping the roles)\b.* (\((\d+ min )?\d+ s\)|\.\.\.)\n"
"""A line of the log where nothing else was printed for 3 s."""


@contextmanager
def generating(config: Path, run: Path) -> Iterator[RunningCommand]:
    """A run whose engine has long answers to write."""
    words = ["--rollout.max_tokens=1900", "--rollout.max_model_len=2040", "--rollout.samples_per_prompt=64"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, "--eval.every_updates=0", *words) as process:
        timeline = run / "timeline.json"
        process.wait_until(lambda: "sync" in {event["name"] for event in read_timeline(timeline)}, "the engine samples")
        yield process


def assert_ended_with_one_line(process: RunningCommand, run: Path, started: list[int]) -> None:
    assert process.wait(GONE_WITHIN_S) == 130
    wait_until_gone(started, GONE_WITHIN_S)
    _, _, said = process.output.partition("engines ...\n")
    said = re.sub(SIGN_OF_LIFE, "", said, flags=re.MULTILINE)
    assert said.strip() == f"interrupted; resume with: grpo-async-app resume {run}"


@pytest.mark.nightly
def test_ctrl_c_while_a_model_generates(forked_main: Callable[[], object], config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with generating(config, run) as process:
        started = process.descendants()
        reapers = [pid for pid in started if "offbeat-reaper" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(reapers) == 3
        assert len(started) - len(reapers) == 3  # trainer, rollout engine, scorer
        process.press_ctrl_c()
        assert_ended_with_one_line(process, run, started)

    words = ["--rollout.max_tokens=8", "--rollout.max_model_len=96", "--rollout.samples_per_prompt=2"]
    with RunningCommand(forked_main, "resume", run, *words) as process:
        assert process.wait() == 0, process.output
    assert sum("train/reward" in line.values for line in read_metrics(run / "metrics.jsonl")) == 5


@pytest.mark.nightly
def test_sigterm_while_the_trainer_does_not_answer(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with generating(config, run) as process:
        started = process.descendants()
        [trainer] = [pid for pid in started if "trainer-0" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(trainer, signal.SIGSTOP)
        process.terminate()
        assert_ended_with_one_line(process, run, started)


Main = Callable[[], object]
WHOLE = ("--checkpoint.every=0", "--eval.every_updates=0", "--data.epochs=20")
"""100 updates, none of which is saved before the end."""


def signals(*first: signal.Signals) -> list[object]:
    """Give the signals that a run takes; the first ones by day, the others at night."""
    others = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} - {*first}
    return [*first, *(pytest.param(each, marks=pytest.mark.nightly) for each in sorted(others))]


@pytest.mark.parametrize("number", signals(signal.SIGTERM))
def test_a_signal_lets_the_update_end_saves_it_and_the_run_goes_on_exactly(
    forked_main: Main, config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, *WHOLE) as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 3, "three updates")
        started = process.descendants()
        os.kill(process.pid, number)
        assert process.wait(60) == 130, process.output
        wait_until_gone(started, GONE_WITHIN_S)
        assert f"{number.name}: " in process.output
        assert "for at most 25 s; " in process.output
        assert process.output.rstrip().endswith(f"interrupted; resume with: grpo-async-app resume {run}")
    saved = latest_checkpoint(run).step
    assert saved == max(values_of(run, "train/reward")) >= 3
    end = f"--engine.max_updates={saved + 2}"
    with RunningCommand(forked_main, "resume", run, "--data.epochs=20", end) as process:
        assert process.wait() == 0, process.output
    assert list(values_of(run, "train/reward")) == list(range(1, saved + 3))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_signals_at_any_moment_lose_no_update_and_train_none_twice(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    """While it starts, validates, saves, trains and ends: every few seconds, until the run has come to its end."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw, run = random.Random(seed), tmp_path / "run"
    words: list[object] = ["train", config, "--out", run, "--data.epochs=24", "--checkpoint.every=7"]
    for _ in range(12):
        with RunningCommand(forked_main, *words) as process:
            process.wait_until(lambda: "run folder" in process.output, "the start")
            time.sleep(draw.uniform(0, 8))
            os.kill(process.pid, draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]))
            code = process.wait(60)
            assert code in (0, 130), process.output
            assert "Traceback" not in process.output
            done = max(values_of(run, "train/reward"), default=0)
            assert (latest_checkpoint(run).step if done else 0) == done, process.output
        if code == 0:
            break
        words = ["resume", run] if run.exists() else words  # one that had not begun has left no folder
    with RunningCommand(forked_main, *words) as process:
        assert process.wait() == 0, process.output
    assert accounting_complaints(run, 20, 24, per_update=4) == []


@pytest.mark.parametrize("number", signals(signal.SIGHUP))
def test_a_signal_while_a_run_starts_ends_it_and_leaves_no_folder(
    forked_main: Main, config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run) as process:
        process.wait_until(lambda: "engines ..." in process.output, "the start of the roles")
        os.kill(process.pid, number)
        assert process.wait(30) == 130, process.output
        assert "interrupted" in process.output
        assert "Traceback" not in process.output
    assert not run.exists()


@pytest.mark.nightly
def test_what_does_not_end_in_time_is_cut_off(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, *WHOLE, "--checkpoint.on_signal_s=2") as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 2, "two updates")
        os.kill(role_pids(process)["trainer-0"], signal.SIGSTOP)
        started_s = time.monotonic()
        process.terminate()
        assert process.wait(30) == 130, process.output
        assert time.monotonic() - started_s >= 2
        assert "2 s (checkpoint.on_signal_s) are over: not saved, it is trained again" in process.output
        assert process.output.rstrip().endswith(f"resume {run}")
        assert not list((run / "checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_a_second_signal_ends_at_once(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, *WHOLE) as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 2, "two updates")
        os.kill(role_pids(process)["trainer-0"], signal.SIGSTOP)
        process.press_ctrl_c()
        process.wait_until(lambda: "Ctrl-C again to stop at once" in process.output, "the line")
        process.press_ctrl_c()
        assert process.wait(GONE_WITHIN_S) == 130, process.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_second_signal_kills_what_the_first_one_waits_for(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("offbeat_run._command.signals._REPEAT_S", 0.0)
    steps: list[str] = []
    gone = asyncio.Event()

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            steps.append("asked")
            signal.raise_signal(number)
            async with asyncio.timeout(30):
                await gone.wait()
            steps.append("put away")

    def kill() -> None:
        steps.append("killed")
        gone.set()

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work(), kill)
    assert steps == ["asked", "killed", "put away"]
    assert signal.getsignal(number) == before


def test_an_update_that_does_not_end_in_time_is_cut_off() -> None:
    lines: list[str] = []
    interruption = Interruption(within_s=0.2, notify=lines.append)

    async def work() -> None:
        with interruption.finishing(lambda: "finishing update 3"):
            signal.raise_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work(), lambda: None, interruption)
    first, last = lines
    assert first.startswith("SIGTERM: finishing update 3, for at most 0.2 s")
    assert last.startswith("0.2 s (checkpoint.on_signal_s) are over")


def test_what_goes_wrong_without_a_signal_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise PeerFailedError("rollout-0", "no memory left")

    with pytest.raises(PeerFailedError, match="no memory left"):
        run_interruptible(work(), lambda: None)


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_what_a_run_saves_while_its_cluster_is_lost_is_not_cut_off(*, is_asked_before: bool) -> None:
    loss, saved = PeerFailedError("the head", "it has answered nothing"), []

    async def scenario() -> None:
        interruption, is_lost = Interruption(within_s=60.0), asyncio.Event()

        class Cluster:
            async def cluster_loss(self) -> PeerFailedError:
                await is_lost.wait()
                return loss

        async def train() -> Any:
            with interruption.finishing(lambda: "the update is finished"):
                if is_asked_before:
                    assert interruption.ask("SIGTERM", lambda: None)
                is_lost.set()
                await interruption.asked.wait()
                for _ in range(20):  # turns of the loop, in which all other tasks see it
                    await asyncio.sleep(0)
                saved.append("the update")
            raise asyncio.CancelledError

        cluster: Any = Cluster()
        await _while_cluster_lives(train(), cluster, interruption)

    with pytest.raises(PeerFailedError, match="it has answered nothing"):
        asyncio.run(scenario())
    assert saved == ["the update"]
