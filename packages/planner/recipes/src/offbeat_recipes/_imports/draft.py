"""A configuration while it is made: which option each key comes from, and what became of the others."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat_core import toml_value
from offbeat_recipes._imports.option_table import NOT_KNOWN, NOTHING_FOLLOWS, OptionTable, OptionVerdict
from offbeat_recipes._imports.options import is_open

_TEXTS: Final = (
    "model.path",
    "teacher.path",
    "critic.path",
    "reward.reward_model.path",
    "data.path",
    "data.eval_path",
    "data.split",
    "log.project",
)
"""Keys that may refer to the environment: our own files do so in the same way."""
_PATHS: Final = (*_TEXTS, "reward.name", "eval.sets")
_MADE: Final = re.compile(r"\$\(|\$\{(?![A-Za-z_]\w*(?::-[^}]*)?\})")
"""Begins what only a shell knows: the output of a command, or a part of a variable."""
_LITERAL: Final = ("data.system_prompt",)
"""Keys for texts in which a dollar sign is one."""
_MOST: Final = 2**63
"""Numbers of TOML are below; infinity and what is no number at all are not."""
_ALWAYS: Final = "always the case here"
CHANGES_RESULT: Final = "not supported here, and changes the result"


@dataclass(frozen=True)
class Entry:
    """One setting.

    Args:
        value: of ours.
        source: option it came from.
    """

    value: Any
    source: str


class RecipeBuilder:
    """Options that are read one by one; a table says what becomes of those that are left in the end.

    Args:
        options: of the other framework, by full name.
        written: by name, how the file calls an option that has had another name.
        since: by name, what to write beside a default of the other framework that has changed.

    Attributes:
        entries: keys of ours, as "section.key".
        lost: options that change the result, and have no key here.
        changed: options with another meaning here.
        always: options that say what is always the case here.
        unused: options without effect here.
        harmless: options without a key here, and without an effect on the result.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        written: Mapping[str, str] | None = None,
        since: Mapping[str, str] | None = None,
    ) -> None:
        self._options, self._since = dict(options), dict(since or {})
        self._written = dict(written or {})
        self._left = dict(options)
        self.entries: dict[str, Entry] = {}
        self.lost: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        self.always: dict[str, str] = {}
        self.unused: dict[str, str] = {}
        self.harmless: dict[str, str] = {}

    @property
    def left(self) -> tuple[str, ...]:
        """Options that have not been read yet."""
        return tuple(self._left)

    @property
    def knows_any(self) -> bool:
        """Return whether any option is known, or there is none at all; ask after `finish`."""
        given = [name for name, value in self._options.items() if value not in (None, [], {})]
        return not given or any(self.lost.get(name) != NOT_KNOWN for name in given)

    def has(self, name: str) -> bool:
        """Return whether an option is set to something."""
        return self._options.get(name) is not None

    def given(self, name: str) -> Any:
        """Return the value of an option, without counting it as read."""
        return self._options.get(name)

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these options that is set; all of them count as read."""
        found = [value for name in names if (value := self._left.pop(name, self._options.get(name))) is not None]
        return found[0] if found else default

    def number(self, *names: str, default: Any) -> Any:
        """Return a number likewise; a value that is none, or not a finite one, is reported, and its default used."""
        value = self.take(*names, default=default)
        if isinstance(value, int | float) and abs(value) < _MOST:
            return value
        self._leave_open(names, value, default)
        return default

    def count(self, *names: str, default: int) -> int:
        """Return a number of things likewise, at least one."""
        value = self.number(*names, default=default)
        if value >= 1:
            return int(value)
        self.lose(self.named(*names), f"at least 1 was required: using {default}")
        return default

    def text(self, *names: str, default: str) -> str:
        """Return a name likewise."""
        value = self.take(*names, default=default)
        if isinstance(value, str) and not is_open(value):
            return value
        self._leave_open(names, value, default)
        return default

    def _leave_open(self, names: tuple[str, ...], value: Any, default: Any) -> None:
        used = "our default" if default is None else default
        self.change(self.named(*names), f"{value} is unknown here: using {used}")

    def named(self, *names: str) -> str:
        """Return the first of these options that is set, or the first of all."""
        return next((name for name in names if self.has(name)), names[0])

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of ours.

        Args:
            key: "section.key".
            value: for it.
            names: options it comes from; where none of them is set it is the other framework's default.
        """
        given = [self._written.get(name, name) for name in names if self.has(name)]
        default = " ".join(filter(None, ("default of", names[0], self._since.get(names[0]))))
        self.entries[key] = Entry(value, " and ".join(given) if given else default)

    def copy(
        self,
        keys: str | Sequence[str],
        *names: str,
        default: Any = None,
        convert: Callable[[Any], Any] = lambda value: value,
        note: str = "",
    ) -> None:
        """Set a key, or several, to the value of an option, if there is one.

        Args:
            keys: "section.key".
            names: of the option; the first that is set counts.
            default: of the other framework; None leaves ours.
            convert: to our value.
            note: what is said where the option is set, for it has another meaning here.
        """
        for key in [keys] if isinstance(keys, str) else keys:
            value = self.take(*names, default=default)
            if key in _LITERAL and isinstance(value, str):
                value = value.replace("${", "$${")
            elif is_open(value) and key not in _TEXTS:
                self._leave_open(names, value, default)
                value = default
            if value is None:
                continue
            try:
                self.put(key, convert(value), *names)
            except (TypeError, ValueError, OverflowError):  # of another kind than the option is
                self._leave_open(names, value, None)
        if note and any(map(self.has, names)):
            self.change(self.named(*names), note)

    def change(self, name: str, text: str) -> None:
        """Say that something has another meaning here, or is counted in another unit."""
        _add(self.changed, name, text)

    def lose(self, name: str, text: str) -> None:
        """Say that something is not supported here, and that the result differs without it."""
        _add(self.lost, name, text)

    def ignore(self, name: str, text: str) -> None:
        """Say that something has no effect, either there with these options or here at all."""
        self.unused[name] = text

    def drop(self, section: str) -> None:
        """Take back what was set in a section of ours."""
        self.entries = {key: entry for key, entry in self.entries.items() if not key.startswith(f"{section}.")}

    def finish(self, table: OptionTable) -> None:
        """Sort what is left by a table of all options."""
        for key in [each for each in _PATHS if each in self.entries and _is_made(self.entries[each].value)]:
            option = self.entries.pop(key).source.partition(" and ")[0]
            self.lose(option, f"a command of the script makes it, and none is run: set {key}")
        sources = {name for entry in self.entries.values() for name in entry.source.split(" and ")}
        mentioned = {name for found in self.messages().values() for name in found}
        for name, value in self._options.items():
            is_mentioned = name in mentioned or self._written.get(name, name) in sources
            if is_mentioned or name in self._left or value in (None, [], {}):
                continue
            if is_open(value):
                self.change(name, "unknown here: what follows from it is a guess")
            else:  # read, and nothing was written from it
                row = table.row(name)
                self.ignore(name, (row.unused if row else "") or NOTHING_FOLLOWS)
        sections = {
            OptionVerdict.CHANGES: self.lost,
            OptionVerdict.ALWAYS: self.always,
            OptionVerdict.NO_EFFECT: self.unused,
            OptionVerdict.HARMLESS: self.harmless,
        }
        for name, value in self._left.items():
            if value not in (None, [], {}):
                verdict, text = table.judge(name, value)
                sections[verdict].setdefault(name, text)

    def messages(self) -> dict[str, dict[str, str]]:
        """Return what is said of options, by title; what changes the result comes first."""
        messages = {
            CHANGES_RESULT: self.lost,
            "has another meaning here": self.changed,
            _ALWAYS: self.always,
            "has no effect here": self.unused,
            "not supported here, but harmless": self.harmless,
        }
        return {title: found for title, found in messages.items() if found}

    def value(self, name: str) -> str:
        """Return an option as the source had it, for people."""
        called = self._written.get(name, name)
        return f"{called} = {json.dumps(self._options[name])}" if self.has(name) else called

    def as_toml(self, head: str, remarks: Mapping[str, Sequence[str]]) -> str:
        """Return the configuration, with the option behind each key, and at its end all other options.

        Args:
            head: first lines of comment.
            remarks: lines of comment by their title, for the end.
        """
        lines = [f"# {line}".rstrip() for line in head.splitlines()]
        for section in dict.fromkeys(key.partition(".")[0] for key in self.entries):
            held = {key: entry for key, entry in self.entries.items() if key.startswith(f"{section}.")}
            if held:
                lines += ["", f"[{section}]"]
                lines += [f"{_line(key, entry.value):<34}  # {entry.source}" for key, entry in held.items()]
        for title, found in self.messages().items():
            if title != _ALWAYS:
                lines += ["", f"# {title}:"]
                lines += [f"#   {self.value(name)}: {_one_line(text)}" for name, text in found.items()]
        for title, listed in remarks.items():
            if listed:
                lines += ["", f"# {title}:", *(f"#   {_one_line(line)}" for line in listed)]
        return "\n".join(lines) + "\n"


def _is_made(value: Any) -> bool:
    """Return whether a path, or one of a table of paths, depends on what a command of a script prints."""
    if isinstance(value, dict):
        return any(map(_is_made, value.values()))
    return isinstance(value, str) and _MADE.search(value) is not None


def is_number(value: Any) -> bool:
    """Return whether an option is a number, and not a text that refers to something."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_line(text: str) -> str:
    """Join lines: a comment ends with its line, and what it quotes may have several."""
    return " ".join(text.split())


def _add(texts: dict[str, str], name: str, text: str) -> None:
    texts[name] = "; ".join(filter(None, (texts.get(name), text)))


def _line(key: str, value: Any) -> str:
    return f"{key.partition('.')[2]} = {toml_value(value)}"
