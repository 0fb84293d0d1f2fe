"""Reads TOML and remembers on which line each key stands, which tomllib does not tell."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_types import ConfigError

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
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}; a run needs a TOML file, see the recipes folder for some") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 text: byte {error.start} is not") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a TOML file: {error.strerror}") from None
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
    return f"{name}:{line}:{column}: broken TOML: {reason}\n    {shown}\n    {' ' * (column - 1)}^"


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
            continue  # an array or a string that goes on over the next line
        if statement.lstrip().startswith("["):
            header = _only_path(parsed)
            lines.setdefault(header, start)
        else:
            for path in _paths(parsed):
                lines.setdefault(header + path, start)
        statement, start = "", number + 1
    return lines


def _only_path(parsed: Any) -> tuple[str, ...]:
    """The path of a header, `[a.b]` or `[[a.b]]`, parsed by itself."""
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
