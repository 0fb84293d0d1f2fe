"""What is asked of the engines for a sample and each turn of an episode, and what of their answers is kept."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from grpo_async_app._config.resolved import Environment, Judge, Source, resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._run.sampling import EpisodesLostError, Rollouts, _later_turn
from offbeat_core import (
    Completion,
    GenerateRequest,
    RecordedSession,
    Reply,
    SamplingParams,
    Trajectory,
    VersionSegment,
    load_config,
)
from offbeat_data import CompletionText, Prompt, RewardScore, TurnTemplate


def rollouts_on(fleet: object, config: GrpoConfig, template: object = None) -> tuple[Rollouts, Source]:
    """Sampling on what stands in for a fleet, and the only source of the run."""
    run = resolve(config)
    templates = {each: cast("TurnTemplate", template) for each in run.environments}
    return Rollouts(replace(run, templates=templates), cast("Fleet", fleet)), run.sources[0]


def test_what_an_engine_has_aborted_is_neither_scored_nor_trained(config: Path) -> None:
    """Training on it would teach that an answer may break off anywhere."""
    ended, aborted = (
        Completion(
            ids=np.arange(num, dtype=np.int32),
            logprobs=np.zeros(num, np.float32),
            segments=(VersionSegment(version=3, num_tokens=num),) if num else (),
            stop_reason=reason,
            text=reason,
        )
        for num, reason in ((4, "length"), (0, "aborted"))
    )
    scored: list[str] = []

    class Asked:
        async def score(self, _: Prompt, written: list[CompletionText], _judge: Judge) -> list[RewardScore]:
            scored.extend(each.text for each in written)
            return [RewardScore(value=1.0, parts={}) for _ in written]

        @property
        def engines(self) -> "Asked":
            return self

        async def generate(self, *_: object) -> list[Completion]:
            return [ended, aborted]

    rollouts, source = rollouts_on(Asked(), load_config(config, GrpoConfig))
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="")
    request = GenerateRequest(request_id="r", prompt_ids=prompt.ids, num_samples=2, params=SamplingParams(max_tokens=4))
    samples = asyncio.run(rollouts.sample("rollout-0", prompt, request, source.judge, source.environment))
    assert [sample.trajectories[0].stop_reason for sample in samples] == scored == ["length"]
    assert [sample.answer for sample in samples] == scored
    assert rollouts.left_out == {"rollout/aborted": 1}


def test_each_turn_of_an_episode_may_be_as_long_as_the_set_that_asks_says(config: Path) -> None:
    asked: list[int] = []

    class TwoTurns:
        """As much of `Fleet`, of its engines and of an environment as an episode asks; it answers the first turn."""

        @property
        def engines(self) -> "TwoTurns":
            return self

        @property
        def environments(self) -> "dict[Environment, TwoTurns]":
            return {source.environment: self}

        async def generate(self, _name: str, request: GenerateRequest, _: float) -> list[Completion]:
            asked.append(request.params.max_tokens)
            return [Completion.join([5], [-1.0], [(0, 1)], "eos", "x")]

        def episode(self, _: Prompt) -> AbstractAsyncContextManager["TwoTurns"]:
            return nullcontext(self)

        async def step(self, _: str) -> list[dict[str, str]] | None:
            return [{"role": "user", "content": "and now?"}] if len(asked) == 1 else None

        async def finish(self) -> RewardScore:
            return RewardScore(value=1.0, parts={})

        def reply(self, *_: object) -> Reply:
            return Reply(ids=np.array([6], np.int32), text="and now?")

    of_the_run = ["--rollout.max_tokens=8", "--environment.name=own:TwoTurns", "--environment.max_tokens=40"]
    settings, fake = load_config(config, GrpoConfig, of_the_run), TwoTurns()
    rollouts, source = rollouts_on(fake, settings, template=fake)
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="")
    for of_the_set, turns in ((32, [32, 32]), (4, [4, 4]), (80, [40, 38])):
        request = GenerateRequest(request_id="r", prompt_ids=prompt.ids, params=SamplingParams(max_tokens=of_the_set))
        [sample] = asyncio.run(rollouts.sample("rollout-0", prompt, request, source.judge, source.environment))
        assert (asked, sample.num_turns) == (turns, 2)
        asked.clear()


class Posting:
    """As much of the engines and of the agents' process as an episode asks, whose agent posts a reward."""

    def __init__(self, reward: float) -> None:
        self.reward, self.may_post = reward, list[bool]()

    async def call(self, _name: str, method: str, *arguments: Any, **_: Any) -> Any:
        if method == "open_session":
            self.may_post.append(arguments[0].may_post_reward)
            return "http://127.0.0.1", "session-0", "reward-0"
        completion = Completion.join([5], [-1.0], [(0, 1)], "eos", "x")
        return RecordedSession(
            trajectories=(Trajectory.of(completion),),
            answer="x",
            ended_by="reward",
            reward=self.reward,
            reward_parts={},
            num_calls=1,
            num_aborted=0,
        )


@pytest.mark.parametrize(("reward", "is_taken"), [(1e6, True), (1e30, False), (-1e7, False)])
def test_what_an_agent_posts_is_in_range_or_counts_as_failed(config: Path, reward: float, is_taken: bool) -> None:
    words = ["--agent.is_outside=true", "--rollout.serve_port=0", "--reward.name=", "--agent.max_error_share=0.01"]
    posting = Posting(reward)
    fleet = SimpleNamespace(engines=posting, agent=None)
    rollouts, source = rollouts_on(fleet, load_config(config, GrpoConfig, words))
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="")
    request = GenerateRequest(request_id="r", prompt_ids=prompt.ids, num_samples=2, params=SamplingParams(max_tokens=4))
    samples = asyncio.run(rollouts.sample("rollout-0", prompt, request, source.judge, source.environment))
    assert len(samples) == 2 * is_taken
    assert rollouts.left_out == ({} if is_taken else {"reward/dropped": 2})
    if not is_taken:
        with pytest.raises(EpisodesLostError, match=r"3 of the last 3 .* agent.max_error_share = 0.01 .* must be in"):
            asyncio.run(rollouts.sample("rollout-0", prompt, request, source.judge, source.environment))
    assert all(posting.may_post)


@pytest.mark.parametrize(
    ("words", "may_post"),
    [
        (["--reward.name="], True),
        ([], False),
        (["--agent.may_post_reward=true"], True),
        (
            [
                "--reward.name=",
                "--data.path=",
                "--data.eval_size=0",
                "--data.mix.sums.path=arithmetic:4",
                "--data.mix.sums.reward.name=number_match",
            ],
            False,
        ),
    ],
)
def test_an_agent_posts_a_reward_where_no_other_is_configured(config: Path, words: list[str], may_post: bool) -> None:
    settings = ["--agent.is_outside=true", "--rollout.serve_port=0", *words]
    assert load_config(config, GrpoConfig, settings).agents_post_rewards == may_post


def test_each_turn_of_each_sample_has_a_name_and_a_seed_of_its_own_and_sees_all_images_so_far() -> None:
    first, later = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    request = GenerateRequest(
        request_id="group-3",
        prompt_ids=np.array([1, 2], np.int32),
        num_samples=2,
        params=SamplingParams(max_tokens=50, seed=10),
        images=(first,),
    )
    context = np.array([1, 2, 7, 60], np.int32)
    turns = [_later_turn(request, context, (later,), index, turn, 9) for index in (0, 1) for turn in (1, 2)]
    assert len({each.request_id for each in turns} | {request.request_id}) == 5
    assert len({each.params.seed for each in turns} | {10, 11}) == 6, "the first turns draw with 10 and 11"
    for each in turns:
        assert (each.num_samples, each.params.max_tokens) == (1, 9)
        assert [image is shown for image, shown in zip(each.images, (first, later), strict=True)] == [True, True]
        np.testing.assert_array_equal(each.prompt_ids, context)
    unseeded = replace(request, params=SamplingParams(max_tokens=50))
    assert _later_turn(unseeded, context, (), 1, 1, 9).params.seed is None
