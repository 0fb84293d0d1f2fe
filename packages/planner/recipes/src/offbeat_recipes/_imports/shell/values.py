"""Gives the words of a shell script their values, from what the script itself sets.

What only the machine knows (a variable of the environment, the output of a command) stays in a value as it is written,
between two marks; a value with a mark is open: no condition is decided on it.
"""

import ast
import operator
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, Final

from offbeat_recipes._imports.shell.nodes import (
    Arithmetic,
    Command,
    Joined,
    Parameter,
    Part,
    Substitution,
    Text,
    Word,
)
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
_SETS: Final = re.compile(
    r"\s*(?:(?P<first>\+\+|--)\s*(?P<after>[A-Za-z_]\w*)"
    r"|(?P<name>[A-Za-z_]\w*)\s*(?:(?P<step>\+\+|--)|(?P<sign>[-+*/%]?)=(?!=)(?P<right>.+)))\s*",
    re.DOTALL,
)
"""An expression that sets a variable."""
_REPLACEMENT: Final = re.compile(r"(?P<old>(?:[^\\/]|\\.)*)(?:/(?P<new>.*))?", re.DOTALL)
_SLICE: Final = re.compile(r":(.*)", re.DOTALL)
_MAX_CUT: Final = 10_000
"""Characters of a value that an end is cut from: each end is tried."""


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
        script: its path, "" where that is not known.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, dict[str, str]] = field(default_factory=dict)
    arguments: list[str] | None = None
    defaults: dict[str, str] = field(default_factory=dict)
    script: str = ""

    def copy(self) -> "Values":
        """Return values that can be set without a change to these."""
        arrays = {name: dict(held) for name, held in self.arrays.items()}
        arguments = None if self.arguments is None else list(self.arguments)
        return Values(dict(self.variables), arrays, arguments, dict(self.defaults), self.script)

    def text(self, word: Word) -> str:
        """Return the value of a word that is not split, such as one that is assigned."""
        return "".join(" ".join(self._values(part)) for part in word)

    def fields(self, word: Word) -> list[str]:
        """Return the words that a word of a command becomes: what is not quoted is split at blanks."""
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
        """Return the value of an arithmetic expression.

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

    def calculate(self, expression: str) -> int:
        """Return the value of `(( … ))`, which may set a variable, as in `N++` or `N = 2 * M`.

        Raises:
            OpenValueError: it depends on the machine, or is not understood; a variable that it sets is open then too.
        """
        if not (found := _SETS.fullmatch(expression)):
            return self.number(expression)
        name, step = found["name"] or found["after"], found["first"] or found["step"]
        sign, right = (step[0], "1") if step else (found["sign"], found["right"])
        try:
            old = self.number(name) if sign else 0
            value = self.number(f"{old} {sign} ({right})" if sign else right)
        except OpenValueError:
            self.variables[name] = _open(f"$(({expression.strip()}))")
            raise
        self.variables[name] = str(value)
        return old if found["step"] else value

    def _evaluate(self, node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name) if name in self.variables and MARK not in self.variables[name]:
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
        """Return one value, or with `"${array[@]}"` any number."""
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
        if part.rest and not re.match(r":?[-=+?]", part.rest):
            found = self._each(part, found)
        return [" ".join(found)] if part.is_quoted and "*" in (part.index, part.name) else found

    def _each(self, part: Parameter, held: list[str]) -> list[str]:
        """`${array[@]:1:2}`, or an operation on each value, as in `${array[@]/#/--}`."""
        if not (found := _SLICE.fullmatch(part.rest)):
            return [self._operated(part, value) for value in held]
        start, _, length = self._argument(found[1], part).partition(":")
        try:
            begin = self.number(start)
            held = held if part.index else ["", *held]  # "$@" begins with the script itself
            return held[begin:][: self.number(length)] if length else held[begin:]
        except OpenValueError:
            return [_open(part.source)]

    def _output(self, command: str, source: str) -> str:
        """Return what a command prints where that depends on no machine: nothing, `echo`, a part of a path."""
        try:
            lines = ShellParser(command).script(lambda _: None)
        except ShellSyntaxError:
            return _open(source)
        if not lines and not re.sub(r"#.*", "", command).strip():
            return ""
        words = getattr(lines[0].command, "words", ()) if len(lines) == 1 else ()
        found = [value for word in words for value in self.fields(word)]
        if found == ["pwd"]:
            return _open("${PWD}")
        if len(lines) == 1 and (folder := self._folder(lines[0].command)):
            return folder
        if len(found) > 1 and found[0] in _PATHS and not any(MARK in value for value in found):
            name = _PATHS[found[0]](found[1])
            return name.removesuffix(found[2]) if len(found) > 2 else name
        if found and found[0] == "echo" and not getattr(lines[0].command, "assignments", ()):
            return " ".join(found[1:])
        return _open(source)

    def _folder(self, command: Command) -> str:
        """Return the folder of `cd FOLDER && pwd`, or the file of `readlink -f FILE` and the like, without any "..".

        "" where it is something else, or where only the machine knows.
        """
        if isinstance(command, Joined) and [joint for joint, _ in command.parts] == ["", "&&"]:
            (_, first), (_, last) = command.parts
            printed = [self.fields(word) for word in getattr(last, "words", ())]
            wanted = ["cd"] if printed[:1] == [["pwd"]] else []
        else:
            first, wanted = command, ["realpath", "readlink"]
        words = [value for word in getattr(first, "words", ()) for value in self.fields(word)]
        places = [word for word in words[1:] if not word.startswith("-")]
        if not words or words[0] not in wanted or len(places) != 1 or MARK in places[0] or not self.script:
            return ""
        return posixpath.normpath(posixpath.join(posixpath.abspath(self.script), "..", places[0]))

    def _look_up(self, part: Parameter) -> str | None:
        """Return the value of a variable, or None where it is not set."""
        if self.script and (part.name == "0" or (part.name == "BASH_SOURCE" and part.index in ("", "0"))):
            return posixpath.abspath(self.script)
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
        if sign in ("/", "//"):
            return self._replaced(sign, argument, value, part)
        return self._changed(sign, self._argument(argument, part), value, part)

    def _argument(self, argument: str, part: Parameter) -> str:
        return self.text(ShellParser(argument).word(ends="", is_quoted=part.is_quoted))

    def _replaced(self, sign: str, argument: str, value: str, part: Parameter) -> str:
        """`${NAME/pattern/replacement}`; a pattern may have `\\/`, and begin with `#` or `%` for one end."""
        found = _REPLACEMENT.fullmatch(argument)
        pattern, replacement = (self._argument((found and found[name]) or "", part) for name in ("old", "new"))
        bound = pattern[:1] if sign == "/" and pattern[:1] in ("#", "%") else ""
        inner = translate(pattern.removeprefix(bound)).removesuffix(r"\Z").removesuffix(r"\z")
        inner = {"#": rf"\A{inner}", "%": rf"{inner}\Z"}.get(bound, inner)
        return re.sub(inner, lambda _: replacement, value, count=0 if sign == "//" else 1)

    def _changed(self, sign: str, argument: str, value: str, part: Parameter) -> str:
        if sign in ("^", "^^", ",", ",,"):
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if len(value) > _MAX_CUT and sign[0] in "#%":
            return _open(part.source)
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
    """Return whether a text fits a pattern of `case` or `[[ == ]]`; what is quoted stands for itself."""
    pieces = [
        piece
        for part in word
        for piece in _pieces(values.text((part,)), is_quoted=bool(getattr(part, "is_quoted", False)))
    ]
    if len(text) > _MAX_CUT:
        return False
    places = {0}  # of the text, that are reached after each piece: no pattern takes long, unlike a regular expression
    for piece in pieces:
        if piece == "*":
            places = set(range(min(places), len(text) + 1)) if places else places
        else:
            places = {at + 1 for at in places if at < len(text) and _is_one(piece, text[at])}
    return len(text) in places


def _is_one(piece: str, character: str) -> bool:
    try:
        return re.fullmatch(piece, character, re.DOTALL) is not None
    except re.error:  # such as [z-a]
        return False


def _pieces(text: str, *, is_quoted: bool) -> list[str]:
    """Return the characters of a pattern, each as a regular expression; "*" is any number of them."""
    if is_quoted:
        return [re.escape(character) for character in text]
    found = re.findall(r"\[[^\]]+\]|.", text, flags=re.DOTALL)
    return [
        each.replace("[!", "[^") if len(each) > 1 else {"*": "*", "?": "."}.get(each, re.escape(each)) for each in found
    ]
