"""Rewards: the `reward` section, the answer inside a completion, and what it is worth."""

import asyncio
import difflib
import inspect
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from offbeat_data._prompts import Prompt
from offbeat_types import BackendError, ConfigError, DataError, OffbeatError, find_function, setting

NEEDS_ANSWER = frozenset({"exact_match", "number_match", "math_verify"})
"""Rewards that compare with `Prompt.answer`."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward by `name`, or several by `weights`, and where in a completion they look for the answer."""

    name: str = setting(
        "", "exact_match, number_match, math_verify, reasoning_gym, or a Python function as module:function."
    )
    weights: dict[str, float] = setting(
        {}, "Several rewards by name, each with its weight; the reward is their weighted sum."
    )
    extract: str = setting(
        "all",
        "Where the answer is in a completion: all of it, the last <tag>, the last \\boxed{}, or the last match of "
        "pattern. Without an answer the reward is 0. Functions always get the whole completion.",
        choices=("all", "tag", "boxed", "pattern"),
    )
    tag: str = setting("answer", "Name of that tag.")
    pattern: str = setting("", "That regular expression; its first group is the answer.")
    reference_pattern: str = setting(
        "", "Regular expression that finds the answer in answer_column, such as #### (.*)."
    )
    ignore_case: bool = setting(False, "exact_match: take upper and lower case as equal.")
    tolerance: float = setting(1e-6, "number_match: relative difference that counts as equal.", ge=0, lt=1)
    function_options: dict[str, Any] = setting({}, "Keyword arguments for functions, by their module:function name.")
    timeout_s: float = setting(10.0, "Time to score one completion; after it the reward is 0 and counted.", "s", gt=0)
    num_processes: int = setting(
        8, "Processes that score side by side at most; one, and more only where completions wait.", "processes", ge=1
    )
    on_error: str = setting(
        "drop",
        "A completion that cannot be scored (a function raised, ended its process, or returned no finite number) is "
        "left out of its group, or worth 0, or ends the run. It is counted; the first tracebacks are kept.",
        choices=("drop", "zero", "fail"),
    )
    max_error_share: float = setting(
        0.1,
        "The run ends when more than this share of the last 200 completions could not be scored.",
        "share of 200 completions",
        ge=0,
        le=1,
    )

    @property
    def all_weights(self) -> Mapping[str, float]:
        """Every reward with its weight.

        Raises:
            ConfigError: none is named, or both ways of naming are used.
        """
        if bool(self.name) == bool(self.weights):
            got = "both" if self.name else "neither"
            raise ConfigError(f'reward: give either name or weights, got {got}; such as name = "number_match"')
        return {self.name: 1.0} if self.name else self.weights

    @property
    def is_set(self) -> bool:
        """Whether any reward is named."""
        return bool(self.name or self.weights)

    @property
    def needs_answer(self) -> bool:
        """Whether prompts must have a reference answer."""
        return self.is_set and not NEEDS_ANSWER.isdisjoint(self.all_weights)

    def check(self) -> None:
        """Find what is wrong with these settings before anything starts.

        Raises:
            ConfigError: a broken regular expression, or a setting that would have no effect.
        """
        names = self.all_weights
        for key, pattern in (("pattern", self.pattern), ("reference_pattern", self.reference_pattern)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"reward.{key} is not a regular expression: {error}; got {pattern!r}") from error
        if (self.extract == "pattern") != bool(self.pattern):
            raise ConfigError('reward.pattern and extract = "pattern" need each other: give both or neither')
        if unused := sorted(set(self.function_options) - set(names)):
            raise ConfigError(f"reward.function_options names {', '.join(unused)}, which is no reward of this run")


_NUMBER: Final = re.compile(
    r"(?<![\w.,)])[-+]?"  # a sign only where no operand stands before it: the last number of "5-3" is 3
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|[-+]?\.\d+"
)
_ARITHMETIC: Final = Context(prec=60, traps=[])


def plain_minus(text: str) -> str:
    """The text with the minus sign of typeset mathematics (U+2212) as the one of the keyboard."""
    return text.replace("\u2212", "-")


def last_number(text: str) -> Decimal | None:
    """The last number in a text: 12, -3.5, 1,234, 6e23, 3/4; None when there is none."""
    found = _NUMBER.findall(plain_minus(text))
    return to_number(found[-1]) if found else None


def to_number(text: str) -> Decimal | None:
    """The number a text is; None when it is not one, or divides by zero."""
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        number = _ARITHMETIC.divide(Decimal(top), Decimal(bottom)) if bottom else Decimal(top)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def numbers_match(number: Decimal, reference: Decimal, tolerance: float) -> bool:
    """Whether two numbers are equal, or differ by at most `tolerance` times the larger."""
    if number == reference:
        return True
    first, second = float(number), float(reference)
    return math.isfinite(first) and math.isfinite(second) and math.isclose(first, second, rel_tol=tolerance)


def last_in_tag(text: str, tag: str) -> str | None:
    """What stands between the last <tag> and the </tag> after it."""
    return last_match(text, rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>")


def last_match(text: str, pattern: str) -> str | None:
    """The first group of the last match of a regular expression, or the match itself when it has no group."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    found = matches[-1].group(1 if matches[-1].re.groups else 0)
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, inner braces matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + 7 : at].strip()
    return None


_CIRCLE: Final = r"(?:\\circ|o)(?![A-Za-z])"
_ROOTED: Final = r"\d+(?:\.\d+)?"
_RULES: Final = [
    (re.compile(rule), latex)
    for rule, latex in (
        (r"\s*[°º˚]", r"^\\circ "),
        (rf"\^\s*(?:{_CIRCLE}|\{{\s*{_CIRCLE}\s*\}})", r"^\\circ "),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"√\s*({_ROOTED})", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    )
]
"""Each stands for a right answer to a geometry problem that math-verify 0.9 takes for another number or for nothing."""
_UNIT: Final = r"(?:mm|cm|dm|km|m|in|inch(?:es)?|ft|feet|foot|yd|yards?|mi|miles?|units?)"
_POWER: Final = r"\s*(?:\^\s*(?:[23]|\{\s*[23]\s*\})|[²³])"
_POWER_OF_UNIT: Final = re.compile(
    r"(\d|[})]|\\pi|π)"  # only after a number
    r"(?:\\[ ,;:!]|~|\s)*"
    rf"(?:{_UNIT}{_POWER}|\\(?:text|mathrm|textrm)\s*\{{\s*{_UNIT}(?:\s*\}}{_POWER}|{_POWER}\s*\}}))"
)


def as_latex(text: str) -> str:
    """Degrees, roots and π in the writing of LaTeX; the rest as it is."""
    text = plain_minus(text)
    for rule, latex in _RULES:
        text = rule.sub(latex, text)
    return text


def without_units(text: str) -> str:
    """Without squares and cubes of units of length: 9 of `9 \\mathrm{m}^2`, where `m^2` would be a variable's."""
    return _POWER_OF_UNIT.sub(r"\1", text)


def has_variables(text: str) -> bool:
    """Whether letters stand in it that are no commands of LaTeX: those of a unit may then be meant."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", as_latex(text))) is not None


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
            the answer, else 0. A run of grpo-async-app adds `timed_out`, 0 or 1, or `failed`, 1, to what could not be
            scored.
    """

    value: float
    parts: dict[str, float]


class Reward:
    """Scores completions, without a deadline. Made by `build_reward`."""

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

    math-verify's own timeouts use signals and raise off the main thread, so they are off; whoever calls has the
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
    from offbeat_data._task_libraries import import_reasoning_gym, score_entry

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
