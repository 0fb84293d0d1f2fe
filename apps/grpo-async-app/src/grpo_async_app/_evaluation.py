"""Validation: held-out prompts completed by the engines that also serve training."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from grpo_async_app._config import GrpoConfig
from grpo_async_app._engines import Engines
from grpo_async_app._rollouts import Rollouts, ScoredTrajectory
from offbeat_actors import gather_or_cancel
from offbeat_data import Prompt
from offbeat_types import GenerateRequest, OffbeatError, PeerFailedError, SamplingParams, Trajectory

VALIDATED = {
    "eval/accuracy": "accuracy",
    "eval/reward": "reward",
    "eval/response_tokens": "response tokens",
}
"""What every validation measures: names by metric."""

Answered = tuple[Prompt, Trajectory, float]
"""A held-out prompt, what the model made of it, and its reward."""


class OutdatedError(OffbeatError):
    """An engine that died while it answered was started again with newer weights: the answers are of two versions."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What one validation gave.

    Args:
        version: policy version that answered.
        accuracy: share of samples with at least `eval.success_reward`.
        reward: mean reward.
        mean_tokens: mean number of tokens the model wrote.
        mean_turns: mean number of turns; None without an environment.
        samples: (prompt, trajectory, reward) of each held-out prompt, but for those whose environment failed.
    """

    version: int
    accuracy: float
    reward: float
    mean_tokens: float
    mean_turns: float | None
    samples: list[Answered]

    def numbers(self) -> dict[str, float]:
        """The figures by metric name."""
        numbers = {"eval/accuracy": self.accuracy, "eval/reward": self.reward, "eval/response_tokens": self.mean_tokens}
        return numbers if self.mean_turns is None else {**numbers, "eval/turns": self.mean_turns}


def validated_names(config: GrpoConfig) -> dict[str, str]:
    """What a validation of this run measures: names by metric."""
    return {**VALIDATED, "eval/turns": "turns"} if config.environment.name else VALIDATED


def validation_prompts(config: GrpoConfig, held_out: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """The held-out prompts that a validation uses."""
    return held_out[: config.eval.max_prompts or None]


async def validate(
    rollouts: Rollouts, engines: Engines, config: GrpoConfig, prompts: tuple[Prompt, ...], version: int
) -> Validation:
    """Sample and score every prompt once; a prompt whose engine dies is asked again.

    Args:
        rollouts: samples and scores.
        engines: share the prompts by load.
        config: of the run.
        prompts: held out.
        version: policy version that the engines serve.

    Raises:
        DeadlineError: one answer took longer than `async.group_deadline_s`.
        OutdatedError: an engine serves another version by now.
        PeerFailedError: the engines died over one prompt more than `async.max_group_retries` times.
    """
    params = SamplingParams(
        max_tokens=config.rollout.max_tokens,
        temperature=config.eval.temperature,
        stop=tuple(config.rollout.stop),
    )

    async def answer(number: int, prompt: Prompt) -> Answered | None:
        # A seed of its own: with one for all, every prompt would be answered by the same draw.
        own = replace(params, seed=config.rollout.seed + number)
        request = GenerateRequest(request_id=f"eval-{version}-{number}", prompt_ids=prompt.ids, params=own)
        for sample in await _sample(rollouts, engines, prompt, request, config.async_.max_group_retries):
            served = {segment.version for turn in sample.trajectory.turns for segment in turn.segments}
            if served - {version}:
                raise OutdatedError(f"version {max(served)} has answered a prompt of the validation of {version}")
            return prompt, sample.trajectory, sample.reward
        return None

    samples = await _bounded(answer, prompts, limit=2 * config.rollout.max_running * len(engines.names))
    count, has_turns = max(len(samples), 1), bool(config.environment.name)
    return Validation(
        version=version,
        accuracy=sum(reward >= config.eval.success_reward for _, _, reward in samples) / count,
        reward=sum(reward for _, _, reward in samples) / count,
        mean_tokens=sum(trajectory.num_tokens for _, trajectory, _ in samples) / count,
        mean_turns=sum(len(trajectory.turns) for _, trajectory, _ in samples) / count if has_turns else None,
        samples=samples,
    )


async def _sample(
    rollouts: Rollouts, engines: Engines, prompt: Prompt, request: GenerateRequest, max_retries: int
) -> list[ScoredTrajectory]:
    """One sample, from another engine when one dies over it."""
    for retries_left in reversed(range(max_retries + 1)):
        name = engines.least_loaded()
        try:
            with engines.hold(name):
                return await rollouts.sample(name, prompt, request)
        except PeerFailedError:
            if not retries_left:
                raise
    raise AssertionError  # the last attempt returns or raises


async def _bounded(
    answer: Callable[[int, Prompt], Awaitable[Answered | None]], prompts: tuple[Prompt, ...], limit: int
) -> list[Answered]:
    gate = asyncio.Semaphore(limit)

    async def one(number: int, prompt: Prompt) -> Answered | None:
        async with gate:
            return await answer(number, prompt)

    answers = await gather_or_cancel([one(number, prompt) for number, prompt in enumerate(prompts)])
    return [answered for answered in answers if answered is not None]
