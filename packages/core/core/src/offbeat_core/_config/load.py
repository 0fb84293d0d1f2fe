"""Loads a typed configuration from TOML and overrides, and reports everything wrong with it at once, with its line."""

import os
import re
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_origin

from offbeat_core._config.advice import show, syntax_advice
from offbeat_core._config.schema import Key, Section, named_class, nearest_key, nearest_section, sections_of, union_arms
from offbeat_core._config.tables import OverrideText, build_named
from offbeat_core._config.values import ValueProblemError, fit, fit_override, parse_scalar
from offbeat_core._errors import ConfigError, list_problems

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


def _relative_paths(tables: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each value of tables that is a relative path by the name of its key or by its ending, with its keys."""
    left: deque[tuple[tuple[str, ...], Any]] = deque([((), tables)])  # no recursion: a file may nest without a bottom
    while left:
        keys, value = left.popleft()
        if isinstance(value, dict):
            left.extend(((*keys, name), inner) for name, inner in value.items())
            left.extend(((*keys, name), name) for name in value if ".py:" in name)
        elif isinstance(value, list):
            left.extend((keys, inner) for inner in value)
        elif isinstance(value, str) and (path := _relative_path(keys[-1], value)):
            yield keys, path


def _relative_path(key: str, value: str) -> str:
    """Return the path that a value is; empty where it is none, or not relative."""
    path, found, _ = value.partition(".py:")
    is_path = bool(found) or value.endswith(".py") or key == "path" or key.endswith("_path")
    return path + ".py" * bool(found) if is_path and not value.startswith(("/", "~", "$")) else ""


ConfigT = TypeVar("ConfigT")
Look = Callable[[Mapping[str, Any], Collection[str]], Sequence[str]]
"""Takes the sections of a configuration that cannot be loaded, by the fields of its root: those in which all is well,
and others with the values that fit. Takes the names of these others, "" for a section that is not known. Returns what
else is wrong, such as files that are missing."""


def load_config(
    path: Path | str | None, root_type: type[ConfigT], overrides: Sequence[str] = (), *, look: Look | None = None
) -> ConfigT:
    """Load a configuration file.

    Args:
        path: a TOML file; None for the defaults and overrides alone.
        root_type: frozen dataclass whose fields are section dataclasses made with `offbeat_core.setting`.
        overrides: words such as `--rollout.temperature 0.7` or `--rollout.temperature=0.7`; the last one wins.
        look: finds what else is wrong where something is, so that one answer has all; see `Look`.

    Raises:
        ConfigError: everything that is wrong, one problem a line: where it stands, what is required, what was got.
    """
    if path is None:
        return _Loader(TomlSource("the defaults", {}, {}), sections_of(root_type)).load(root_type, overrides)
    loader = _Loader(read_toml(Path(path)), sections_of(root_type))
    loader.refuse_misplaced(Path(path).absolute().parent, {key for key, _ in split_overrides(overrides)})
    return loader.load(root_type, overrides, look)


def parse_config(
    text: str, root_type: type[ConfigT], overrides: Sequence[str] = (), *, name: str = "the configuration"
) -> ConfigT:
    """Load a configuration from TOML text; otherwise as `load_config`."""
    return _Loader(parse_toml(text, name), sections_of(root_type)).load(root_type, overrides)


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


class _Loader:
    """Collects values and problems; `load` raises once, with all problems."""

    def __init__(self, source: TomlSource, sections: dict[str, Section]) -> None:
        self.source, self.sections = source, sections
        self.values: dict[str, dict[str, Any]] = {name: {} for name in sections}
        self.raw: dict[tuple[str, str], Any] = {}
        self.named: set[str] = set()
        self.failed: set[str] = set()
        self.misplaced: set[str] = set()
        self.problems: list[str] = []

    def load(self, root_type: type[ConfigT], overrides: Sequence[str], look: Look | None = None) -> ConfigT:
        pairs = split_overrides(overrides)
        replaced = {key for key, _ in pairs}
        for name, table in self.source.tables.items():
            self._read_section(name, table, replaced)
        for key, text in pairs:
            self._override(key, text)
        held = {section.field_name: self._build(section) for section in self.sections.values()}
        if not self.problems:
            try:
                return root_type(**held)
            except (ConfigError, ValueError) as error:
                self._problem(self.source.name, "", str(error))
        elif look is not None:
            self.problems += look(self._known(held), frozenset(self.failed))
        raise ConfigError(list_problems(self.problems, "in the configuration"))

    def refuse_misplaced(self, folder: Path, replaced: Collection[str]) -> None:
        """Note relative paths that lie beside the file: they are read from the working folder, as by other programs.

        Args:
            folder: of the file.
            replaced: keys whose values on the command line take the place of the file's.
        """
        for keys, path in _relative_paths(self.source.tables):
            key = ".".join(keys)
            if key not in replaced and not os.path.exists(path) and os.path.exists(folder / path):
                self.misplaced.add(key)
                self._problem(
                    self.source.where(*keys),
                    key,
                    f"{path} is not in the working folder {Path.cwd()}, from which relative paths are read; it lies "
                    f"beside the file: write {folder / path}, or run the command in {folder}",
                    keys[0],
                )

    def _problem(self, where: str, key: str, text: str, section: str = "") -> None:
        named = key and not where.startswith("--")  # an override names its key already
        self.problems.append(f"{where}: {key}: {text}" if named else f"{where}: {text}")
        self.failed.add(section)

    def _known(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sections that can be made of the values that fit."""
        known = {name: section for name, section in held.items() if section is not None}
        for section in self.sections.values():
            fitting = self.values[section.name].items()
            values = {name: value for name, value in fitting if f"{section.name}.{name}" not in self.misplaced}
            if section.field_name not in known and not section.optional:
                with suppress(ConfigError, ValueError, TypeError):  # a required key may be missing
                    known[section.field_name] = section.cls(**values)
        return known

    def _read_section(self, name: str, table: Any, replaced: Collection[str]) -> None:
        """Take a table's values, but for those that are replaced: a variable in them may not be set."""
        where = self.source.where(name)
        if name not in self.sections:
            self._unknown_section(where, name, is_table=isinstance(table, dict))
            return
        if not isinstance(table, dict):
            is_array = isinstance(table, list) and all(isinstance(item, dict) for item in table)
            got = f"[[{name}]], a list of tables" if is_array else f"a single value, {show(table)}"
            self._problem(where, name, f"must be a table, [{name}], got {got}", name)
            return
        self.named.add(name)
        for key_name, value in table.items():
            key = self.sections[name].keys.get(key_name)
            if key is None:
                self._unknown_key(self.source.where(name, key_name), name, key_name)
            elif f"{name}.{key_name}" not in replaced:
                self._take(self.source.where(name, key_name), name, key, value)

    def _take(self, where: str, section: str, key: Key, value: Any, text: str | None = None) -> None:
        self.raw[section, key.name] = value if text is None else parse_scalar(text)
        if named_class(key.annotation):
            return  # built from all that file and overrides say of it
        try:
            if text is None:
                self.values[section][key.field_name] = fit(value, key.annotation, key.setting)
            else:
                self.values[section][key.field_name] = fit_override(text, key.annotation, key.setting)
        except ValueProblemError as problem:
            said = f"must be {key.required}, {problem}" if problem.got else str(problem)
            self._problem(where, f"{section}.{key.name}", said, section)

    def _unknown_section(self, where: str, name: str, *, is_table: bool) -> None:
        if is_table:
            near = nearest_section(self.sections, name)
            hint = f"did you mean [{near}]?" if near else "known sections: " + ", ".join(self.sections)
            self._problem(where, f"[{name}]", f"unknown section; {hint}")
        else:
            near = nearest_key(self.sections, "", name)
            hint = f"did you mean {near}?" if near else "every key stands in a section: " + ", ".join(self.sections)
            self._problem(where, name, f"unknown key; {hint}")

    def _unknown_key(self, where: str, section: str, key: str) -> None:
        near = nearest_key(self.sections, section, key)
        known = ", ".join(self.sections[section].keys)
        self._problem(
            where,
            f"{section}.{key}",
            "unknown key; " + (f"did you mean {near}?" if near else f"[{section}] has {known}"),
            section,
        )

    def _override(self, path: str, text: str) -> None:
        name, _, rest = path.partition(".")
        key_name, _, inner = rest.partition(".")
        where = f"--{path}"
        if name not in self.sections:
            near = nearest_section(self.sections, name)
            known = near is not None and rest in self.sections[near].keys
            guess = f"{near}.{rest}" if known else nearest_key(self.sections, "", rest)
            hint = f"did you mean --{guess}?" if guess else "known sections: " + ", ".join(self.sections)
            self._problem(where, "", f"unknown section {name}; {hint}")
            return
        self.named.add(name)
        key = self.sections[name].keys.get(key_name)
        if key is None:
            self._unknown_key(where, name, key_name)
        elif inner:
            self._override_inside(where, name, key, inner.split("."), text)
        else:
            self._take(where, name, key, None, text)

    def _override_inside(self, where: str, section: str, key: Key, inner: list[str], text: str) -> None:
        """`--engine.options.flag true` sets one entry of a table and keeps the others."""
        if not any(arm is dict or get_origin(arm) is dict for arm in union_arms(key.annotation)):
            self._problem(where, f"{section}.{key.name}", f"must be {key.required}, which has no inner keys", section)
            return
        held = self.raw.get((section, key.name), key.default)
        table = dict(held) if isinstance(held, dict) else {}
        entry = table
        for name in inner[:-1]:
            below = entry.get(name)
            entry[name] = dict(below) if isinstance(below, dict) else {}
            entry = entry[name]
        entry[inner[-1]] = OverrideText(text) if named_class(key.annotation) else parse_scalar(text)
        self._take(where, section, key, table)

    def _build(self, section: Section) -> Any:
        if section.optional and section.name not in self.named:
            return None
        values = dict(self.values[section.name])
        for key in section.keys.values():
            if named_class(key.annotation) and (section.name, key.name) in self.raw:
                values[key.field_name] = self._build_named(section.name, key)
            self._add_default(section, key, values)
        if section.name in self.failed:
            return None
        try:
            return section.cls(**values)
        except (ConfigError, ValueError) as error:
            self._problem(self.source.where(section.name), f"[{section.name}]", str(error), section.name)
            return None

    def _build_named(self, section: str, key: Key) -> dict[str, Any]:
        def report(path: tuple[str, ...], text: str, from_override: bool) -> None:
            name = ".".join((section, *path))
            where = f"--{name}" if from_override else self.source.where(section, *path)
            self._problem(where, name, text, section)

        return build_named(key, self.raw[section, key.name], report)

    def _add_default(self, section: Section, key: Key, values: dict[str, Any]) -> None:
        if key.field_name in values:
            return
        if key.default is not MISSING:
            try:
                values[key.field_name] = fit(key.default, key.annotation, key.setting)
            except ValueProblemError as problem:
                self._problem("default", f"{section.name}.{key.name}", str(problem), section.name)
        elif (section.name, key.name) not in self.raw:
            where = self.source.where(section.name)
            advice = f"write {key.name} = ... under [{section.name}], or pass --{section.name}.{key.name} VALUE"
            said = f"required and not given ({key.required}); {advice}"
            self._problem(where, f"{section.name}.{key.name}", said, section.name)
