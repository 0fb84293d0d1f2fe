"""Gives the words of a shell script their values, from what the script itself sets.

What only the machine knows (a variable of the environment, the output of a command) stays in a value as it is written,
between two marks; a value with a mark is open: no condition is decided on it.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, Final

from offbeat_recipes._imports.shell.nodes import Arithmetic, Parameter, Part, Substitution, Text, Word
from offbeat_recipes._imports.shell.syntax import ShellParser, ShellSyntaxError

MARK: Final = "\0"
_ATOMS: Final = re.compile(r"(?:\0[^\0]*\0|[^\s\0])+")
_OPERATION: Final = re.compile(r"(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)(.*)", re.DOTALL)
_PATHS: Final[dict[str, Callable[[str], str]]] = {
    "basename": lambda path: path.rstrip("/").rsplit("/", 1)[-1],
    "dirname": lambda path: path.rstrip("/").rsplit("/", 1)[0] if "/" in path.rstrip("/") else ".",
}
_OPERATORS: Final[dict[type, Callable[[int, int], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),  # a shell cuts towards 0
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LARGEST: Final = 2**63


class OpenValueError(Exception):
    """A number cannot be had without the machine."""


@dataclass
class Values:
    """Variables and arrays that the script has set so far.

    Args:
        variables: by name.
        arrays: by name; a table by its keys, a list by "0", "1", ….
        arguments: of the script, or of the function that is called.
        defaults: by the name of a variable that the script leaves to the environment, what `${NAME:-default}` gives it.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, dict[str, str]] = field(default_factory=dict)
    arguments: list[str] | None = None
    defaults: dict[str, str] = field(default_factory=dict)

    def text(self, word: Word) -> str:
        """The value of a word that is not split, such as one that is assigned."""
        return "".join(" ".join(self._values(part)) for part in word)

    def fields(self, word: Word) -> list[str]:
        """The words that a word of a command becomes: what is not quoted is split at blanks."""
        found: list[str] = []
        held: str | None = None
        for part in word:
            values = self._values(part)
            if isinstance(part, Parameter | Substitution) and not part.is_quoted:
                joined = " ".join(values)
                values = _ATOMS.findall(joined)
                if held is not None and joined[:1].isspace():
                    found.append(held)
                    held = None
                after = joined[-1:].isspace()
            else:
                after = False
                if not values:
                    continue
            for position, value in enumerate(values):
                if position:
                    found.append(held or "")
                    held = None
                held = (held or "") + value
            if after and held is not None:
                found.append(held)
                held = None
        return found if held is None else [*found, held]

    def number(self, expression: str) -> int:
        """The value of an arithmetic expression.

        Raises:
            OpenValueError: it depends on the machine, or is not understood.
        """
        try:
            text = self.text(ShellParser(expression).word(ends="", is_quoted=True))
            python = text.replace("&&", " and ").replace("||", " or ")
            python = re.sub(r"!(?!=)", " not ", re.sub(r"(?<!/)/(?!/)", "//", python))
            return int(self._evaluate(ast.parse(" ".join(python.split()), mode="eval").body))
        except (ShellSyntaxError, SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
            raise OpenValueError(expression) from error

    def _evaluate(self, node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name) if name in self.variables:
                return self.number(self.variables[name] or "0")
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                value = _OPERATORS[type(sign)](self._evaluate(left), self._evaluate(right))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
                value = _OPERATORS[type(sign)](self._evaluate(left), self._evaluate(right))
            case ast.BoolOp(op=sign, values=values):
                found = [bool(self._evaluate(each)) for each in values]
                value = all(found) if isinstance(sign, ast.And) else any(found)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = -self._evaluate(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = not self._evaluate(operand)
            case _:
                raise ValueError(type(node).__name__)
        if abs(value) > _LARGEST:
            raise ValueError("too large")
        return int(value)

    def _values(self, part: Part) -> list[str]:
        """One value, or with `"${array[@]}"` any number."""
        match part:
            case Text(text):
                return [text]
            case Arithmetic(expression):
                try:
                    return [str(self.number(expression))]
                except OpenValueError:
                    return [_open(f"$(({expression}))")]
            case Substitution(command, source):
                return [self._output(command, source)]
            case Parameter():
                try:
                    return (
                        self._all(part)
                        if "@" in (part.index, part.name) or "*" in (part.index, part.name)
                        else [self._parameter(part)]
                    )
                except ShellSyntaxError:
                    return [_open(part.source)]
        raise TypeError(part)

    def _all(self, part: Parameter) -> list[str]:
        """`${array[@]}`, or `$@`."""
        found = list(self.arguments or [])
        if part.index:
            single = [self.variables[part.name]] if part.name in self.variables else []
            found = list(self.arrays[part.name].values()) if part.name in self.arrays else single
        if part.prefix == "#":
            return [str(len(found))]
        if not found and part.rest:
            value = self._operated(part, None)
            return [value] if value else []
        return [" ".join(found)] if part.is_quoted and "*" in (part.index, part.name) else found

    def _output(self, command: str, source: str) -> str:
        """What a command prints, where that takes no machine: nothing, `echo`, `basename`, `dirname`."""
        try:
            lines = ShellParser(command).script(lambda _: None)
        except ShellSyntaxError:
            return _open(source)
        if not lines and not re.sub(r"#.*", "", command).strip():
            return ""
        words = getattr(lines[0].command, "words", ()) if len(lines) == 1 else ()
        found = [value for word in words for value in self.fields(word)]
        if len(found) > 1 and found[0] in _PATHS and not any(MARK in value for value in found):
            name = _PATHS[found[0]](found[1])
            return name.removesuffix(found[2]) if len(found) > 2 else name
        if found and found[0] == "echo" and not getattr(lines[0].command, "assignments", ()):
            return " ".join(found[1:])
        return _open(source)

    def _look_up(self, part: Parameter) -> str | None:
        """The value of a variable, or None where it is not set."""
        if part.name.isdigit() or part.name == "#":
            if self.arguments is None:
                return None
            if part.name == "#":
                return str(len(self.arguments))
            position = int(part.name) - 1
            return self.arguments[position] if 0 <= position < len(self.arguments) else None
        if part.index or (part.name in self.arrays and part.name not in self.variables):
            held = self.arrays.get(part.name, {})
            key = self.text(ShellParser(part.index or "0").word(ends="", is_quoted=True))
            if key not in held:
                try:
                    key = str(self.number(key))
                except OpenValueError:
                    return None
            return held.get(key)
        return self.variables.get(part.name)

    def _parameter(self, part: Parameter) -> str:
        value = self._look_up(part)
        if part.prefix == "#":
            return _open(part.source) if value is None or MARK in value else str(len(value))
        if part.prefix == "!":
            if value is None or MARK in value:
                return _open(part.source)
            value = self.variables.get(value)
        if part.rest:
            return self._operated(part, value)
        if value is None and part.name in ("?", "$", "!", "-", "0", "#"):
            return _open(part.source)
        return _open(f"${{{part.name}}}") if value is None else value

    def _operated(self, part: Parameter, value: str | None) -> str:
        """`${NAME:-word}` and its like."""
        if not (found := _OPERATION.fullmatch(part.rest)):
            return _open(part.source)
        sign, argument = found[1], found[2]
        if sign in ("-", ":-", "=", ":="):
            if value is not None and (value or not sign.startswith(":")):
                return value
            default = self._argument(argument, part)
            if value is None and re.fullmatch(r"[A-Za-z_]\w*", part.name):
                self.defaults.setdefault(part.name, default.replace(MARK, ""))
            if sign.endswith("="):
                self.variables[part.name] = default
            return default
        if sign in ("+", ":+"):
            return self._argument(argument, part) if value or (value is not None and sign == "+") else ""
        if value is None:
            return _open(f"${{{part.name}}}" if sign in ("?", ":?") else part.source)
        if sign in ("?", ":?"):
            return value
        if MARK in value:
            return _open(part.source)
        return self._changed(sign, self._argument(argument, part), value, part)

    def _argument(self, argument: str, part: Parameter) -> str:
        return self.text(ShellParser(argument).word(ends="", is_quoted=part.is_quoted))

    def _changed(self, sign: str, argument: str, value: str, part: Parameter) -> str:
        if sign in ("^", "^^", ",", ",,"):
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if sign in ("#", "##"):
            ends = range(len(value) + 1)
            found = (value[end:] for end in (ends if sign == "#" else reversed(ends)) if _fits(value[:end], argument))
            return next(found, value)
        if sign in ("%", "%%"):
            starts = range(len(value), -1, -1)
            found = (
                value[:start]
                for start in (starts if sign == "%" else reversed(starts))
                if _fits(value[start:], argument)
            )
            return next(found, value)
        if sign in ("/", "//"):
            pattern, _, replacement = argument.partition("/")
            inner = translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
            return re.sub(inner, lambda _: replacement, value, count=0 if sign == "//" else 1)
        try:
            start, _, length = argument.partition(":")
            begin = self.number(start)
            return value[begin:][: self.number(length)] if length else value[begin:]
        except OpenValueError:
            return _open(part.source)


def _open(source: str) -> str:
    return f"{MARK}{source.replace(MARK, '')}{MARK}"


def _fits(text: str, pattern: str) -> bool:
    return re.fullmatch(translate(pattern), text) is not None


def fits(text: str, word: Word, values: Values) -> bool:
    """Whether a text fits a pattern of `case` or `[[ == ]]`; what is quoted stands for itself."""
    parts = [
        re.escape(values.text((part,))) if getattr(part, "is_quoted", False) else _pattern(values.text((part,)))
        for part in word
    ]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _pattern(text: str) -> str:
    """As a regular expression, without its anchors."""

    def part(found: re.Match[str]) -> str:
        if len(found[0]) > 1:
            return found[0].replace("[!", "[^")
        return {"*": ".*", "?": "."}.get(found[0], re.escape(found[0]))

    return re.sub(r"\[[^\]]+\]|.", part, text, flags=re.DOTALL)
