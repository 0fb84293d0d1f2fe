"""Rewards by name: the score of a completion, as a weighted sum."""

import asyncio
import difflib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._scoring.answers import (
    as_latex,
    has_variables,
    last_boxed,
    last_in_tag,
    last_match,
    last_number,
    numbers_match,
    without_units,
)
from offbeat_data._scoring.code.code import code_scorer
from offbeat_data._scoring.config import RewardConfig
from offbeat_data._scoring.functions import CompletionText, RewardFunction, RewardValue
from offbeat_data._scoring.judge import Judge
from offbeat_data._scoring.judge_client import deadline

OfOne = Callable[[Prompt, str], float | None]
"""The score of a completion; None when its judge raised on what the model wrote."""

Asked = list[RewardValue] | Awaitable[list[RewardValue]]


@dataclass(frozen=True, kw_only=True)
class RewardScore:
    """Score of a completion, as plain data.

    Args:
        value: the weighted sum.
        parts: each reward by name, before its weight. `reasoning_gym` adds `unreadable`, 1 when its judge raised on
            the answer, else 0; what a function of verl returns beside its score is there as `name/key`. A run of
            grpo-async-app adds `timed_out`, 0 or 1, or `failed`, 1, to what could not be scored.
        costs: what scoring took, to be added up over a run: requests, cached answers and tokens of a judge.
    """

    value: float
    parts: dict[str, float]
    costs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """One reward, however it is called.

    Args:
        ask: scores completions of one prompt, one result each; an awaitable where `waits`.
        waits: it holds no thread while it waits: many may be under way at once.
        is_group: it gets all completions of a prompt in one call; else it gets one.
        may_split: of a group: it may as well get some of them, because it does not compare.
        note: text on how it is called; empty for what needs none.
    """

    ask: Callable[[Prompt, Sequence[CompletionText]], Asked]
    waits: bool = False
    is_group: bool = False
    may_split: bool = True
    note: str = ""

    @classmethod
    def of_one(cls, score: OfOne) -> "Scorer":
        return cls(ask=lambda prompt, written: [RewardValue(value=score(prompt, each.text)) for each in written])


class Reward:
    """Scores completions, without a deadline. Made by `build_reward`."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self._scorers, self._weights = dict(scorers), dict(weights)
        self._runner: asyncio.Runner | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rewards."""
        return tuple(self._scorers)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Rewards that wait without holding the thread: a judge, coroutine functions."""
        return tuple(name for name, scorer in self._scorers.items() if scorer.waits)

    @property
    def grouping(self) -> tuple[str, ...]:
        """Rewards that get all completions of a prompt in one call."""
        return tuple(name for name, scorer in self._scorers.items() if scorer.is_group)

    @property
    def comparing(self) -> tuple[str, ...]:
        """Return, of `grouping`, those that may not be asked for some of the completions alone."""
        return tuple(name for name in self.grouping if not self._scorers[name].may_split)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return texts on how functions are called."""
        return tuple(scorer.note for scorer in self._scorers.values() if scorer.note)

    def score(self, prompt: Prompt, completion: str, ids: Sequence[int] = ()) -> RewardScore:
        """Score one completion by all rewards.

        Raises:
            RewardError: a user's function raised or returned no finite number, or a judge could not be asked.
            DataError: the prompt lacks what a reward compares with.
        """
        [score] = self.score_group(prompt, [CompletionText(text=completion, ids=ids)])
        return score

    def score_group(
        self, prompt: Prompt, written: Sequence[CompletionText], names: Sequence[str] | None = None
    ) -> list[RewardScore]:
        """Score completions of one prompt by some rewards, or all; raises as `score`."""
        found: dict[str, list[RewardValue]] = {}
        for name in self._scorers if names is None else names:
            asked = self._asked(name, prompt, written)
            answers = [self._run(each) if inspect.isawaitable(each) else each for each in asked]
            found[name] = [score for answer in answers for score in answer]
        return self._sums(found, len(written))

    async def await_group(
        self, prompt: Prompt, written: Sequence[CompletionText], names: Sequence[str], timeout_s: float | None = None
    ) -> list[RewardScore]:
        """Return the same by rewards of `waiting`, side by side, in the event loop of the caller.

        Raises:
            TimeoutError: it took longer than `timeout_s`, waits for a judge's rate limit not counted.
        """

        async def one(name: str) -> list[RewardValue]:
            asked = self._asked(name, prompt, written)
            answers = await asyncio.gather(*(each for each in asked if inspect.isawaitable(each)))
            return [score for answer in answers for score in answer]

        async with asyncio.timeout(timeout_s) as scope:
            deadline.set(scope)
            found = await asyncio.gather(*(one(name) for name in names))
        return self._sums(dict(zip(names, found, strict=True)), len(written))

    def _asked(self, name: str, prompt: Prompt, written: Sequence[CompletionText]) -> Iterator[Asked]:
        """Yield one call for all, or one for each; the next is made when the last has been read."""
        scorer = self._scorers[name]
        for part in [written] if scorer.is_group else [[each] for each in written]:
            yield scorer.ask(prompt, part)

    def _run(self, work: Awaitable[list[RewardValue]]) -> list[RewardValue]:
        # One loop for all completions: what a function keeps open belongs to an event loop.
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_awaited(work))

    def _sums(self, found: Mapping[str, list[RewardValue]], count: int) -> list[RewardScore]:
        return [self._sum({name: values[at] for name, values in found.items()}) for at in range(count)]

    def _sum(self, values: Mapping[str, RewardValue]) -> RewardScore:
        parts = {name: score.value or 0.0 for name, score in values.items()}
        value = sum(self._weights[name] * part for name, part in parts.items())
        costs: dict[str, float] = {}
        for name, score in values.items():
            parts.update({f"{name}/{key}": extra for key, extra in score.extras.items()})
            for key, cost in score.costs.items():
                costs[key] = costs.get(key, 0.0) + cost
        if "reasoning_gym" in values:
            parts["unreadable"] = float(values["reasoning_gym"].value is None)
        return RewardScore(value=value, parts=parts, costs=costs)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def build_reward(config: RewardConfig) -> Reward:
    """Find every reward that the configuration names, but for `reward_model`, which is a process of its own.

    Raises:
        ConfigError: an unknown name (nearest names), a function that is not there, a weight that is not finite.
        BackendError: a reward needs a package or a program that is not installed.
    """
    config.check()
    for name, weight in config.all_weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.weights: {name} needs a finite number, got {weight!r}")
    named = {label: name for label, name in config.all_names.items() if name != "reward_model"}
    return Reward({label: _build_scorer(name, config) for label, name in named.items()}, config.all_weights)


def _build_scorer(name: str, config: RewardConfig) -> Scorer:
    if name in _OF_ONE:
        return Scorer.of_one(_OF_ONE[name](config))
    if name == "judge":
        return Scorer(ask=Judge(config.judge, config.timeout_s).score, waits=True)
    if name == "code":
        return Scorer(ask=(scorer := code_scorer(config)).score, note=scorer.note)
    if ":" in name:
        return _function_scorer(RewardFunction(name, config))
    known = [*_OF_ONE, "judge", "code", "reward_model"]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
    advice = f"perhaps {' or '.join(near)}; " if near else ""
    raise ConfigError(f"reward: no reward {name!r}; {advice}there are {', '.join(known)} and module:function")


def _function_scorer(function: RewardFunction) -> Scorer:
    """Return a user's function, which is given one completion or all of a prompt."""
    signature = function.signature

    async def wait(prompt: Prompt, written: Sequence[CompletionText], result: Awaitable[Any]) -> list[RewardValue]:
        try:
            found = await result
        except Exception as error:
            raise function.failed(error, prompt) from error
        return function.read(found, prompt, len(written))

    def call(prompt: Prompt, written: Sequence[CompletionText]) -> Asked:
        try:
            result = function(prompt, written)
        except Exception as error:
            raise function.failed(error, prompt) from error
        if inspect.isawaitable(result):
            return wait(prompt, written, result)
        return function.read(result, prompt, len(written))

    return Scorer(
        ask=call,
        waits=function.waits,
        is_group=signature.takes_list,
        may_split=signature.may_split,
        note=function.note,
    )


def answer_of(completion: str, config: RewardConfig) -> str | None:
    if config.extract == "tag":
        return last_in_tag(completion, config.tag)
    if config.extract == "boxed":
        return last_boxed(completion)
    if config.extract == "pattern":
        return last_match(completion, config.pattern)
    return completion.strip()


def _reference_of(prompt: Prompt, config: RewardConfig, name: str) -> str:
    if prompt.answer is None:
        raise DataError(f"the reward {name} compares with a reference answer, and prompt {prompt.index} has none")
    if not config.reference_pattern:
        return prompt.answer.strip()
    found = last_match(prompt.answer, config.reference_pattern)
    if found is None:
        raise DataError(
            f"reward.reference_pattern {config.reference_pattern!r} finds nothing in the answer of prompt "
            f"{prompt.index}: {prompt.answer[-80:]!r}"
        )
    return found


def _exact_match(config: RewardConfig) -> OfOne:
    def score(prompt: Prompt, completion: str) -> float:
        answer, reference = answer_of(completion, config), _reference_of(prompt, config, "exact_match")
        if answer is not None and config.ignore_case:
            answer, reference = answer.casefold(), reference.casefold()
        return float(answer == reference)

    return score


def _number_match(config: RewardConfig) -> OfOne:
    def score(prompt: Prompt, completion: str) -> float:
        reference = last_number(text := _reference_of(prompt, config, "number_match"))
        if reference is None:
            raise DataError(f"the reward number_match needs a number in the answer of prompt {prompt.index}: {text!r}")
        answer = last_number(answer_of(completion, config) or "")
        return float(answer is not None and numbers_match(answer, reference, config.tolerance))

    return score


def _math_verify(config: RewardConfig) -> OfOne:
    """Equality of mathematical expressions.

    math-verify's own timeouts use signals and raise off the main thread, so they are off; the caller has the
    deadline. A reference that is no expression to it is compared as text. Units of an answer are left out, unless the
    reference has letters of its own.
    """
    try:
        import math_verify
    except ImportError as error:
        line = 'pip install "offbeat-data[math]"'
        raise BackendError(f"the reward math_verify needs math-verify; install it with: {line}") from error

    # It warns once that its timeouts are off, which is on purpose here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str) -> Any:
        return math_verify.parse(as_latex(text), parsing_timeout=None)

    def score(prompt: Prompt, completion: str) -> float:
        answer, reference = answer_of(completion, config), _reference_of(prompt, config, "math_verify")
        if answer is None:
            return 0.0
        if config.extract == "boxed":
            answer = f"\\boxed{{{answer}}}"
        if not has_variables(reference):
            answer = without_units(answer)
        gold = parse(f"\\boxed{{{reference}}}") or parse(reference)
        if not gold:
            return float(answer == reference)
        return float(math_verify.verify(gold, parse(answer), timeout_seconds=None))

    return score


def _reasoning_gym(config: RewardConfig) -> OfOne:
    from offbeat_data._sources.task_libraries import import_reasoning_gym, score_entry

    import_reasoning_gym()  # here, and not within the deadline of the first completion

    def score(prompt: Prompt, completion: str) -> float | None:
        answer = answer_of(completion, config)
        return 0.0 if answer is None else score_entry(answer, prompt.fields)

    return score


_OF_ONE: Final[dict[str, Callable[[RewardConfig], OfOne]]] = {
    "exact_match": _exact_match,
    "number_match": _number_match,
    "math_verify": _math_verify,
    "reasoning_gym": _reasoning_gym,
}
