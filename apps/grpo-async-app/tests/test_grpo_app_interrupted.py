"""Ctrl-C and SIGTERM end a run in seconds, whatever its processes are doing, and leave a folder that goes on."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_async_app._run.session import run_interruptible
from offbeat_run import read_metrics, read_timeline
from offbeat_testing import RunningCommand, wait_until_gone
from offbeat_types import PeerFailedError

GONE_WITHIN_S = 15.0
"""It takes two or three; politeness towards a trainer in the middle of a long update would take 18."""


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_kills_what_the_first_one_waits_for(number: signal.Signals) -> None:
    heard: list[str] = []
    gone = asyncio.Event()

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            heard.append("asked")
            signal.raise_signal(number)
            async with asyncio.timeout(30):
                await gone.wait()
            heard.append("put away")

    def kill() -> None:
        heard.append("killed")
        gone.set()

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work(), kill)
    assert heard == ["asked", "killed", "put away"]
    assert signal.getsignal(number) == before


def test_what_goes_wrong_without_a_signal_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise PeerFailedError("rollout-0", "no memory left")

    with pytest.raises(PeerFailedError, match="no memory left"):
        run_interruptible(work(), lambda: None)
