"""Validation: held-out prompts completed by the engines that also serve training."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from grpo_async_app._config import GrpoConfig
from grpo_async_app._fleet import Fleet
from offbeat_data import Prompt
from offbeat_types import Completion, GenerateRequest, SamplingParams

VALIDATED = {
    "eval/accuracy": "accuracy",
    "eval/reward": "reward",
    "eval/response_tokens": "response tokens",
}
"""What a validation measures: names by metric."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What one validation gave.

    Args:
        version: policy version that answered.
        accuracy: share of completions with at least `eval.success_reward`.
        reward: mean reward.
        mean_tokens: mean completion length.
        samples: (prompt, completion, reward) of each held-out prompt.
    """

    version: int
    accuracy: float
    reward: float
    mean_tokens: float
    samples: list[tuple[Prompt, Completion, float]]

    def numbers(self) -> dict[str, float]:
        """The figures by metric name."""
        return {"eval/accuracy": self.accuracy, "eval/reward": self.reward, "eval/response_tokens": self.mean_tokens}


def validation_prompts(config: GrpoConfig, held_out: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """The held-out prompts that a validation uses."""
    return held_out[: config.eval.max_prompts or None]


async def validate(fleet: Fleet, config: GrpoConfig, prompts: tuple[Prompt, ...], version: int) -> Validation:
    """Complete and score every prompt once.

    Raises:
        DeadlineError: one answer took longer than `async.group_deadline_s`.
    """
    params = SamplingParams(
        max_tokens=config.rollout.max_tokens,
        temperature=config.eval.temperature,
        stop=tuple(config.rollout.stop),
        seed=config.rollout.seed,
    )
    names = fleet.rollout_names

    async def answer(number: int, prompt: Prompt) -> tuple[Prompt, Completion, float]:
        request = GenerateRequest(request_id=f"eval-{version}-{number}", prompt_ids=prompt.ids, params=params)
        [completion] = await fleet.generate(names[number % len(names)], request, config.async_.group_deadline_s)
        [score] = await fleet.score(prompt, [completion.text])
        return prompt, completion, score.value

    samples = list(await _bounded(answer, prompts, limit=2 * config.rollout.max_running * len(names)))
    count = max(len(samples), 1)
    return Validation(
        version=version,
        accuracy=sum(reward >= config.eval.success_reward for _, _, reward in samples) / count,
        reward=sum(reward for _, _, reward in samples) / count,
        mean_tokens=sum(len(completion.ids) for _, completion, _ in samples) / count,
        samples=samples,
    )


async def _bounded(
    answer: Callable[[int, Prompt], Awaitable[tuple[Prompt, Completion, float]]],
    prompts: tuple[Prompt, ...],
    limit: int,
) -> list[tuple[Prompt, Completion, float]]:
    gate = asyncio.Semaphore(limit)

    async def one(number: int, prompt: Prompt) -> tuple[Prompt, Completion, float]:
        async with gate:
            return await answer(number, prompt)

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))
