"""Reads a scenario from TOML or JSON, with overrides, and lays a recipe of grpo-async-app over it."""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_type_hints

from offbeat_async_policy._calibration import ColocatedStep
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._scenario import (
    EnginesConfig,
    LengthsConfig,
    MachinesConfig,
    Scenario,
    SyncConfig,
    TrainerConfig,
    WorkConfig,
)
from offbeat_types import METADATA_KEY, ConfigError, DataError

SECTIONS: Final[dict[str, type]] = {
    "async": AsyncConfig,
    "work": WorkConfig,
    "lengths": LengthsConfig,
    "machines": MachinesConfig,
    "engines": EnginesConfig,
    "trainer": TrainerConfig,
    "sync": SyncConfig,
}
ROWS: Final = "colocated"


@dataclass
class ScenarioSource:
    """Values by section and key, before they are checked; what is added later wins.

    Args:
        tables: section -> key -> value.
        rows: of `colocated`.
        folder: that relative paths in the file start from.
        origin: (section, key) -> where the value came from, for complaints.
    """

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    folder: Path = Path()
    origin: dict[tuple[str, str], str] = field(default_factory=dict)

    def add_file(self, path: Path) -> None:
        """Take in a scenario file.

        Raises:
            DataError: it cannot be read.
            ConfigError: it names a section that does not exist.
        """
        self.folder = path.parent
        for name, table in read_tables(path).items():
            if name == ROWS and isinstance(table, list):
                self.rows = table
            elif name in SECTIONS and isinstance(table, dict):
                self._add(name, table, str(path))
            else:
                known = [*SECTIONS, ROWS]
                raise ConfigError(f"{path}: [{name}] is not a section of a scenario{_nearest(name, known)}")

    def add_override(self, word: str, text: str) -> None:
        """Take in `--section.key value`."""
        section, _, key = word.removeprefix("--").partition(".")
        if section not in SECTIONS:
            raise ConfigError(f"{word}: no such section{_nearest(section, [*SECTIONS])}")
        self._add(section, {key: _parse_word(text)}, word)

    def add_recipe(self, path: Path) -> None:
        """Lay what a recipe of grpo-async-app says of the same things over the scenario."""
        recipe = {name: table for name, table in read_tables(path).items() if isinstance(table, dict)}
        self._add("async", recipe.get("async", {}), str(path))
        rollout, engine = recipe.get("rollout", {}), recipe.get("engine", {})
        width = rollout.get("tensor_parallel", 1)
        same = [
            (rollout, "samples_per_prompt", "work", "group_size", 1),
            (rollout, "max_tokens", "lengths", "longest", 1),
            (rollout, "max_running", "engines", "max_running", 1),
            (rollout, "tensor_parallel", "machines", "per_engine", 1),
            (rollout, "num_engines", "machines", "rollout", width),
            (engine, "num_ranks", "machines", "trainer", 1),
        ]
        for table, theirs, section, ours, factor in same:
            if theirs in table:
                self._add(section, {ours: table[theirs] * factor}, f"{path} ({theirs})")

    def build(self) -> Scenario:
        """Check everything and return the scenario.

        Raises:
            ConfigError: a key is unknown, of another type or out of bounds; all of them are named.
        """
        problems: list[str] = []
        built = {name: self._section(name, cls, problems) for name, cls in SECTIONS.items()}
        rows = [self._row(number, row, problems) for number, row in enumerate(self.rows, 1)]
        if problems:
            raise ConfigError("; ".join(problems))
        sections = {"async_" if name == "async" else name: cls(**built[name]) for name, cls in SECTIONS.items()}
        return Scenario(**sections, colocated=tuple(ColocatedStep(**row) for row in rows), folder=self.folder)

    def _add(self, section: str, table: Mapping[str, Any], origin: str) -> None:
        self.tables.setdefault(section, {}).update(table)
        self.origin.update({(section, key): origin for key in table})

    def _section(self, name: str, cls: type, problems: list[str]) -> dict[str, Any]:
        values = {}
        for key, value in self.tables.get(name, {}).items():
            origin = self.origin[name, key]
            where = origin if origin.startswith("--") else f"{origin}: {name}.{key}"
            values[key] = _fit(cls, key, value, where, problems)
        return values

    def _row(self, number: int, row: Any, problems: list[str]) -> dict[str, Any]:
        if not isinstance(row, dict):
            problems.append(f"{ROWS} row {number}: a table is required, got {row!r}")
            return {}
        return {
            key: _fit(ColocatedStep, key, value, f"{ROWS} row {number}: {key}", problems) for key, value in row.items()
        }


def read_scenario(path: Path | None, overrides: Sequence[tuple[str, str]] = (), recipe: Path | None = None) -> Scenario:
    """Read a scenario.

    Args:
        path: TOML, or JSON if its name ends so; None for the defaults.
        overrides: pairs such as ("--machines.rollout", "64"); they win over everything else.
        recipe: of grpo-async-app; its settings win over the scenario's.

    Raises:
        ConfigError: something is unknown, of another type, or out of bounds.
        DataError: a file cannot be read.
    """
    source = ScenarioSource()
    if path:
        source.add_file(path)
    if recipe:
        source.add_recipe(recipe)
    for word, text in overrides:
        source.add_override(word, text)
    return source.build()


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file whose top level is a table."""
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: a table at the top is required, got {type(plain).__name__}")
    return plain


def describe_keys() -> str:
    """Every key of a scenario with its default, unit and meaning, section by section."""
    lines = []
    for name, cls in [*SECTIONS.items(), (ROWS, ColocatedStep)]:
        lines.append(f"[[{name}]]" if name == ROWS else f"[{name}]")
        for each in fields(cls):
            setting = each.metadata[METADATA_KEY]
            unit = f" {setting.unit}" if setting.unit else ""
            lines.append(f"  {each.name} = {json.dumps(each.default)}{unit}: {setting.doc}")
    return "\n".join(lines)


def _fit(cls: type, key: str, value: Any, where: str, problems: list[str]) -> Any:
    known = {each.name: each for each in fields(cls)}
    if key not in known:
        problems.append(f"{where}: no such key{_nearest(key, [*known])}")
        return None
    annotation = get_type_hints(cls)[key]
    types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if float in types and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in types:
        names = " or ".join("nothing" if each is type(None) else each.__name__ for each in types)
        problems.append(f"{where}: {names} required, got {value!r}")
        return None
    complaint = known[key].metadata[METADATA_KEY].complaint(value)
    if isinstance(value, float) and not abs(value) < float("inf"):
        complaint = "a finite number"
    if complaint:
        problems.append(f"{where}: required {complaint}, got {value!r}")
    return value


def _parse_word(text: str) -> Any:
    """A TOML value if it is one, else the word itself."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
