"""Rewards: a prompt and a completion to a number."""

import asyncio
import difflib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat_data._answers import last_boxed, last_in_tag, last_match, last_number, numbers_match
from offbeat_data._math_text import as_latex, has_variables, without_units
from offbeat_data._prompts import Prompt
from offbeat_data._reasoning_gym import import_reasoning_gym, score_entry
from offbeat_data._reward_config import RewardConfig
from offbeat_data._user_function import find_function
from offbeat_types import BackendError, ConfigError, DataError, OffbeatError

Scorer = Callable[[Prompt, str], float | None]
"""What a completion is worth; None when its judge raised on what the model wrote."""


class RewardError(OffbeatError):
    """A user's reward function raised, or returned something that is no finite number."""


class NotANumberError(RewardError):
    """A user's reward function returned what is a number for no completion, such as a list."""


@dataclass(frozen=True, kw_only=True)
class RewardScore:
    """What a completion is worth, as plain data.

    Args:
        value: the weighted sum.
        parts: each reward by name, before its weight. `reasoning_gym` adds `unreadable`, 1 when its judge raised on
            the answer, else 0; `GuardedReward` adds `timed_out`, 0 or 1; `RewardPool` adds `failed`, 1, to what could
            not be scored.
    """

    value: float
    parts: dict[str, float]


class Reward:
    """Scores completions. Made by `build_reward`; see `GuardedReward` for one with a deadline."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self._scorers, self._weights = dict(scorers), dict(weights)

    def score(self, prompt: Prompt, completion: str) -> RewardScore:
        """Score one completion.

        Raises:
            RewardError: a user's function raised or returned no finite number.
            DataError: the prompt lacks what a reward compares with.
        """
        found = {name: scorer(prompt, completion) for name, scorer in self._scorers.items()}
        parts = {name: part or 0.0 for name, part in found.items()}
        value = sum(self._weights[name] * part for name, part in parts.items())
        if "reasoning_gym" in found:
            parts["unreadable"] = float(found["reasoning_gym"] is None)
        return RewardScore(value=value, parts=parts)


def build_reward(config: RewardConfig) -> Reward:
    """Find every reward that the configuration names.

    Raises:
        ConfigError: an unknown name (nearest names), a function that is not there, a weight that is not finite.
        BackendError: a reward needs a package that is not installed.
    """
    config.check()
    for name, weight in config.all_weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.weights: {name} needs a finite number, got {weight!r}")
    return Reward({name: _build_scorer(name, config) for name in config.all_weights}, config.all_weights)


def _build_scorer(name: str, config: RewardConfig) -> Scorer:
    if name in _SCORERS:
        return _SCORERS[name](config)
    if ":" in name:
        return _function_scorer(name, config)
    near = difflib.get_close_matches(name, _SCORERS, n=2, cutoff=0.4)
    advice = f"perhaps {' or '.join(near)}; " if near else ""
    raise ConfigError(f"reward: no reward {name!r}; {advice}there are {', '.join(_SCORERS)} and module:function")


def _answer_of(completion: str, config: RewardConfig) -> str | None:
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


def _exact_match(config: RewardConfig) -> Scorer:
    def score(prompt: Prompt, completion: str) -> float:
        answer, reference = _answer_of(completion, config), _reference_of(prompt, config, "exact_match")
        if answer is not None and config.ignore_case:
            answer, reference = answer.casefold(), reference.casefold()
        return float(answer == reference)

    return score


def _number_match(config: RewardConfig) -> Scorer:
    def score(prompt: Prompt, completion: str) -> float:
        reference = last_number(text := _reference_of(prompt, config, "number_match"))
        if reference is None:
            raise DataError(f"the reward number_match needs a number in the answer of prompt {prompt.index}: {text!r}")
        answer = last_number(_answer_of(completion, config) or "")
        return float(answer is not None and numbers_match(answer, reference, config.tolerance))

    return score


def _math_verify(config: RewardConfig) -> Scorer:
    """Equality of mathematical expressions.

    math-verify's own timeouts use signals and raise off the main thread, so they are off; `GuardedReward` has the
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
        answer, reference = _answer_of(completion, config), _reference_of(prompt, config, "math_verify")
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


def _reasoning_gym(config: RewardConfig) -> Scorer:
    import_reasoning_gym()  # here, and not within the deadline of the first completion

    def score(prompt: Prompt, completion: str) -> float | None:
        answer = _answer_of(completion, config)
        return 0.0 if answer is None else score_entry(answer, prompt.fields)

    return score


_SCORERS: Final[dict[str, Callable[[RewardConfig], Scorer]]] = {
    "exact_match": _exact_match,
    "number_match": _number_match,
    "math_verify": _math_verify,
    "reasoning_gym": _reasoning_gym,
}


def _function_scorer(name: str, config: RewardConfig) -> Scorer:
    """A user's `function(prompt: Prompt, completion: str, **options) -> float`, which may be a coroutine function."""
    function, options = find_function("reward", name), config.function_options.get(name, {})
    runner = asyncio.Runner()  # one for all completions: what the function keeps open belongs to an event loop

    def score(prompt: Prompt, completion: str) -> float:
        try:
            value = function(prompt, completion, **options)
            if inspect.isawaitable(value):
                value = runner.run(_awaited(value))
        except Exception as error:
            raise RewardError(
                f"the reward function {name} raised {type(error).__name__} on prompt {prompt.index}: {error}"
            ) from error
        return _finite(name, value, prompt.index)

    return score


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _finite(name: str, value: Any, index: int) -> float:
    # Numbers of numpy and torch answer __float__, and so does an array of one element; a text does not.
    is_number = value is None or hasattr(value, "__float__") or hasattr(value, "__index__")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_number or not math.isfinite(number):
        raise (RewardError if is_number else NotANumberError)(
            f"the reward function {name} must return a finite number: on prompt {index} it returned {_shown(value)} "
            f"({type(value).__name__})"
        )
    return number


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception as error:  # noqa: BLE001  such as an int of more digits than Python writes
        return f"what cannot be shown: {type(error).__name__}"
