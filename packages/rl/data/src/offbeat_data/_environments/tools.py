"""Tools that a model calls in its text: read its calls, run them, send it their results; and a calculator.

Source of the call format: Qwen3's and Hermes' chat templates, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import ast
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from offbeat_core import ConfigError, DataError
from offbeat_data._chat.template import Message
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._images import is_image
from offbeat_data._scoring.answers import between
from offbeat_data._scoring.rewards import RewardScore
from offbeat_data._sources.rows import as_text

_MARKS: Final = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it.

    Args:
        name: of the tool.
        arguments: by name.
        complaint: why it cannot be read; empty for one that can.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    complaint: str = ""


def read_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a turn, in order; none when the model calls no tool."""
    return [_read_call(found) for found, _, _ in between(text, *_MARKS)]


def without_tool_calls(text: str) -> str:
    """Return what a turn says beside its calls."""
    parts, last = [], 0
    for _, start, end in between(text, *_MARKS):
        parts.append(text[last:start])
        last = end
    return "".join([*parts, text[last:]]).strip()


def _read_call(found: str) -> ToolCall:
    try:
        call = json.loads(found)
        json.dumps(call, ensure_ascii=False).encode()  # an escape may stand for half a character, which no tool takes
    except (ValueError, RecursionError) as error:
        return ToolCall(complaint=f"a tool call must be a JSON object: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(complaint='a tool call must be a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], complaint='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)


class ToolEnvironment:
    """The model may call tools; its first turn without a call is its answer, which the `reward` section scores.

    What is wrong with a call, or goes wrong in it, is reported to the model.

    Args:
        tools: functions by name, async or not, called with the arguments by name. What they return is sent as text; but
            a list of parts of a chat message, some of them images ({"type": "image_url", ...}), is shown as it is.
        read_calls: finds the calls in a turn.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        read_calls: Callable[[str], Sequence[ToolCall]] = read_tool_calls,
    ) -> None:
        self._tools, self._read_calls = dict(tools), read_calls

    async def reset(self, prompt: Prompt) -> None:
        pass

    async def step(self, text: str) -> Sequence[Message] | None:
        calls = self._read_calls(text)
        if not calls:
            return None
        return [{"role": "tool", "name": call.name, "content": await self._answer(call)} for call in calls]

    async def reward(self) -> RewardScore | None:
        return None

    async def close(self) -> None:
        pass

    async def _answer(self, call: ToolCall) -> str | list[Any]:
        if call.complaint:
            return f"error: {call.complaint}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name}; there are {', '.join(self._tools)}"
        try:
            value = tool(**call.arguments)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, list) and any(map(is_image, value)) else as_text(value)
        except Exception as error:  # noqa: BLE001  whatever a tool makes of the model's arguments is the model's to mend
            return f"error: {error}"


_LONGEST_EXPRESSION: Final = 200
_LARGEST: Final = 10**40
_LARGEST_EXPONENT: Final = 64
_OPERATORS: Final[dict[type[ast.AST], Callable[..., Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression of numbers, + - * / // % ** and parentheses, exact where it can be.

    Raises:
        DataError: it is something else, divides by zero, or is too large; nothing else is ever evaluated.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise DataError(f"an expression may have {_LONGEST_EXPRESSION} characters, this one has {len(expression)}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _as_decimal(_value(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"cannot read {expression!r}: numbers, + - * / // % ** and parentheses are known") from error
    except ZeroDivisionError as error:
        raise DataError("division by zero") from error


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))  # 0.1 as it is written, not as it is stored
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            value = _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            value = _OPERATORS[type(sign)](_value(operand))
        case _:
            raise ValueError(type(node).__name__)
    if max(abs(value.numerator), value.denominator) > _LARGEST:
        raise DataError("the result is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
        raise DataError(f"an exponent must be a whole number of at most {_LARGEST_EXPONENT}")
    return Fraction(base ** int(exponent))


def _as_decimal(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def calculator(pattern: str = "") -> ToolEnvironment:
    """Return an environment with one tool, `calculator`, whose argument is `expression`.

    Args:
        pattern: regular expression that finds a call, its first group the expression, such as `\\[(.*?)\\]`; empty for
            the calls that `read_tool_calls` reads.

    Raises:
        ConfigError: pattern is no regular expression with a group.
    """
    tools = {"calculator": calculate}
    return ToolEnvironment(tools, _bracket_reader(pattern)) if pattern else ToolEnvironment(tools, read_tool_calls)


def _bracket_reader(pattern: str) -> Callable[[str], list[ToolCall]]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"environment.options: pattern is not a regular expression: {error}; got {pattern!r}"
        ) from error
    if not compiled.groups:
        raise ConfigError(f"environment.options: pattern needs a group around the expression: got {pattern!r}")

    def read(text: str) -> list[ToolCall]:
        return [
            ToolCall(name="calculator", arguments={"expression": found.group(1)}) for found in compiled.finditer(text)
        ]

    return read
