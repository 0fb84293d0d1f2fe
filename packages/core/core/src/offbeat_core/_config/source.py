"""Tables of a TOML file with their lines, overrides of a command line, and which of them a problem is about."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_core._config.advice import syntax_advice
from offbeat_core._config.schema import Section, sections_of
from offbeat_core._errors import BackendError, ConfigError, DataError, ModelError, ProblemsError, UserError

MAX_CONFIG_BYTES: Final = 1 << 24
"""Largest TOML file of a run."""

_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True)
class TomlSource:
    """A parsed file.

    Args:
        name: of the file, for messages.
        tables: what it holds.
        lines: the line, from 1, where each key path such as ("rollout", "temperature") stands first.
    """

    name: str
    tables: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def where(self, *path: str) -> str:
        """`file:line` of a key, or of the table that should hold it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def read_toml(path: Path) -> TomlSource:
    """Read a TOML file.

    Raises:
        ConfigError: missing, not a file, not text, or not TOML, with line and column.
    """
    try:
        with path.open("rb") as file:
            held = file.read(MAX_CONFIG_BYTES + 1)
        text = held.decode("utf-8-sig")  # some editors begin a file with a mark
    except IsADirectoryError:
        inside = path / "config.toml"
        advice = f", such as {inside}; resume continues that run" if inside.is_file() else ""
        raise ConfigError(f"{path}: is a folder, and cannot be read as a TOML file: give a file{advice}") from None
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}; a run needs a TOML file, see the recipes folder for some") from None
    except UnicodeDecodeError as error:
        is_wide = held[:2] in (b"\xff\xfe", b"\xfe\xff")
        advice = "it is UTF-16: save it as UTF-8" if is_wide else f"byte {error.start} is not; save it as UTF-8"
        raise ConfigError(f"{path}: must be UTF-8 text: {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a TOML file: {error.strerror}") from None
    if len(held) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: a TOML file of a run has {MAX_CONFIG_BYTES} bytes at most: give another one")
    return parse_toml(text, str(path))


def parse_toml(text: str, name: str) -> TomlSource:
    """Parse TOML text; `name` says where it came from.

    Raises:
        ConfigError: not TOML, with line, column, the line itself and a caret under the column.
    """
    text = text.replace("\r\n", "\n")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_message(text, name, str(error))) from None
    except ValueError as error:  # of Python's int()
        raise ConfigError(f"{name}: an integer has too many digits: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: tables or lists are nested too deep to be read; a few levels are enough") from None
    return TomlSource(name=name, tables=tables, lines=_key_lines(text))


def _syntax_message(text: str, name: str, error: str) -> str:
    lines = text.split("\n")
    found = _POSITION.search(error)
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=1)
    line, column = (int(found[1]), int(found[2])) if found else (last, len(lines[last - 1]) + 1)
    reason = re.sub(r"\s*\(at [^)]*\)\s*$", "", error)
    shown = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    advice = syntax_advice(shown, column, reason)
    below = f"\n  {advice}" if advice else ""
    return f"{name}:{line}:{column}: broken TOML: {reason}\n    {shown}\n    {' ' * (column - 1)}^{below}"


def _key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Split valid TOML into statements: the shortest runs of lines that are TOML by themselves."""
    lines: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # an array or a string that continues on the next line
        if statement.lstrip().startswith("["):
            header = _only_path(parsed)
            lines.setdefault(header, start)
        else:
            for path in _paths(parsed):
                lines.setdefault(header + path, start)
        statement, start = "", number + 1
    return lines


def _only_path(parsed: Any) -> tuple[str, ...]:
    """Return the path of a header, `[a.b]` or `[[a.b]]`, parsed by itself."""
    path: tuple[str, ...] = ()
    while parsed:
        table = parsed[0] if isinstance(parsed, list) else parsed
        key = next(iter(table), None)
        if key is None:
            break
        path, parsed = (*path, key), table[key]
    return path


def _paths(table: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in table.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *rest) for rest in _paths(value)]
    return found


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split `--section.key value` and `--section.key=value` into (key, value) pairs.

    Raises:
        ConfigError: a word that is neither, or a key without a value.
    """
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word.partition("=")[0]:
            raise ConfigError(f"{word}: not understood; an override is --section.key value or --section.key=value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or re.match(r"--[a-z]", rest[0]):
                raise ConfigError(f"--{key}: needs a value: --{key} VALUE")
            value = rest.pop(0)
        pairs.append((key, value))
    return pairs


MADE_FILE_VARIABLE: Final = "OFFBEAT_MADE_FILE"
"""Variable that names a file which a program has made of its own settings: its lines say nothing to the user."""
_KEY: Final = re.compile(r"(?<![\w./-])[a-z_]+(?:\.[\w-]+)+")
_SECTION: Final = re.compile(r"(?:section )?([a-z_]+)(?![\w.])")
_NAME_OF_A_FILE: Final = re.compile(r"[./:]")
_PLAIN_ERRORS: Final = (ConfigError, ModelError, DataError, BackendError)
"""Errors that are made of one text."""


class ProblemPlaces:
    """Finds where a problem comes from by the keys that its text names, or by the values that it quotes.

    Args:
        source: the file.
        sections: of the configuration.
        overrides: as `load_config` takes them.
    """

    def __init__(self, source: TomlSource, sections: Mapping[str, Section], overrides: Sequence[str]) -> None:
        self._source, self._sections = source, sections
        self._lines = {} if os.environ.get(MADE_FILE_VARIABLE) == source.name else source.lines
        self._overrides = dict(split_overrides(overrides))

    def name(self, text: str) -> str:
        """Return the text of a problem behind `file:line` or the option; as it is where none is found."""
        head = text.partition("\n")[0]
        for found in _KEY.finditer(head):
            if where := self._of_key(tuple(found[0].split("."))):
                return _joined(where, text)
        where = self._of_section(head) or self._of_quoted_path(head)
        return _joined(where, text) if where else text

    def _of_key(self, path: tuple[str, ...]) -> str:
        """Return where a key stands; "" where it is none, or has its default."""
        section = self._sections.get(path[0])
        if section is None or path[1] not in section.keys:
            return ""
        for length in range(len(path), 1, -1):
            if ".".join(path[:length]) in self._overrides:
                return f"--{'.'.join(path[:length])}"
            if path[:length] in self._lines:
                return self._source.where(*path[:length])
        return ""

    def _of_section(self, head: str) -> str:
        """Return where the value stands that a text on a section quotes, or else the section."""
        found = _SECTION.match(head)
        if found is None or found[1] not in self._sections:
            return ""
        name = found[1]
        for path, value in self._given(name):
            if value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", head[found.end() :]):
                return self._of_key(path)
        return self._source.where(name) if (name,) in self._lines else ""

    def _of_quoted_path(self, head: str) -> str:
        """Return where the path stands that a text quotes."""
        for name, section in self._sections.items():
            for path, value in self._given(name):
                setting = section.keys[path[1]].setting if path[1] in section.keys else None
                is_path = setting and (setting.hub or setting.path) and _NAME_OF_A_FILE.search(value)
                if is_path and value.rpartition("../")[2] in head:
                    return self._of_key(path)
        return ""

    def _given(self, section: str) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield the texts that are given in a section, by their keys: those of overrides first."""
        for key, value in self._overrides.items():
            path = tuple(key.split("."))
            if path[0] == section and len(path) == 2:
                yield (path[0], path[1]), value
        table: Any = self._source.tables.get(section)
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, str) and f"{section}.{key}" not in self._overrides:
                yield (section, key), value


def _joined(where: str, text: str) -> str:
    """Return a text behind its place; an option names its key already."""
    is_named = where.startswith("--") and re.match(rf"{re.escape(where[2:])}(?![\w.-])", text)
    return f"--{text}" if is_named else f"{where}: {text}"


@contextmanager
def naming_lines(file: Path | str, root_type: type, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Put the line of the file, or the option, before the errors of a block that are about its settings.

    Args:
        file: that the configuration was loaded from.
        root_type: its class.
        overrides: as `load_config` has taken them.
    """
    try:
        yield
    except ProblemsError as error:
        raise ProblemsError(*map(_places(file, root_type, overrides).name, error.texts)) from error
    except UserError as error:
        if type(error) not in _PLAIN_ERRORS:
            raise
        raise type(error)(_places(file, root_type, overrides).name(str(error))) from error


def _places(file: Path | str, root_type: type, overrides: Sequence[str]) -> ProblemPlaces:
    return ProblemPlaces(read_toml(Path(file)), sections_of(root_type), overrides)
