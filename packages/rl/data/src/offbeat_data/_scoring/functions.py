"""A user's reward functions, called as offbeat, verl, TRL or OpenRLHF call them.

Sources: verl, verl/experimental/reward_loop/reward_manager/naive.py (keywords, extra_info, dict results); TRL,
trl/trainer/grpo_trainer.py `_calculate_rewards` (columns as lists, None for what a function does not judge);
OpenRLHF, openrlhf/utils/remote_rm_utils.py (queries, prompts, labels).
"""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from offbeat_core import ConfigError, OffbeatError, as_written, find_function
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._scoring.config import RewardConfig
from offbeat_data._sources.rows import find_column


class RewardError(OffbeatError):
    """A user's reward function raised, or returned something that is no finite number."""


class NotANumberError(RewardError):
    """A user's reward function returned no finite number, such as a list, None or NaN."""


class FaultyFunctionError(RewardError):
    """A user's reward function raised what it would raise on any completion: its code names what is not there."""


class FunctionFailure(Exception):  # noqa: N818  it is the failure of a call, which becomes a RewardError
    """An exception of a user's function: raised here, or brought from the process in which the function was called.

    Args:
        kind: name of the exception's class.
        text: its own, with the line of the function's file where `is_fault` and that is known.
        is_fault: any completion would raise it: the function names what is not there, or cannot be called so.
    """

    def __init__(self, kind: str, text: str, is_fault: bool) -> None:
        super().__init__(kind, text, is_fault)
        self.kind, self.text, self.is_fault = kind, text, is_fault

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @classmethod
    def of(cls, function: Callable[..., Any], error: BaseException) -> "FunctionFailure":
        """Return what a function has raised; what was brought from another process is returned as it is."""
        if isinstance(error, FunctionFailure):
            return error
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = [frame for frame in frames if frame.filename == _file_of(function)]
        is_fault = _is_fault(error, is_of_call=not own)
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if is_fault and own else ""
        return cls(type(error).__name__, f"{error}{where}", is_fault)


@dataclass(frozen=True, kw_only=True)
class CompletionText:
    """A completion as rewards read it: its text and, where the caller has them, its token ids."""

    text: str
    ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class RewardValue:
    """The value that one reward gives one completion.

    Args:
        value: None where its judge could not read it or does not judge it: that counts as 0.
        extras: other numbers that were found, by name.
        costs: what finding it took, such as tokens of a judge, to be added up over the run.
    """

    value: float | None
    extras: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Call signature of functions of one kind.

    Args:
        words: for people.
        marks: parameter names that only functions of this kind have.
        arguments: of a call; for kinds that take lists, of all completions together.
        takes_list: it gets all completions of a prompt, and returns as many results.
        may_split: it may as well be called with some of them: it does not compare.
        lacks: None or NaN in its results means that it does not judge that completion.
        in_full: what there is by name goes only to parameters of that name, not to `**`.
    """

    words: str
    marks: frozenset[str]
    arguments: Callable[[Prompt, Sequence[CompletionText]], Arguments]
    takes_list: bool = False
    may_split: bool = True
    lacks: bool = False
    in_full: bool = False


def _offbeat(prompt: Prompt, written: Sequence[CompletionText]) -> Arguments:
    return (prompt, written[0].text), {"answer": prompt.answer}


def _offbeat_group(prompt: Prompt, written: Sequence[CompletionText]) -> Arguments:
    return (prompt, [each.text for each in written]), {"answer": prompt.answer}


def _verl(prompt: Prompt, written: Sequence[CompletionText]) -> Arguments:
    row = prompt.fields
    truth = find_column(row, "reward_model.ground_truth")
    extra = row.get("extra_info")
    named = {
        "data_source": row.get("data_source"),
        "solution_str": written[0].text,
        "ground_truth": prompt.answer if truth is None else truth,
        "extra_info": {**(extra if isinstance(extra, dict) else {}), "num_turns": None, "rollout_reward_scores": {}},
    }
    return (), named


def _trl(prompt: Prompt, written: Sequence[CompletionText]) -> Arguments:
    asked, texts = prompt.question, [each.text for each in written]
    is_chat = isinstance(asked, list)
    own = {"prompt", "completion", "completion_ids", prompt.column}
    columns = {name: [value] * len(texts) for name, value in prompt.fields.items() if name not in own}
    named = {
        **columns,
        "prompts": [asked] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [list(each.ids) for each in written],
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    return (), named


def _openrlhf(prompt: Prompt, written: Sequence[CompletionText]) -> Arguments:
    count = len(written)
    return ([prompt.text + each.text for each in written], [prompt.text] * count, [prompt.answer] * count), {}


_GROUP: Final = "offbeat, a group at a time"
SIGNATURES: Final[Mapping[str, Signature]] = {
    "offbeat": Signature(
        words="function(prompt, completion)", marks=frozenset({"completion"}), arguments=_offbeat, in_full=True
    ),
    _GROUP: Signature(
        words="function(prompt, completions), a whole group at a time",
        marks=frozenset(),
        arguments=_offbeat_group,
        takes_list=True,
        may_split=False,
        in_full=True,
    ),
    "verl": Signature(
        words="verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
        marks=frozenset({"solution_str"}),
        arguments=_verl,
    ),
    "trl": Signature(
        words="TRL's reward_func(prompts, completions, **columns)",
        marks=frozenset({"completions", "completion_ids"}),
        arguments=_trl,
        takes_list=True,
        lacks=True,
    ),
    "openrlhf": Signature(
        words="OpenRLHF's reward_func(queries, prompts, labels)",
        marks=frozenset({"queries"}),
        arguments=_openrlhf,
        takes_list=True,
    ),
}


_OTHERS: Final = frozenset({"prompts", "ground_truth", "data_source", "extra_info", "labels"})
"""Names that are not offbeat's own, and that several libraries share."""


class RewardFunction:
    """One function by `module:function` or `file.py:function`, with its signature.

    Attributes:
        signature: how it is called.
        note: the same as text, and whether that was set or found.
        waits: it is a coroutine function.

    Raises:
        ConfigError: it is not there, or cannot be called so.
    """

    def __init__(self, name: str, config: RewardConfig) -> None:
        self._name, self._options = as_written(name), dict(config.function_options.get(name, {}))
        self._function = find_function("reward", name)
        self._parameters = _parameters_of(self._function)
        kind = self._kind(config.signature)
        self.signature = SIGNATURES[kind]
        origin = "as reward.signature says" if config.signature != "auto" else "by the names of its parameters"
        self.note = f"{self._name}: called as {self.signature.words}, {origin}"
        self.waits = _is_coroutine(self._function)
        self._check_bound()

    def __call__(self, prompt: Prompt, written: Sequence[CompletionText]) -> Awaitable[Any] | Any:
        """Return what the function returns, unread."""
        args, named = self.signature.arguments(prompt, written)
        return self._function(*args, **self._accepted(args, named), **self._options)

    def read(self, result: Any, prompt: Prompt, count: int) -> list[RewardValue]:
        """Return what it has returned, one for each completion.

        Raises:
            RewardError: not as many as completions, or one that is no finite number.
        """
        if not self.signature.takes_list:
            return [self._worth(result, prompt)]
        values = _list_of(result.get("rewards") if isinstance(result, dict) else result)
        if values is None or len(values) != count:
            got = _shown(result) if values is None else f"{len(values)} of them"
            raise NotANumberError(
                f"the reward function {self._name} must return a list of {count} numbers, one for each completion: "
                f"on prompt {prompt.index} it returned {got}"
            )
        return [self._worth(value, prompt) for value in values]

    def failed(self, error: Exception, prompt: Prompt) -> RewardError:
        """Return the error that says that it raised."""
        found = FunctionFailure.of(self._function, error)
        text = f"the reward function {self._name} raised {found.kind} on prompt {prompt.index}: {found.text}"
        return FaultyFunctionError(text) if found.is_fault else RewardError(text)

    def _worth(self, value: Any, prompt: Prompt) -> RewardValue:
        extras: dict[str, float] = {}
        if isinstance(value, dict) and "score" in value:
            others = {key: given for key, given in value.items() if key != "score"}
            extras = {str(key): float(given) for key, given in others.items() if _is_finite(given)}
            value = value["score"]
        if self.signature.lacks and (value is None or _is_nan(value)):
            return RewardValue(value=None, extras=extras)
        return RewardValue(value=finite(self._name, value, prompt.index), extras=extras)

    def _kind(self, signature: str) -> str:
        names = set(self._parameters)
        if signature == "offbeat" or (signature == "auto" and "prompt" in names):
            return _GROUP if "completions" in names else "offbeat"
        if signature != "auto":
            return signature
        found = [kind for kind, known in SIGNATURES.items() if not known.marks.isdisjoint(names)]
        if len(found) > 1 or (not found and names & _OTHERS):
            fit = " and ".join(found) or "none"
            raise ConfigError(
                f"reward {self._name}: its parameters {', '.join(self._parameters)} do not show what it was written "
                f"for (it could be {fit}): set reward.signature to offbeat, verl, trl or openrlhf"
            )
        return found[0] if found else "offbeat"

    def _accepted(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return, of what there is by name, what the function has a parameter for that `args` leave free."""
        takes_all = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        takes = named if takes_all and not self.signature.in_full else self._parameters
        given = {*list(self._parameters)[: len(args)], *self._options}
        return {name: value for name, value in named.items() if name in takes and name not in given}

    def _check_bound(self) -> None:
        """Refuse at the start what no call could satisfy; columns of the data are not known here."""
        if self.signature.lacks:
            return
        args, named = self.signature.arguments(_EMPTY, [CompletionText(text="")])
        try:
            inspect.signature(self._function).bind(*args, **self._accepted(args, named), **self._options)
        except TypeError as error:
            raise ConfigError(
                f"reward {self._name} cannot be called as {self.signature.words}: {error}; set reward.signature to "
                "what it was written for, or give what is missing in reward.function_options"
            ) from error
        except ValueError:  # a function of C, which has no signature
            return


def _is_fault(error: BaseException, *, is_of_call: bool) -> bool:
    """Return whether any completion would raise it; `is_of_call`: the call has, and not the function."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType)
    return isinstance(error, NameError | ImportError) or (isinstance(error, TypeError) and is_of_call)


def _file_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getfile(function if inspect.isroutine(function) else type(function))
    except TypeError:  # a function of C
        return ""


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_coroutine(function: Callable[..., Any]) -> bool:
    """Also an object whose class has a coroutine as its call."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _list_of(result: Any) -> list[Any] | None:
    """Return a list, a tuple, or an array of numpy or torch, as a list."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    return list(result) if isinstance(result, list | tuple) else None


def finite(name: str, value: Any, index: int) -> float:
    """Return the number that a reward function has returned.

    Raises:
        NotANumberError: it is none, or not finite.
    """
    # Numbers of numpy and torch answer __float__, and so does an array of one element; a text does not.
    is_number = value is None or hasattr(value, "__float__") or hasattr(value, "__index__")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_number or not math.isfinite(number):
        raise NotANumberError(
            f"the reward function {name} must return a finite number: on prompt {index} it returned {_shown(value)} "
            f"({type(value).__name__})"
        )
    return number


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception as error:  # noqa: BLE001  such as an int of more digits than Python writes
        return f"what cannot be shown: {type(error).__name__}"


_EMPTY: Final = Prompt(index=0, ids=None, text="")  # type: ignore[arg-type]
