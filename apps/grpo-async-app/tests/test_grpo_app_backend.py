"""What the driver does between two steps, in process: validations, and the greedy sample of a group."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.sources import TrainingSource, source_settings
from grpo_async_app._config.validation_sets import held_out_set
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._run.backend import GrpoBackend
from grpo_async_app._run.ending import EarlyEnd
from grpo_async_app._run.prompt_stream import PromptStream
from grpo_async_app._run.sampling import Scored
from grpo_async_app._run.validation import Validation
from offbeat_async_policy import AsyncPolicy
from offbeat_data import Prompt, RewardScore, RowCounts
from offbeat_run import load_config, summarize
from offbeat_types import Completion, GenerateRequest, RunFolderError, Trajectory, VersionSegment


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def settings(config: Path, *changes: str) -> GrpoConfig:
    return load_config(config, GrpoConfig, ["--rollout.num_engines=2", *changes])


class Notes:
    """Takes what a backend writes down: the seam of `RunLogger`, and of the checkpoints in a `RunFolder`."""

    def __init__(self) -> None:
        self.checkpoints = self

    def worked(self, *_: Any) -> None:
        pass

    def left_out(self, *_: Any) -> None:
        pass

    def set_score(self, version: int, reward: float) -> None:
        raise RunFolderError("no space left on the device")


def open_backend(config: GrpoConfig, fleet: Fleet) -> GrpoBackend:
    notes: Any = Notes()
    policy = AsyncPolicy(config.async_, 8)
    prompt = Prompt(index=0, text="1", ids=(1,), answer="1")
    [of_data] = source_settings(config)
    stream = PromptStream(config, [TrainingSource(settings=of_data, prompts=(prompt,), counts=RowCounts())], {})
    sets = [held_out_set(config, [prompt])]
    return GrpoBackend(
        config,
        fleet,
        policy,
        stream=stream,
        sets=sets,
        run=notes,
        logger=notes,
        templates={},
        early_end=EarlyEnd(config),
    )


def test_a_validation_that_needs_the_trainer_ends_before_colocated_engines_sleep(
    config: Path, model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        fleet = Fleet(settings(config, "--cluster.colocate=true"), str(model), tmp_path)
        backend, validated = open_backend(settings(config), fleet), list[int]()

        async def waits_for_an_engine_that_gets_weights() -> None:
            async with backend._trainer_turn:
                validated.append(1)

        for action in ("update", "sync", "checkpoint"):
            backend._validating = asyncio.create_task(waits_for_an_engine_that_gets_weights())
            await backend.prepare(action)  # type: ignore[arg-type]
        assert validated == [1, 1, 1]

    run(scenario)


def test_a_validation_that_cannot_be_written_down_ends_the_run(
    config: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answered(*_: Any) -> Validation:
        return Validation(version=1, answered=[], items={}, summaries=[summarize("held-out", 1, [], 1)])

    async def scenario() -> None:
        backend = open_backend(settings(config), Fleet(settings(config), str(model), tmp_path))
        backend._validating = asyncio.create_task(backend._validate(1))
        with pytest.raises(RunFolderError, match="no space left"):
            await backend.finish()

    monkeypatch.setattr("grpo_async_app._run.backend.validate", answered)
    run(scenario)


def test_the_greedy_sample_ends_and_is_worth_as_the_others_do(config: Path, model: Path, tmp_path: Path) -> None:
    """ReMax subtracts it: what is taken off for length, and where a sample stops, must be the same."""
    words = ['--rollout.stop=["x"]', "--algorithm.advantage=remax", "--algorithm.overlong_buffer_tokens=4"]
    chosen = load_config(config, GrpoConfig, words)
    requests: list[GenerateRequest] = []
    long = Completion(
        ids=np.arange(8, dtype=np.int32),
        logprobs=np.zeros(8, np.float32),
        segments=(VersionSegment(version=0, num_tokens=8),),
        stop_reason="length",
    )

    async def scenario() -> None:
        backend = open_backend(chosen, Fleet(chosen, str(model), tmp_path))

        async def sample(_name: str, _prompt: Prompt, request: GenerateRequest, *_: str) -> list[Scored]:
            requests.append(request)
            return [Scored(trajectories=(Trajectory.of(long),), score=RewardScore(value=1.0, parts={}))]

        backend._rollouts.sample = sample  # type: ignore[method-assign]
        draw = backend._stream.draw(0)
        greedy = await backend._sample_greedy(3, draw, "rollout-0")
        assert greedy is not None
        assert backend._worth(greedy, draw) == 0.0, "a whole buffer over: the reward less the factor of 1"

    run(scenario)
    assert requests[0].params.stop == ("x",)


def completion(num_tokens: int) -> Completion:
    return Completion.join([5] * num_tokens, [-1.0] * num_tokens, [(0, num_tokens)], "eos", "x")


def is_filtered(
    config: GrpoConfig, model: Path, folder: Path, samples: list[Scored], greedy: Scored | None = None
) -> bool:
    """Return whether the group of these samples is left out of training."""
    found: list[bool] = []

    async def scenario() -> None:
        backend = open_backend(config, Fleet(config, str(model), folder))
        found.append((await backend._take_in(0, backend._stream.draw(0), samples, greedy)).filtered)

    run(scenario)
    return found[0]


def scored(value: float, num_tokens: int = 3, **parts: float) -> Scored:
    return Scored(trajectories=(Trajectory.of(completion(num_tokens)),), score=RewardScore(value=value, parts=parts))


def test_wrong_answers_of_different_lengths_are_filtered(config: Path, model: Path, tmp_path: Path) -> None:
    """As DAPO does: the penalty for length makes their rewards differ, and none of them is right."""
    words = ["--algorithm.filter_groups=true", "--algorithm.overlong_buffer_tokens=8", "--rollout.max_tokens=8"]
    chosen = settings(config, *words, "--rollout.samples_per_prompt=4")
    wrong = [scored(0.0, num_tokens) for num_tokens in (1, 8, 4, 2)]
    assert is_filtered(chosen, model, tmp_path, wrong)
    assert not is_filtered(chosen, model, tmp_path, [*wrong[1:], scored(1.0)])


def test_a_group_that_gdpo_learns_from_is_not_filtered(config: Path, model: Path, tmp_path: Path) -> None:
    words = ["--algorithm.filter_groups=true", "--algorithm.advantage=gdpo", "--reward.name="]
    chosen = settings(config, *words, "--reward.weights={number_match = 1.0, contains = 2.0}")
    right, short = scored(1.0, number_match=1.0, contains=0.0), scored(1.0, number_match=0.0, contains=0.5)
    assert not is_filtered(chosen, model, tmp_path, [right, short])
    assert is_filtered(chosen, model, tmp_path, [right, right])


def test_remax_filters_by_the_greedy_sample_too(config: Path, model: Path, tmp_path: Path) -> None:
    chosen = settings(config, "--algorithm.filter_groups=true", "--algorithm.advantage=remax")
    samples = [scored(1.0), scored(1.0)]
    assert not is_filtered(chosen, model, tmp_path, samples, scored(0.0))
    assert is_filtered(chosen, model, tmp_path, samples, scored(1.0))


def test_a_reward_that_is_no_number_is_counted_as_untrainable_before_it_is_filtered(
    config: Path, model: Path, tmp_path: Path
) -> None:
    assert is_filtered(
        settings(config, "--algorithm.filter_groups=true"), model, tmp_path, [scored(math.nan), scored(0.0)]
    )
