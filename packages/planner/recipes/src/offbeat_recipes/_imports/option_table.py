"""A table of all options of another framework: what becomes of each here."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from offbeat_core import ConfigError


class OptionVerdict(StrEnum):
    """A section of a table."""

    OURS = "ours"
    ALWAYS = "always"
    NO_EFFECT = "no_effect"
    CHANGES = "changes"
    HARMLESS = "harmless"


NOT_KNOWN: Final = "unknown here: it may change the result"
NOTHING_FOLLOWS: Final = "changes nothing here, given the other options"
_OFF: Final = (False, 0, "", "none", "None")
"""Values that switch off what is not here, unless a row names others."""


@dataclass(frozen=True)
class OptionRow:
    """One line of a table.

    Args:
        verdict: section that it stands in.
        text: reason; of `ours`, the key or keys of our configuration.
        same: values that mean what is done here; with any other the result changes. None: all of them.
        unused: of `ours`, when it has no effect.
    """

    verdict: OptionVerdict
    text: str
    same: Sequence[Any] | None = None
    unused: str = ""


class OptionTable:
    """Rows by the name of an option, or by a pattern of names; the longest pattern that fits decides.

    Args:
        rows: by pattern.
        names: the name of today by that of before.
    """

    def __init__(self, rows: Mapping[str, OptionRow], names: Mapping[str, str] | None = None) -> None:
        self.rows = dict(rows)
        self.names = dict(names or {})
        self._patterns = sorted((name for name in rows if "*" in name), key=_num_literal, reverse=True)

    def row(self, name: str) -> OptionRow | None:
        """Return the row of an option, or None where the table has none."""
        if name in self.rows:
            return self.rows[name]
        return next((self.rows[pattern] for pattern in self._patterns if fnmatchcase(name, pattern)), None)

    def judge(self, name: str, value: Any) -> tuple[OptionVerdict, str]:
        """Return what becomes of an option that no key was written from, and why."""
        if (current := self._renamed(name)) != name:
            return (
                OptionVerdict.CHANGES,
                f"not read beside {current}, which is the name of today: remove one of the two",
            )
        row = self.row(name)
        if row is None:
            return OptionVerdict.CHANGES, NOT_KNOWN
        if row.verdict is OptionVerdict.OURS:
            return OptionVerdict.NO_EFFECT, row.unused or NOTHING_FOLLOWS
        if row.same is None:
            return row.verdict, row.text
        is_same = any(_is_equal(value, each) for each in row.same)
        if row.verdict is OptionVerdict.CHANGES:
            return (OptionVerdict.ALWAYS if is_same else OptionVerdict.CHANGES), row.text
        return (row.verdict if is_same else OptionVerdict.CHANGES), row.text

    def beside(self, other: "OptionTable") -> "OptionTable":
        """Return a table with the rows of another, where this one has none of the same pattern."""
        return OptionTable({**other.rows, **self.rows}, self.names)

    def renamed(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return options by their names of today, and how the file calls those that had another.

        Of several names for one option that of today is read, or else the first; the others stay as they are.
        """
        new: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, value in options.items():
            renamed = self._renamed(name)
            if renamed == name:
                new[name] = value
            elif renamed not in options and renamed not in new:
                new[renamed], written[renamed] = value, name
            elif value != options.get(renamed, new.get(renamed)):
                new[name] = value
        return new, written

    def _renamed(self, name: str) -> str:
        """Return the current name; a section may have been renamed too."""
        head, tail = name, ""
        while head:
            if head in self.names:
                return self.names[head] + tail
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return name


def _is_equal(value: Any, other: Any) -> bool:
    """True is not 1 here; a list is the same in any order."""
    if isinstance(value, list) and isinstance(other, list):
        return sorted(map(str, value)) == sorted(map(str, other))
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _num_literal(pattern: str) -> int:
    return len(pattern.replace("*", ""))


@lru_cache
def read_option_table(package: str, name: str) -> OptionTable:
    """Read a table that lies in a package.

    A file has the sections `ours`, `always`, `no_effect`, `changes` and `harmless`, with lines `"option" = "text"`, or
    `"option other.*" = {text = "…", same = [values]}`: names of one line have blanks between them. A section `names`
    has the names of today by those of before; one that ends with a dot is the section that they moved to.

    Args:
        package: name of it.
        name: of the file in it, without its ending.

    Raises:
        ConfigError: two lines for one name.
    """
    held = tomllib.loads(files(package).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    rows: dict[str, OptionRow] = {}
    for verdict in OptionVerdict:
        for names, row in _rows(verdict, held.get(verdict, {})):
            for each in names.split():
                if each in rows:
                    raise ConfigError(f"{package}/{name}.toml has two lines for {each}: one was required")
                rows[each] = row
    return OptionTable(rows, dict(_names(held.get("names", {}))))


def _names(section: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for names, new in section.items():
        prefix = f"{new.rstrip('.').rpartition('.')[2]}_"
        for old in names.split():
            yield old, new + old.rpartition(".")[2].removeprefix(prefix) if new.endswith(".") else new


def _rows(verdict: OptionVerdict, section: Mapping[str, Any]) -> Iterable[tuple[str, OptionRow]]:
    off = _OFF if verdict is OptionVerdict.CHANGES else None
    for names, held in section.items():
        if isinstance(held, str):
            yield names, OptionRow(verdict, held, off)
        else:
            yield names, OptionRow(verdict, held["text"], held.get("same", off), held.get("unused", ""))
