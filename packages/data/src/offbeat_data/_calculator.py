"""A calculator as a tool: a safe reader of arithmetic, and the environment in which a model may call it."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from offbeat_data._tools import ToolCall, ToolEnvironment, read_tool_calls
from offbeat_types import ConfigError, DataError

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
    """The value of an arithmetic expression of numbers, + - * / // % ** and parentheses, exact where it has an end.

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
    """An environment with one tool, `calculator`, whose argument is `expression`.

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
