"""Follows a shell script as bash would, and gives the words of the commands it would start. Nothing is run.

What only the machine knows stays open: a variable that the script does not set stays a reference to the environment,
`${NAME}`, which our configuration reads in the same way; a default, `${NAME:-512}`, stands. A condition on something
open is not decided: what was set before it, or in the first of its branches, stands, and the reading says so.
"""

import re
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from offbeat_recipes._imports.shell.conditions import decide
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
_MAX_STEPS: Final = 20_000
"""Commands that one line may lead to, by its loops and functions: two functions that call each other never end."""
_MAX_LENGTH: Final = 100_000
"""Longest value, in characters: a few lines of a script can double one without end."""
_MAX_WORDS: Final = 10_000
"""Most entries of an array, or arguments of a call."""
_ARGUMENTS: Final = re.compile(r"\bgetopts?\b|\$[#@*1-9]|\$\{[#@*1-9][}:-]")
"""Expressions for the arguments that the script was started with."""
ANOTHER_SCRIPT: Final = "another script, not read: import that, and give with --set what this one exports to it"
_STARTS: Final = re.compile(r"(?:^|[\s=])(?:python[\d.]*|torchrun|accelerate|ray)\s")
"""Beginning of a command that stands in one word of another, which hands it on, as in `ssh NODE "python …"`."""


class _EndError(Exception):
    """`exit`."""


class _FailError(_EndError):
    """`exit` with another status than 0: what the script requires is not there."""


class _LimitError(Exception):
    """More commands, or longer values, than are followed."""


class _ContinueError(Exception):
    """`continue`."""


class _ReturnError(Exception):
    """`return`."""


class _BreakError(Exception):
    """`break`."""


@dataclass
class ShellReading:
    """Result of reading a script: the commands that it would run.

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


def read_shell(text: str, given: Mapping[str, str] | None = None, script: str = "") -> ShellReading:
    """Follow a script from its first line to its last.

    Args:
        text: of a script of bash or sh.
        given: variables of the environment that are known.
        script: its path, which it may begin other paths with; "" where that is not known.
    """
    reader = _Reader(text, given or {}, values=Values(script=script))
    reader.values.variables |= reader.given
    reader.read(ShellParser(text).script(reader.notify))
    reader.report_given()
    reader.reading.defaults = reader.values.defaults
    return reader.reading


@dataclass
class _Reader:
    text: str
    given: Mapping[str, str]
    reading: ShellReading = field(default_factory=ShellReading)
    values: Values = field(default_factory=Values)
    functions: dict[str, Commands] = field(default_factory=dict)
    calls: int = 0
    steps: int = 0

    def read(self, lines: Commands) -> None:
        """Follow the lines of a script; one that leads to too much is left where that shows."""
        for line in lines:
            self.steps = 0
            try:
                self._follow(line.command, line.source)
            except _LimitError as error:
                self.notify(f"{_shown(line.source, 120)}: {error}")
            except RecursionError:
                self.notify(f"{_shown(line.source, 120)}: nested too deeply, and not followed to its end")
            except (_EndError, _ReturnError, _BreakError, _ContinueError):
                return

    def report_given(self) -> None:
        """Report the given variables that change nothing."""
        for name, value in self.given.items():
            if not re.search(rf"\b{name}\b", self.text):
                self.notify(f"{name}={value} was given: the script does not use it")
            elif self.values.variables.get(name) != value:
                self.notify(f"{name}={value} was given: the script sets it to {self.values.variables.get(name)}")

    def notify(self, text: str) -> None:
        if (shown := _shown(text)) not in self.reading.not_understood:
            self.reading.not_understood.append(shown)

    def _run(self, lines: Commands) -> bool | None:
        """Return the state of the last command: whether it succeeds, None where that is not known."""
        state: bool | None = True
        for line in lines:
            state = self._follow(line.command, line.source)
        return state

    def _follow(self, command: Command, source: str) -> bool | None:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise _LimitError(f"more than {_MAX_STEPS} commands, and not followed to its end")
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
        """Return what it sets is gone when it ends."""
        outer, self.values = self.values, self.values.copy()
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
                state = self._guarded((Line(command, source),), source) if joint else self._follow(command, source)
            elif is_wanted is None:
                self._undecided(source, [(Line(command, source),)])
                state = None
        return state

    def _branches(self, pairs: tuple[tuple[Commands | None, Commands], ...]) -> bool | None:
        for position, (condition, body) in enumerate(pairs):
            state = True if condition is None else self._run(condition)
            if state:
                return self._guarded(body, "; ".join(line.source for line in condition or ()))
            if state is None:
                shown = "; ".join(line.source for line in condition or ())
                bodies = [each for _, each in pairs[position:]]
                self._undecided(shown, bodies, is_one_taken=pairs[-1][0] is None)
                return None
        return True

    def _guarded(self, body: Commands, condition: str) -> bool | None:
        """Follow what a condition leads to; where that gives up before anything was started, reading continues.

        A script that ends for want of a variable of the environment says nothing of what it would do with it.
        """
        try:
            return self._run(body)
        except _FailError:
            if self.reading.commands:
                raise
            text = f"{_shown(condition)}: the script ends there; it is read on"
            if condition and text not in self.reading.undecided:
                self.reading.undecided.append(text)
            return None

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
        """Return the first value that a variable is asked for, which holds from then on, so that all branches agree."""
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
                self._round(command.body)

    def _round(self, body: Commands) -> None:
        with suppress(_ContinueError):
            self._run(body)

    def _while(self, condition: Commands, body: Commands, *, is_until: bool) -> None:
        shown = "; ".join(line.source for line in condition)
        before: dict[str, str] = {}
        for _ in range(_MAX_ROUNDS):
            before = dict(self.values.variables)
            state = self._run(condition)
            if state is None and self.values.arguments is None and _ARGUMENTS.search(shown):
                self.reading.undecided.append(f"{_shown(shown)}: no arguments are assumed")
                return
            if state is None:
                self._undecided(shown, [body])
            if state is None or state is is_until:
                return
            self._round(body)
        if before != self.values.variables:
            self.notify(f"{_shown(shown)}: followed {_MAX_ROUNDS} times, and not to its end")

    def _undecided(self, condition: str, bodies: list[Commands], *, is_one_taken: bool = False) -> None:
        """Follow branches, one of which may be taken: what was set before is kept, or else what the first sets.

        Args:
            condition: as it is written.
            bodies: of the branches.
            is_one_taken: there is an `else`: the first branch that does not end the script stands as a whole.
        """
        before, after = self.values, []
        for body in bodies:
            self.values = before.copy()
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
        if differences := self._differences(others):
            text = f"{_shown(condition)}: {', '.join(differences)}"
            if text not in self.reading.undecided:
                self.reading.undecided.append(text)

    def _ends(self, body: Commands) -> bool:
        try:
            self._run(body)
        except (_EndError, _ReturnError, _BreakError, _ContinueError):
            return True
        return False

    def _differences(self, others: list[Values]) -> list[str]:
        """Return what would differ after another branch, where the script makes use of it."""
        found = []
        for name, value in self.values.variables.items():
            different = dict.fromkeys(each.variables[name] for each in others if name in each.variables)
            different.pop(value, None)
            if different and re.search(rf"\$\{{?{name}\b", self.text):
                shown = " or ".join(_shown(_bare(each)) or "nothing" for each in different)
                found.append(f"{name} = {_shown(_bare(value)) or 'nothing'} is assumed, not {shown}")
        for name, held in self.values.arrays.items():
            more = [word for each in others for word in each.arrays.get(name, {}).values() if word not in held.values()]
            found += [f"{_shown(_bare(word))} is left out" for word in dict.fromkeys(more) if _OVERRIDE.fullmatch(word)]
        return found

    def _assign(self, one: Assignment) -> None:
        if one.is_array:
            self._assign_array(one)
        elif one.index is not None:
            self.values.arrays.setdefault(one.name, {})[self.values.text((Text(one.index, is_quoted=True),))] = (
                self.values.text(_word(one))
            )
        else:
            before = self.values.variables.get(one.name, "") if one.is_added else ""
            value = before + self.values.text(_word(one))
            if len(value) > _MAX_LENGTH:
                raise _LimitError(f"longer than {_MAX_LENGTH} characters, and not followed")
            if MARK not in value or one.name not in self.given:  # what was given stands for what only a machine knows
                self.values.variables[one.name] = value

    def _assign_array(self, one: Assignment) -> None:
        held = self.values.arrays.get(one.name)
        found: dict[str, str] = dict(held or {}) if one.is_added else {}
        for word in one.value:
            for value in self.values.fields(word if isinstance(word, tuple) else (word,)):
                if entry := re.fullmatch(r"\[([^\]]*)\]=(.*)", value, re.DOTALL):
                    found[entry[1]] = entry[2]
                else:
                    found[str(len(found))] = value
        _check_number(found)
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
            case ["exit", status, *_] if status != "0":
                raise _FailError
            case ["exit", *_]:
                raise _EndError
            case ["return", *_]:
                raise _ReturnError
            case ["break", *_]:
                raise _BreakError
            case ["continue", *_]:
                raise _ContinueError
            case ["let", _, *_]:
                return [self._calculate(each) for each in words[1:]][-1]
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
                    _check_number(arguments)
                    self.values.arguments = arguments[arguments.index("--") + 1 :]
                return True
            case [*_, "bash" | "sh", "-c", text]:
                return self._run(ShellParser(_bare(text)).script(self.notify))
            case ["eval", *texts]:
                return self._run(ShellParser(_bare(" ".join(texts))).script(self.notify))
            case ["source" | ".", file, *_]:
                self.notify(f"source {_bare(file)}: what it sets is not read")
                return True
            case ["mapfile" | "readarray" | "read", *_]:
                self.notify(_bare(" ".join(words)))
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
        """Keep a command that has overrides, or may have them in unknown words."""
        bare = [_bare(word) for word in words]
        if _OVERRIDE.fullmatch(bare[0]):
            self.notify(f"{bare[0]}: stands in no command (the line before it ends without a backslash)")
        elif any(_OVERRIDE.fullmatch(word) or _MODULE.match(word) for word in bare[1:]):
            self.reading.commands.append(bare)
        elif len(bare) > 1 and bare[0] in ("bash", "sh") and bare[1].endswith(".sh"):
            self.notify(f"{bare[0]} {bare[1]}: {ANOTHER_SCRIPT}")
        else:
            for word in filter(_STARTS.search, bare[1:]):
                self._run(ShellParser(word.removeprefix("--wrap=")).script(self.notify))

    def _test(self, command: Test) -> bool | None:
        if command.expression:
            return self._calculate(command.expression)
        return decide(list(self._operands(command.words)), self.values.variables)

    def _calculate(self, expression: str) -> bool | None:
        try:
            return self.values.calculate(expression) != 0
        except OpenValueError:
            return None

    def _operands(self, words: tuple[Word, ...]) -> Iterator[str]:
        """The values of the words of `[[ … ]]`; a pattern that fits is given as the text that it fits."""
        before = ["", ""]
        for word in words:
            value = self.values.text(word)
            if before[1] in ("==", "=", "!=") and MARK not in before[0] + value:
                value = before[0] if fits(before[0], word, self.values) else f"{before[0]}{value}."
            yield value
            before = [before[1], value]


def _check_number(words: Sized) -> None:
    if len(words) > _MAX_WORDS:
        raise _LimitError(f"more than {_MAX_WORDS} words, and not followed")


def _word(one: Assignment) -> Word:
    return tuple(part for part in one.value if not isinstance(part, tuple))


def _plain(word: Word) -> str:
    return "".join(part.text for part in word if isinstance(part, Text))


def _bare(text: str) -> str:
    return text.replace(MARK, "")


def _shown(text: str, longest: int = 200) -> str:
    """Return one line, not too long."""
    line = " ".join(text[: 4 * longest].split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
