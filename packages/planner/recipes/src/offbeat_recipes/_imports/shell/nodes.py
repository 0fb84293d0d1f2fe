"""Parts of a shell script: commands, their words, and the parts of a word."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Characters as they stand."""

    text: str
    is_quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$NAME` or `${NAME…}`.

    Args:
        prefix: "#" for a length, "!" for the variable that is named by this one.
        index: of an array, "" where there is none.
        rest: operator and its argument, such as ":-512".
        source: as it is written.
    """

    name: str
    prefix: str
    index: str
    rest: str
    source: str
    is_quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """`$((…))`."""

    expression: str


@dataclass(frozen=True)
class Substitution:
    """`$(…)`, or the same between backticks."""

    command: str
    source: str
    is_quoted: bool


Part = Text | Parameter | Arithmetic | Substitution
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, `NAME=(values)`, `NAME[index]=value`."""

    name: str
    index: str | None
    is_added: bool
    value: Word | tuple[Word, ...]
    is_array: bool


@dataclass(frozen=True)
class Simple:
    """A program or a builtin with its words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Test:
    """`[[ … ]]`, or `(( … ))` with the expression as its only word."""

    words: tuple[Word, ...]
    expression: str = ""


@dataclass(frozen=True)
class Joined:
    """Commands joined by `&&`, `||` (each before its command, "" before the first) or by `|`."""

    parts: tuple[tuple[str, "Command"], ...]


@dataclass(frozen=True)
class Negated:
    """`! command`."""

    command: "Command"


@dataclass(frozen=True)
class Branches:
    """`if`: pairs of a condition (None: otherwise) and what follows from it."""

    pairs: tuple[tuple["Commands | None", "Commands"], ...]


@dataclass(frozen=True)
class Case:
    """`case word in pattern) …`."""

    word: Word
    items: tuple[tuple[tuple[Word, ...], "Commands"], ...]


@dataclass(frozen=True)
class Loop:
    """`for name in words`; `while` where there is a condition."""

    name: str
    words: tuple[Word, ...]
    condition: "Commands | None"
    body: "Commands"
    is_until: bool = False


@dataclass(frozen=True)
class Group:
    """`{ … }`, `( … )`, or the body of a function, which has a name."""

    body: "Commands"
    name: str = ""
    is_subshell: bool = False


Command = Simple | Test | Joined | Negated | Branches | Case | Loop | Group


@dataclass(frozen=True)
class Line:
    """A command with the text it was read from."""

    command: Command
    source: str


Commands = tuple[Line, ...]
