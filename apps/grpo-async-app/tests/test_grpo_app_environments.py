"""Runs in which an environment answers the model: turns, what is learned of them, and environments that break."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
from grpo_runs import Main, latest_checkpoint, run_to_its_end, statistics_of, trained_prompts, values_of

from grpo_async_app._commands import quickstart
from grpo_async_app._commands.quickstart import LESSONS, answered, calculated
from grpo_async_app._fleet import environments as environment_process
from offbeat_data import EpisodeHost, Prompt, RewardScore
from offbeat_run import RunFolder, read_generations
from offbeat_testing import CommandLine, RunningCommand, drop_digests, wait_until_gone

NUM_TRAIN = 20

ENVIRONMENTS = '''
import asyncio
import signal

from offbeat_data import RewardScore


class TwoTurns:
    """Answers once, whatever is said; longer answers score higher."""

    def __init__(self, words="and now?", broken=()):
        self.words, self.broken, self.num_turns, self.length = words, set(broken), 0, 0

    async def reset(self, prompt):
        self.index = prompt.index

    async def step(self, text):
        self.num_turns += 1
        self.length += len(text)
        kind = self.index % 5 if self.broken else -1
        if kind == 0 and "raises" in self.broken:
            raise ValueError("no bread today")
        if kind == 1 and "waits" in self.broken:
            await asyncio.sleep(600)
        if kind == 2 and "blocks" in self.broken:
            while True:
                pass
        if kind == 3 and "deaf" in self.broken:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            while True:
                pass
        if kind == 0 and "pictures" in self.broken:
            return [{"role": "tool", "content": [{"type": "image", "image": b""}]}]
        return [{"role": "tool", "content": self.words}] if self.num_turns == 1 else None

    async def reward(self):
        if self.index % 5 == 4 and "nan" in self.broken:
            return RewardScore(value=float("nan"), parts={})
        return RewardScore(value=float(self.length), parts={"length": float(self.length), "turns": self.num_turns})

    async def close(self):
        pass


class Unjudged(TwoTurns):
    async def reward(self):
        return None
'''


@pytest.fixture
def environments(own_module: Callable[[str, str], None]) -> str:
    """Name of a module of a user's own."""
    own_module("own_environments", ENVIRONMENTS)
    return "own_environments"


def settings(name: str, **options: object) -> list[str]:
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    return [
        f"--environment.name={name}",
        f"--environment.options={{{given}}}",
        "--environment.max_tokens=96",
        f"--rollout.stop={json.dumps(list(ascii_letters))}",  # a model with random weights seldom ends a turn itself
        "--rollout.max_tokens=16",
        "--rollout.max_model_len=192",
        "--reward.name=",
    ]


def train_and_kill(main: Main, *words: object, run: Path) -> None:
    """A run that is killed, driver and all, after some updates."""
    with RunningCommand(main, "train", *words, "--out", run) as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 2, "updates")
        started = process.descendants()
        process.kill()
        process.wait()
    wait_until_gone(started, 20)  # forks hold the lock of the run folder, which processes of their own do not


def test_a_trainer_scores_every_turn_in_the_context_it_was_sampled_in(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    on_policy = ["--async.staleness_threshold=0", "--async.partial_rollout=false", "--algorithm.correction_form=bypass"]
    run_to_its_end(forked_main, "train", config, "--out", run, *settings(f"{environments}:TwoTurns"), *on_policy)
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    # The ratio is of the trainer's probability of a token to the engine's: any other context would show here.
    assert values_of(run, "train/ratio_max")
    assert max(values_of(run, "train/ratio_max").values()) < 1.001
    assert min(values_of(run, "train/turns").values()) > 1
    assert values_of(run, "eval/turns")
    assert all(value > 0 for value in values_of(run, "reward/length").values())
    said = [each.completion for each in read_generations(RunFolder.open(run, write=False), "train")]
    assert any("[tool] and now?" in text for text in said)


@pytest.mark.nightly
def test_turns_go_on_across_weight_syncs_and_a_resume(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    words = settings(f"{environments}:TwoTurns")
    two = ["--rollout.num_engines=2", "--async.staleness_threshold=1", "--data.epochs=3", "--checkpoint.every=1"]
    train_and_kill(forked_main, config, *words, *two, run=run)
    run_to_its_end(forked_main, "resume", run)
    assert set(trained_prompts(run).values()) == {3}
    assert max(values_of(run, "train/lag_max").values()) >= 1.0


@pytest.mark.nightly
def test_environments_that_break_end_their_episodes_and_are_counted(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    words = settings(f"{environments}:TwoTurns", broken=["raises", "waits", "blocks", "nan"])
    limit = ["--environment.step_timeout_s=0.5", "--eval.every_updates=0", "--checkpoint.every=1"]
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words, *limit)
    assert "samples left out: 2 environment/" in output
    assert "ValueError: no bread today" in (run / "logs" / "environment-0.log").read_text()
    statistics = statistics_of(run)
    assert statistics["filtered"] == 16  # all prompts but the fourth of each five
    assert statistics["trained"] == 4
    assert max(values_of(run, "environment/raised").values()) >= 2
    assert max(values_of(run, "environment/timed_out").values()) >= 2
    assert max(values_of(run, "environment/not_finite").values()) >= 2
    assert not values_of(run, "environment/lost")


def test_an_environment_that_says_what_is_no_text_ends_its_episode_only(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    words = settings(f"{environments}:TwoTurns", broken=["pictures"])
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words, "--eval.every_updates=0")
    assert "an environment may say texts only" in " ".join(output.split())
    assert sum(trained_prompts(run).values()) == 16
    assert max(values_of(run, "environment/unreadable").values()) >= 2


@pytest.mark.nightly
def test_a_checkpoint_that_a_reward_has_poisoned_is_resumed(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    """Runs of earlier versions kept groups with a reward of NaN: every resume died of them."""
    run = tmp_path / "run"
    words = settings(f"{environments}:TwoTurns")
    ahead = ["--async.staleness_threshold=2", "--checkpoint.every=1", "--eval.every_updates=0", "--data.epochs=2"]
    train_and_kill(forked_main, config, *words, *ahead, run=run)
    latest = latest_checkpoint(run)
    buffer = latest.path / "loop" / "buffer.json"
    groups = json.loads(buffer.read_text())
    assert groups, "the engines should have been ahead of the trainer"
    groups[0]["rewards"][0] = float("nan")
    buffer.write_text(json.dumps(groups))
    drop_digests(latest.path)
    run_to_its_end(forked_main, "resume", run)
    times = trained_prompts(run)
    assert sum(times.values()) == 2 * NUM_TRAIN - 1


@pytest.mark.nightly
def test_a_process_that_nothing_breaks_into_is_replaced(
    forked_main: Main, config: Path, tmp_path: Path, environments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "GRACE_S", 1.0)
    run = tmp_path / "run"
    words = settings(f"{environments}:TwoTurns", broken=["deaf"])
    limit = ["--environment.step_timeout_s=0.5", "--eval.every_updates=0", "--checkpoint.every=1"]
    run_to_its_end(forked_main, "train", config, "--out", run, *words, *limit)
    statistics = statistics_of(run)
    assert statistics["trained"] + statistics["filtered"] == NUM_TRAIN
    assert statistics["filtered"] >= 4  # the groups of prompts 3, 8, 13, 18, and what was in the process with them
    assert statistics["trained"] >= 4
    assert max(values_of(run, "environment/timed_out").values()) >= 1


@pytest.mark.nightly
def test_ctrl_c_does_not_wait_for_environments(config: Path, tmp_path: Path, environments: str) -> None:
    run = tmp_path / "run"
    words = [*settings(f"{environments}:TwoTurns", broken=["waits"]), "--environment.step_timeout_s=600"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, *words, "--eval.every_updates=0") as process:
        process.wait_until(lambda: bool(values_of(run, "train/reward")), "an update")
        started = process.descendants()
        assert any("environment-0" in command_of(pid) for pid in started)
        process.press_ctrl_c()
        assert process.wait(15) == 130
        wait_until_gone(started, 15)
        assert "interrupted; resume with" in process.output


@pytest.mark.nightly
def test_an_environment_process_that_is_killed_is_started_again(
    config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    words = [*settings(f"{environments}:TwoTurns"), "--data.epochs=4", "--eval.every_updates=0"]
    with RunningCommand("grpo_async_app", "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: bool(values_of(run, "train/reward")), "an update")
        os.kill(next(pid for pid in process.descendants() if "environment-0" in command_of(pid)), signal.SIGKILL)
        assert process.wait() == 0, process.output
    counts = trained_prompts(run)
    assert sum(counts.values()) >= 4 * NUM_TRAIN - 20  # what was in flight may be lost, nothing else
    assert max(counts.values()) <= 4


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.nightly
def test_an_episode_that_nobody_judges_ends_the_run_in_words(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    words = settings(f"{environments}:Unjudged")
    with RunningCommand(forked_main, "train", config, "--out", tmp_path / "run", *words) as process:
        assert process.wait() == 2
        assert "give reward.name, or return a RewardScore from the environment" in process.output


def test_the_reward_section_judges_the_last_turn(
    forked_main: Main, config: Path, tmp_path: Path, environments: str
) -> None:
    run = tmp_path / "run"
    words = [*settings(f"{environments}:Unjudged")[:-1], "--data.epochs=1", "--eval.every_updates=0"]
    run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--environment.name=calculater", "--reward.name="], "perhaps calculator"),
        (["--environment.max_turns=3"], "no effect without environment.name"),
        (["--environment.name=calculator", "--reward.name="], "leaves the last turn"),
        (["--environment.name=verifiers"], "judges by itself"),
        (
            ["--environment.name=verifiers", "--reward.name=", "--environment.max_tokens=16"],
            'pip install "verifiers>=0.3,<0.3.2"',
        ),
        (
            ["--environment.name=reasoning_gym", "--reward.name=", "--environment.max_tokens=16"],
            'needs data.path = "reasoning-gym:NAME"',
        ),
        (["--environment.name=calculator"], "environment.max_tokens"),
        (["--environment.name=nowhere:Env", "--environment.max_tokens=16"], "importing nowhere failed"),
        (
            ["--environment.name=calculator", "--environment.max_tokens=16", "--environment.options={colour = 1}"],
            "calculator refuses",
        ),
        (["--lesson=calculator"], "plan takes no --lesson"),
    ],
)
def test_settings_that_cannot_be_are_refused(command: CommandLine, config: Path, words: list[str], text: str) -> None:
    ended = command("plan", config, *words)
    assert ended.code == 2
    assert text in ended.err


def test_the_environment_of_the_readme_plays() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(readme.split("```python\n")[1].split("```")[0], names)

    async def episode() -> tuple[list[Any], RewardScore | None]:
        host = EpisodeHost(names["Guess"], 5.0)
        await host.reset(0, Prompt(index=0, ids=np.array([1], np.int32), text="?", answer="7"))
        return [await host.step(0, text) for text in ("3", " 7 ")], await host.reward(0)

    answers, score = asyncio.run(episode())
    assert answers == [[{"role": "user", "content": "no, try again"}], None]
    assert score == RewardScore(value=0.5, parts={"tries": 2.0})


def test_a_lesson_that_is_not_there_names_the_nearest(command: CommandLine, tmp_path: Path) -> None:
    ended = command("quickstart", "--lesson", "calculater", "--out", tmp_path / "run")
    assert ended.code == 2
    assert "did you mean calculator?" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_the_calculator_lesson_calls_its_tool_from_end_to_end(
    forked_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    # Shown calls in every other problem, it soon begins to call, and has yet to learn to copy.
    often = replace(LESSONS["calculator"], transcripts=(calculated, answered))
    monkeypatch.setitem(LESSONS, "calculator", often)
    monkeypatch.setattr(quickstart, "WARMUP_MAX_STEPS", 50)
    monkeypatch.setattr(quickstart, "WARMUP_BATCH", 32)
    words = [
        "--engine.max_updates=2",
        "--engine.warmup_steps=0",
        "--async.mini_batch_size=4",
        "--data.num_items=400",
        "--data.eval_size=8",
    ]
    more = ["--algorithm.filter_groups=false", "--eval.every_updates=1", "--reward.name=number_match"]
    run_to_its_end(forked_main, "quickstart", "--lesson", "calculator", "--out", run, *words, *more)
    assert len(values_of(run, "train/reward")) == 2
    assert max(values_of(run, "train/turns").values()) > 1
    assert max(values_of(run, "train/read_tokens").values()) > 0
