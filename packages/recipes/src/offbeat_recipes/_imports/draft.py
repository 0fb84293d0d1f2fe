"""A configuration in the making: what came from which option, what changed its meaning, what has no counterpart."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from offbeat_recipes._imports.options import is_open
from offbeat_run import toml_value

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


@dataclass(frozen=True)
class Entry:
    """One setting.

    Args:
        value: of ours.
        source: option it came from.
    """

    value: Any
    source: str


class Draft:
    """Takes options one by one; what is left in the end has no counterpart.

    Args:
        options: of the other framework, by full name.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._left = dict(options)
        self.entries: dict[str, Entry] = {}
        self.changed: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.always: dict[str, str] = {}

    @property
    def left(self) -> tuple[str, ...]:
        """Options that nobody has taken yet."""
        return tuple(self._left)

    def has(self, name: str) -> bool:
        """Whether an option is set to something."""
        return self._options.get(name) is not None

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these options that is set; all of them count as read."""
        found = [value for name in names if (value := self._left.pop(name, self._options.get(name))) is not None]
        return found[0] if found else default

    def number(self, *names: str, default: Any) -> Any:
        """The same for numbers: one that depends on the environment is told, and left at its default."""
        value = self.take(*names, default=default)
        if isinstance(value, int | float):
            return value
        self._leave_open(names, value, default)
        return default

    def _leave_open(self, names: tuple[str, ...], value: Any, default: Any) -> None:
        stands = "our default" if default is None else default
        self.change(self.named(*names), f"{value} is not known here: {stands} stands in its place")

    def named(self, *names: str) -> str:
        """The first of these options that is set, or the first of all."""
        return next((name for name in names if self.has(name)), names[0])

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of ours.

        Args:
            key: "section.key".
            value: for it.
            names: options it comes from; where none of them is set it is the other framework's default.
        """
        given = [name for name in names if self.has(name)]
        self.entries[key] = Entry(value, " and ".join(given) if given else f"default of {names[0]}")

    def copy(
        self,
        keys: str | Sequence[str],
        *names: str,
        default: Any = None,
        convert: Callable[[Any], Any] = lambda value: value,
        told: str = "",
    ) -> None:
        """Set a key, or several, to the value of an option, if there is one.

        Args:
            keys: "section.key".
            names: of the option; the first that is set counts.
            default: of the other framework; None leaves ours.
            convert: to our value.
            told: what is said where the option is set, for it means something else here.
        """
        for key in [keys] if isinstance(keys, str) else keys:
            value = self.take(*names, default=default)
            if is_open(value) and key not in _TEXTS:
                self._leave_open(names, value, default)
                value = default
            if value is not None:
                self.put(key, convert(value), *names)
        if told and any(map(self.has, names)):
            self.change(self.named(*names), told)

    def change(self, name: str, text: str) -> None:
        """Say that something means something else here."""
        self.changed[name] = "; ".join(filter(None, (self.changed.get(name), text)))

    def drop(self, section: str) -> None:
        """Take back what was set in a section of ours."""
        self.entries = {key: entry for key, entry in self.entries.items() if not key.startswith(f"{section}.")}

    def miss(self, name: str, text: str) -> None:
        """Say that something has no counterpart."""
        self.missing[name] = text

    def finish(self, always: Mapping[str, str], missing: Mapping[str, str]) -> None:
        """Sort what nobody has taken.

        Args:
            always: patterns of names, with blanks between those of one text, and how it is here whatever they say.
            missing: patterns of names likewise, and why there is no counterpart.
        """
        sources = " ".join(entry.source for entry in self.entries.values())
        for name, value in self._options.items():
            if is_open(value) and name not in sources and name not in self.changed and name not in self._left:
                self.change(name, "not known here: what follows from it is a guess")
        for name, value in self._left.items():
            if value in (None, [], {}):
                continue
            if text := _first_match(name, always):
                self.always[name] = text
            else:
                self.missing[name] = _first_match(name, missing) or "no counterpart"

    def value(self, name: str) -> str:
        """An option as it stood, for people."""
        return f"{name} = {json.dumps(self._options[name])}" if self.has(name) else name

    def as_toml(self, head: str, remarks: Mapping[str, Sequence[str]]) -> str:
        """The configuration, with where each key comes from, and at its end what did not come along.

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
        for title, found in (("means something else here", self.changed), ("has no counterpart", self.missing)):
            if found:
                lines += [
                    "",
                    f"# {title}:",
                    *(f"#   {self.value(name)}: {_one_line(text)}" for name, text in found.items()),
                ]
        for title, told in remarks.items():
            if told:
                lines += ["", f"# {title}:", *(f"#   {_one_line(line)}" for line in told)]
        return "\n".join(lines) + "\n"


def is_number(value: Any) -> bool:
    """Whether an option is a number, and no text that refers to something."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_line(text: str) -> str:
    """A comment ends with its line; what it quotes may have several."""
    return " ".join(text.split())


def _first_match(name: str, patterns: Mapping[str, str]) -> str:
    return next((text for held, text in patterns.items() if any(fnmatchcase(name, each) for each in held.split())), "")


def _line(key: str, value: Any) -> str:
    return f"{key.partition('.')[2]} = {toml_value(value)}"
