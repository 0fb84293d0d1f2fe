"""Loads a typed configuration from TOML and overrides, and reports everything wrong with it at once, with its line."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin

from offbeat_core._config.advice import show
from offbeat_core._config.paths import ValueProblemError, folder_of, place_table
from offbeat_core._config.schema import Key, Section, named_class, nearest_key, nearest_section, sections_of, union_arms
from offbeat_core._config.source import ProblemPlaces, TomlSource, parse_toml, read_toml, split_overrides
from offbeat_core._config.tables import OverrideText, build_named, read_entry
from offbeat_core._config.values import fit, fit_override, parse_scalar
from offbeat_core._errors import ConfigError, list_problems

ConfigT = TypeVar("ConfigT")
Look = Callable[[Mapping[str, Any], Collection[str]], Sequence[str]]
"""Takes the sections of a configuration that cannot be loaded, by the fields of its root: those in which all is well,
and others with the values that fit. Takes the names of these others, "" for a section that is not known. Returns what
else is wrong, such as files that are missing."""


def load_config(
    path: Path | str | None, root_type: type[ConfigT], overrides: Sequence[str] = (), *, look: Look | None = None
) -> ConfigT:
    """Load a configuration file, whose paths are relative to its folder; those of overrides are to the working folder.

    Args:
        path: a TOML file; None for the defaults and overrides alone.
        root_type: frozen dataclass whose fields are section dataclasses made with `offbeat_core.setting`.
        overrides: words such as `--rollout.temperature 0.7` or `--rollout.temperature=0.7`; the last one wins.
        look: finds what else is wrong where something is, so that one answer has all; see `Look`.

    Raises:
        ConfigError: everything that is wrong, one problem a line: where it stands, what is required, what was got.
    """
    if path is None:
        return _Loader(TomlSource("the defaults", {}, {}), Path.cwd(), root_type).load(overrides)
    return _Loader(read_toml(Path(path)), folder_of(Path(path)), root_type).load(overrides, look)


def parse_config(
    text: str, root_type: type[ConfigT], overrides: Sequence[str] = (), *, name: str = "the configuration"
) -> ConfigT:
    """Load a configuration from TOML text, with paths relative to the working folder; otherwise as `load_config`."""
    return _Loader(parse_toml(text, name), Path.cwd(), root_type).load(overrides)


class _Loader(Generic[ConfigT]):
    """Collects values and problems; `load` raises once, with all problems."""

    def __init__(self, source: TomlSource, folder: Path, root_type: type[ConfigT]) -> None:
        self.source, self.folder, self.root_type = source, folder, root_type
        sections = self.sections = sections_of(root_type)
        self.values: dict[str, dict[str, Any]] = {name: {} for name in sections}
        self.raw: dict[tuple[str, str], Any] = {}
        self.named: set[str] = set()
        self.failed: set[str] = set()
        self.problems: list[str] = []

    def load(self, overrides: Sequence[str], look: Look | None = None) -> ConfigT:
        pairs = split_overrides(overrides)
        replaced = {key for key, _ in pairs}
        for name, table in self.source.tables.items():
            self._read_section(name, table, replaced)
        for key, text in pairs:
            self._override(key, text)
        held = {section.field_name: self._build(section) for section in self.sections.values()}
        if not self.problems:
            try:
                return self.root_type(**held)
            except (ConfigError, ValueError) as error:
                self._problem(self.source.name, "", str(error))
        elif look is not None:
            places = ProblemPlaces(self.source, self.sections, overrides)
            self.problems += map(places.name, look(self._known(held), frozenset(self.failed)))
        raise ConfigError(list_problems(self.problems, "in the configuration"))

    def _problem(self, where: str, key: str, text: str, section: str = "") -> None:
        named = key and not where.startswith("--")  # an override names its key already
        self.problems.append(f"{where}: {key}: {text}" if named else f"{where}: {text}")
        self.failed.add(section)

    def _known(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sections that can be made of the values that fit."""
        known = {name: section for name, section in held.items() if section is not None}
        for section in self.sections.values():
            if section.field_name not in known and not section.optional:
                with suppress(ConfigError, ValueError, TypeError):  # a required key may be missing
                    known[section.field_name] = section.cls(**self.values[section.name])
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

        def refuse(path: tuple[str, ...], text: str) -> None:
            self._problem(self.source.where(name, *path), ".".join((name, *path)), text, name)

        self.named.add(name)
        keys = self.sections[name].keys
        kept = {key: value for key, value in table.items() if f"{name}.{key}" not in replaced or key not in keys}
        for key, value in place_table(kept, keys, self.folder, refuse).items():
            if key in keys:
                self._take(self.source.where(name, key), name, keys[key], value)
            else:
                self._unknown_key(self.source.where(name, key), name, key)

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
        given = OverrideText(text)
        entry[inner[-1]] = given if named_class(key.annotation) else read_entry(".".join(inner), given, key.setting)
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
