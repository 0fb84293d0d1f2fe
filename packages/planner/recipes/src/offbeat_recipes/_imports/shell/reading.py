"""Follows a shell script as bash would, and gives the words of the commands it would start. Nothing is run.

What only the machine knows stays open: a variable that the script does not set stays a reference to the environment,
`${NAME}`, which our configuration reads in the same way; a default, `${NAME:-512}`, stands. A condition on something
open is not decided: what was set before it, or in the first of its branches, stands, and the reading says so.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

from offbeat_recipes._imports.shell.nodes import (
    Assignment,
    Branches,
    Case,
    Command,
    Commands,
    Group,
    Joined,
    Line,
    Loop,
    Negated,
    Parameter,
    Simple,
    Test,
    Text,
    Word,
)
from offbeat_recipes._imports.shell.syntax import DECLARING, ShellParser
from offbeat_recipes._imports.shell.values import MARK, OpenValueError, Values, fits

_OVERRIDE: Final = re.compile(r"[+~]{0,2}(?P<name>[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(?P<value>.*)", re.DOTALL)
_MODULE: Final = re.compile(r"(verl|recipe|openrlhf)\.")
_PREFIXES: Final = frozenset({"exec", "command", "builtin", "nohup", "sudo", "env", "time"})
_MAX_CALLS: Final = 20
"""Functions that call functions; one that calls itself never ends here."""
_MAX_ROUNDS: Final = 100


class _EndError(Exception):
    """`exit`."""


class _ReturnError(Exception):
    """`return`."""


class _BreakError(Exception):
    """`break`."""


@dataclass
class ShellReading:
    """What a script would do.

    Args:
        commands: the words of each program with overrides such as `data.max_prompt_length=1024`, in their order.
        undecided: conditions that only the machine decides, with what they leave open.
        not_understood: words and lines that say something and were not read.
        defaults: of variables that the script leaves to the environment.
        exports: variables that it gives to what it starts.
    """

    commands: list[list[str]] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)


def read_shell(text: str, given: Mapping[str, str] | None = None) -> ShellReading:
    """Follow a script from its first line to its last.

    Args:
        text: of a script of bash or sh.
        given: variables of the environment that are known.
    """
    reader = _Reader(text)
    reader.values.variables |= given or {}
    reader.read(ShellParser(text).script(reader.tell))
    reader.reading.defaults = reader.values.defaults
    return reader.reading


@dataclass
class _Reader:
    text: str
    reading: ShellReading = field(default_factory=ShellReading)
    values: Values = field(default_factory=Values)
    functions: dict[str, Commands] = field(default_factory=dict)
    calls: int = 0

    def read(self, lines: Commands) -> None:
        self._ends(lines)

    def tell(self, text: str) -> None:
        if (shown := _shown(text)) not in self.reading.not_understood:
            self.reading.not_understood.append(shown)

    def _run(self, lines: Commands) -> bool | None:
        """The state of the last command: whether it succeeds, None where that is not known."""
        state: bool | None = True
        for line in lines:
            state = self._follow(line.command, line.source)
        return state

    def _follow(self, command: Command, source: str) -> bool | None:
        match command:
            case Simple():
                return self._simple(command)
            case Test():
                return self._test(command)
            case Negated(inner):
                state = self._follow(inner, source)
                return None if state is None else not state
            case Joined(parts):
                return self._joined(parts, source)
            case Branches(pairs):
                return self._branches(pairs)
            case Case():
                return self._case(command, source)
            case Loop():
                return self._loop(command)
            case Group(body, name):
                if name:
                    self.functions[name] = body
                    return True
                return self._subshell(body) if command.is_subshell else self._run(body)

    def _subshell(self, body: Commands) -> bool | None:
        """What it sets is gone when it ends."""
        outer, self.values = self.values, deepcopy(self.values)
        try:
            return self._run(body)
        except _EndError:
            return None
        finally:
            self.values = outer

    def _joined(self, parts: tuple[tuple[str, Command], ...], source: str) -> bool | None:
        state: bool | None = True
        for joint, command in parts:
            is_wanted = {"&&": state, "||": None if state is None else not state}.get(joint, True)
            if is_wanted:
                state = self._follow(command, source)
            elif is_wanted is None:
                self._undecided(source, [(Line(command, source),)])
                state = None
        return state

    def _branches(self, pairs: tuple[tuple[Commands | None, Commands], ...]) -> bool | None:
        for position, (condition, body) in enumerate(pairs):
            state = True if condition is None else self._run(condition)
            if state:
                return self._run(body)
            if state is None:
                shown = "; ".join(line.source for line in condition or ())
                bodies = [each for _, each in pairs[position:]]
                self._undecided(shown, bodies, is_one_taken=pairs[-1][0] is None)
                return None
        return True

    def _case(self, command: Case, source: str) -> bool | None:
        text = self.values.text(command.word)
        if MARK in text and (assumed := self._assumed(command, source)):
            text = assumed
        if MARK in text:
            is_one_taken = any(_plain(pattern) == "*" for patterns, _ in command.items for pattern in patterns)
            bodies = [body for _, body in command.items]
            self._undecided(source.partition("\n")[0], bodies, is_one_taken=is_one_taken)
            return None
        for patterns, body in command.items:
            if any(fits(text, pattern, self.values) for pattern in patterns):
                return self._run(body)
        return True

    def _assumed(self, command: Case, source: str) -> str:
        """The first value that a variable is asked for: it stands for what follows, so that all branches agree."""
        name = next((part.name for part in command.word if isinstance(part, Parameter)), "")
        patterns = command.items[0][0] if command.items else ()
        value = _plain(patterns[0]) if patterns else ""
        if not name or not re.fullmatch(r"[\w.-]+", value):
            return ""
        self.values.variables[name] = value
        self.reading.undecided.append(f"{_shown(source.partition(chr(10))[0])}: {name} = {value} is assumed")
        return value

    def _loop(self, command: Loop) -> bool | None:
        try:
            if command.condition is None:
                self._for_each(command)
            else:
                self._while(command.condition, command.body, is_until=command.is_until)
        except _BreakError:
            pass
        return True

    def _for_each(self, command: Loop) -> None:
        for word in command.words:
            for value in self.values.fields(word):
                self.values.variables[command.name] = value
                self._run(command.body)

    def _while(self, condition: Commands, body: Commands, *, is_until: bool) -> None:
        for _ in range(_MAX_ROUNDS):
            state = self._run(condition)
            if state is None:
                self._undecided("; ".join(line.source for line in condition), [body])
            if state is None or state is is_until:
                return
            self._run(body)

    def _undecided(self, condition: str, bodies: list[Commands], *, is_one_taken: bool = False) -> None:
        """Follow branches of which one may be taken: what was set before stands, or else what the first sets.

        Args:
            condition: as it is written.
            bodies: of the branches.
            is_one_taken: there is an `else`: the first branch that does not end the script stands as a whole.
        """
        before, after = self.values, []
        for body in bodies:
            self.values = deepcopy(before)
            if not self._ends(body):
                after.append(self.values)
        if is_one_taken and after:
            self.values = after.pop(0)
        else:
            self.values = before
        for other in after:
            if not is_one_taken:
                self.values.variables = other.variables | self.values.variables
                self.values.arrays = other.arrays | self.values.arrays
        others = [*after, before] if not is_one_taken else after
        if told := self._differences(others):
            text = f"{_shown(condition)}: {', '.join(told)}"
            if text not in self.reading.undecided:
                self.reading.undecided.append(text)

    def _ends(self, body: Commands) -> bool:
        try:
            self._run(body)
        except (_EndError, _ReturnError, _BreakError):
            return True
        return False

    def _differences(self, others: list[Values]) -> list[str]:
        """What would be another way after another branch, where the script makes use of it."""
        told = []
        for name, value in self.values.variables.items():
            different = dict.fromkeys(each.variables[name] for each in others if name in each.variables)
            different.pop(value, None)
            if different and re.search(rf"\$\{{?{name}\b", self.text):
                shown = " or ".join(_shown(_bare(each)) or "nothing" for each in different)
                told.append(f"{name} = {_shown(_bare(value)) or 'nothing'} is assumed, not {shown}")
        for name, held in self.values.arrays.items():
            more = [word for each in others for word in each.arrays.get(name, {}).values() if word not in held.values()]
            told += [f"{_shown(_bare(word))} is left out" for word in dict.fromkeys(more) if _OVERRIDE.fullmatch(word)]
        return told

    def _assign(self, one: Assignment) -> None:
        if one.is_array:
            self._assign_array(one)
        elif one.index is not None:
            self.values.arrays.setdefault(one.name, {})[self.values.text((Text(one.index, is_quoted=True),))] = (
                self.values.text(_word(one))
            )
        else:
            before = self.values.variables.get(one.name, "") if one.is_added else ""
            value = self.values.text(_word(one))
            self.values.variables[one.name] = before + value

    def _assign_array(self, one: Assignment) -> None:
        held = self.values.arrays.get(one.name)
        found: dict[str, str] = dict(held or {}) if one.is_added else {}
        for word in one.value:
            for value in self.values.fields(word if isinstance(word, tuple) else (word,)):
                if entry := re.fullmatch(r"\[([^\]]*)\]=(.*)", value, re.DOTALL):
                    found[entry[1]] = entry[2]
                else:
                    found[str(len(found))] = value
        self.values.arrays[one.name] = found
        self.values.variables.pop(one.name, None)

    def _simple(self, command: Simple) -> bool | None:
        words = [value for word in command.words for value in self.values.fields(word)]
        while words and words[0] in _PREFIXES:
            words.pop(0)
            while words and (words[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", words[0])):
                words.pop(0)
        if not words or words[0] in DECLARING:
            for one in command.assignments:
                self._assign(one)
                if words[:1] == ["export"]:
                    self._export(one, self.values.variables.get(one.name, ""))
            return True
        for one in command.assignments:
            self._export(one, self.values.text(_word(one)))
        return self._call(words)

    def _export(self, one: Assignment, value: str) -> None:
        if not one.is_array:
            self.reading.exports[one.name] = _shown(_bare(value))

    def _call(self, words: list[str]) -> bool | None:
        match words:
            case ["true" | ":", *_]:
                return True
            case ["false", *_]:
                return False
            case ["[" | "test", *inner]:
                return decide([value for value in inner if value != "]"], self.values.variables)
            case ["exit", *_]:
                raise _EndError
            case ["return", *_]:
                raise _ReturnError
            case ["break", *_]:
                raise _BreakError
            case ["unset", *names]:
                for name in names:
                    self.values.variables.pop(name, None)
                    self.values.arrays.pop(name, None)
                return True
            case ["shift", *_] if self.values.arguments is not None:
                del self.values.arguments[:1]
                return True
            case ["set", *arguments]:
                if "--" in arguments:
                    self.values.arguments = arguments[arguments.index("--") + 1 :]
                return True
            case [*_, "bash" | "sh", "-c", text]:
                return self._run(ShellParser(_bare(text)).script(self.tell))
            case ["eval", *texts]:
                return self._run(ShellParser(_bare(" ".join(texts))).script(self.tell))
            case ["source" | ".", file, *_]:
                self.tell(f"source {_bare(file)}: what it sets is not read")
                return True
            case ["mapfile" | "readarray" | "read", *_]:
                self.tell(_bare(" ".join(words)))
                return None
            case [name, *arguments] if name in self.functions and self.calls < _MAX_CALLS:
                return self._function(name, arguments)
        self._record(words)
        return True if words[0] in ("cd", "echo", "mkdir", "sleep") else None

    def _function(self, name: str, arguments: list[str]) -> bool | None:
        outer = self.values.arguments
        self.values.arguments, self.calls = arguments, self.calls + 1
        try:
            return self._run(self.functions[name])
        except _ReturnError:
            return None
        finally:
            self.values.arguments, self.calls = outer, self.calls - 1

    def _record(self, words: list[str]) -> None:
        """Keep a command that has overrides, or may have them in words that are not known."""
        bare = [_bare(word) for word in words]
        if _OVERRIDE.fullmatch(bare[0]):
            self.tell(f"{bare[0]}: stands in no command (the line before it ends without a backslash)")
        elif any(_OVERRIDE.fullmatch(word) or _MODULE.match(word) for word in bare[1:]):
            self.reading.commands.append(bare)

    def _test(self, command: Test) -> bool | None:
        if command.expression:
            try:
                return self.values.number(command.expression) != 0
            except OpenValueError:
                return None
        return decide(list(self._operands(command.words)), self.values.variables)

    def _operands(self, words: tuple[Word, ...]) -> Iterator[str]:
        """The values of the words of `[[ … ]]`; a pattern that fits is given as the text that it fits."""
        before = ["", ""]
        for word in words:
            value = self.values.text(word)
            if before[1] in ("==", "=", "!=") and MARK not in before[0] + value:
                value = before[0] if fits(before[0], word, self.values) else f"{before[0]}{value}."
            yield value
            before = [before[1], value]


def _word(one: Assignment) -> Word:
    return tuple(part for part in one.value if not isinstance(part, tuple))


def _plain(word: Word) -> str:
    return "".join(part.text for part in word if isinstance(part, Text))


def _bare(text: str) -> str:
    return text.replace(MARK, "")


def _shown(text: str) -> str:
    """One line, not too long."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:197]}..."


_COMPARISONS: Final[dict[str, Callable[[str, str], bool]]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=~": lambda a, b: re.search(b, a) is not None,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
}


def decide(words: Sequence[str], variables: Mapping[str, str]) -> bool | None:
    """Whether a condition holds.

    Args:
        words: between the brackets.
        variables: that the script has set.

    Returns:
        None where only the machine can tell: of files, and of values that are open.
    """
    for joints, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        if position := _outermost(words, joints):
            sides = decide(words[:position], variables), decide(words[position + 1 :], variables)
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
    if words[:1] == ["!"]:
        state = decide(words[1:], variables)
        return None if state is None else not state
    if words[:1] == ["("] and words[-1:] == [")"]:
        return decide(words[1:-1], variables)
    if words[:1] == ["-v"]:
        return words[-1] in variables or None
    return None if any(MARK in word for word in words) else _compare(words)


def _outermost(words: Sequence[str], joints: tuple[str, str]) -> int:
    """Where two conditions are joined, outside of parentheses; 0 where they are not."""
    depth = 0
    for position, word in enumerate(words[:-1]):
        depth += (word == "(") - (word == ")")
        if position and not depth and word in joints:
            return position
    return 0


def _compare(words: Sequence[str]) -> bool | None:
    match words:
        case []:
            return False
        case [text] | ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, sign, right] if sign in _COMPARISONS:
            try:
                return _COMPARISONS[sign](left, right)
            except (ValueError, re.error):
                return None
    return None  # a file, a terminal, …
