"""Validations: every item of every set sampled and scored, and what each was answered with."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from grpo_async_app._config.resolved import ValidationSet
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.engines import Engines
from grpo_async_app._run.sampling import Rollouts, ScoredSample
from offbeat_core import GenerateRequest, OffbeatError, PeerFailedError, StopReason
from offbeat_data import Prompt, vote_of
from offbeat_run import HELD_OUT, ItemAnswers, SampledAnswer, SetSummary, label_of, summarize

_PROMPT_CHARACTERS = 500
"""Longest beginning of a prompt that is kept with its answers; the set has the whole prompt."""


class OutdatedError(OffbeatError):
    """An engine that died while it answered was started again with newer weights: the answers are of two versions."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An item of a set with its samples, scored; fewer than asked for where some failed."""

    asked: ValidationSet
    number: int
    prompt: Prompt
    samples: list[ScoredSample]

    def to_item(self, version: int, *, has_turns: bool, keep_texts: bool = False, loaded: bool = False) -> ItemAnswers:
        """Return it as a validation that began at `version` writes it down.

        An engine counts weights `loaded` from a folder as version 0; they are those of `version`.
        """
        return ItemAnswers(
            step=version,
            item=self.number,
            prompt=self.prompt.text if keep_texts else self.prompt.text[:_PROMPT_CHARACTERS],
            answer=self.prompt.answer or "",
            samples=tuple(
                self._sample(each, has_turns, keep_texts, version if loaded else None) for each in self.samples
            ),
        )

    def _sample(self, scored: ScoredSample, has_turns: bool, keep_texts: bool, version: int | None) -> SampledAnswer:
        turns = [turn for trajectory in scored.trajectories for turn in trajectory.turns]
        first = scored.trajectories[0]  # of an agent that branched, the first of its conversations
        return SampledAnswer(
            reward=scored.score.value,
            right=scored.score.value >= self.asked.success_reward,
            vote=vote_of(scored.answer, self.asked.judge.settings),
            num_tokens=scored.num_tokens,
            num_turns=len(turns) if has_turns else 0,
            stop_reason="length" if scored.is_cut_off else _own_end(first.stop_reason),
            versions=tuple(
                (segment.version if version is None else version, segment.num_tokens)
                for turn in turns
                for segment in turn.segments
            ),
            text=first.text if keep_texts else "",
        )


def _own_end(stop_reason: StopReason) -> str:
    """Why a turn ended that no limit of the run has cut off: an agent may ask for few tokens, and get them."""
    return "stop" if stop_reason == "length" else stop_reason


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Result of one validation.

    Args:
        version: policy version when it began.
        answered: the items of all sets, set by set, in order.
        items: the same, by set, as written down.
        summaries: of the sets.
    """

    version: int
    answered: list[Answered]
    items: dict[str, list[ItemAnswers]]
    summaries: list[SetSummary]

    def numbers(self) -> dict[str, float]:
        return {name: value for summary in self.summaries for name, value in summary.metrics().items()}

    def score(self, score_set: str) -> float:
        """Return the mean reward that says which checkpoint is the best: see `eval.score_set`."""
        return self._scored(score_set).reward

    def accuracy(self, score_set: str) -> float:
        """Return the accuracy of the set that `score` looks at."""
        return self._scored(score_set).accuracy

    def _scored(self, score_set: str) -> SetSummary:
        by_name = {summary.name: summary for summary in self.summaries}
        return by_name.get(score_set or HELD_OUT) or self.summaries[0]


def accuracy_metric(name: str) -> str:
    """Return the metric that holds the accuracy of a validation set, by the set's name."""
    return "eval/accuracy" if name == HELD_OUT else f"eval/{name}/accuracy"


def validated_names(sets: Sequence[ValidationSet]) -> dict[str, str]:
    """Return what is compared at the end of a run: names by metric."""
    names: dict[str, str] = {}
    for each in sets:
        prefix = "eval/" if each.name == HELD_OUT else f"eval/{each.name}/"
        measured = ["accuracy"]
        if each.num_samples > 1:
            measured += [
                f"{what}_at_{k}" for k in sorted(set(each.k) or {each.num_samples}) for what in ("pass", "maj")
            ]
        measured += ["reward", "response_tokens", *(["turns"] if each.environment.is_set else [])]
        names |= {prefix + name: label_of(prefix + name) for name in measured}
    return names


async def validate(
    rollouts: Rollouts,
    engines: Engines,
    config: GrpoConfig,
    sets: Sequence[ValidationSet],
    version: int,
    notify: Callable[[int], None],
) -> Validation:
    """Sample and score every item; one whose engine dies is asked again. `notify` takes how many are answered.

    Raises:
        OutdatedError: another version than `version` has answered, and none should: see `eval.at_sync`.
    """
    work = [(each, range(len(each.prompts))) for each in sets]
    found: dict[tuple[str, int], Answered] = {}
    # Closed at an error, too: that is what cancels the tasks of the items in flight.
    async with aclosing(answers(rollouts, engines, config, work, f"eval-{version}")) as stream:
        async for answered in stream:
            if not config.validation_goes_on:
                _refuse_other_versions(answered, version)
            found[answered.asked.name, answered.number] = answered
            notify(len(found))
    ordered = [found[each.name, number] for each in sets for number in range(len(each.prompts))]
    has_turns = {each.name: config.agent.is_set or each.environment.is_set for each in sets}
    items = {
        name: [it.to_item(version, has_turns=turns) for it in ordered if it.asked.name == name]
        for name, turns in has_turns.items()
    }
    summaries = [summarize(each.name, version, items[each.name], each.num_samples, each.k) for each in sets]
    return Validation(version=version, answered=ordered, items=items, summaries=summaries)


def _refuse_other_versions(answered: Answered, version: int) -> None:
    turns = [turn for sample in answered.samples for trajectory in sample.trajectories for turn in trajectory.turns]
    served = {segment.version for turn in turns for segment in turn.segments}
    if served - {version}:
        raise OutdatedError(f"version {max(served)} has answered a prompt of the validation of {version}")


async def answers(
    rollouts: Rollouts,
    engines: Engines,
    config: GrpoConfig,
    work: Sequence[tuple[ValidationSet, Iterable[int]]],
    request_prefix: str,
) -> AsyncGenerator[Answered, None]:
    """Answer items of sets, as many at once as keep the engines busy, and yield each when it is scored."""
    # Beside training a sync waits for what is in flight: no more of it than the engines decode at once.
    most = config.rollout.max_running * len(engines.names) * (1 if config.validation_goes_on else 2)
    waiting = iter([(each, number) for each, numbers in work for number in numbers])
    tasks: set[asyncio.Task[Answered]] = set()
    in_flight, upcoming = 0, next(waiting, None)
    try:
        while upcoming or tasks:
            # One item alone may have more samples than `most`.
            while upcoming and (not tasks or in_flight + upcoming[0].num_samples <= most):
                each, number = upcoming
                tasks.add(asyncio.create_task(_answer(rollouts, engines, config, each, number, request_prefix)))
                in_flight += each.num_samples
                upcoming = next(waiting, None)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answered = task.result()
                tasks.discard(task)
                in_flight -= answered.asked.num_samples
                yield answered
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    rollouts: Rollouts, engines: Engines, config: GrpoConfig, each: ValidationSet, number: int, request_prefix: str
) -> Answered:
    """Return one item, from another engine when one dies over it."""
    prompt, base = each.prompts[number], each.params
    # A seed of its own: with one for all, every prompt would be answered by the same draw.
    params = replace(base, seed=(base.seed or 0) + number * each.num_samples)
    request = GenerateRequest(
        request_id=f"{request_prefix}-{each.name}-{number}",
        prompt_ids=prompt.ids,
        num_samples=each.num_samples,
        params=params,
    )
    for retries_left in reversed(range(config.async_.max_group_retries + 1)):
        name = engines.least_loaded().name
        try:
            with engines.hold(name):
                samples = await rollouts.sample(name, prompt, request, each.judge, each.environment)
        except PeerFailedError:  # any other error would come again on another engine
            if not retries_left:
                raise
        else:
            return Answered(asked=each, number=number, prompt=prompt, samples=samples)
    raise AssertionError  # the last attempt returns or raises
