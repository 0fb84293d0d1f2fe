"""Builds the section classes that stand within a section: tables under names of the user's, and tables in these."""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from typing import Any, Final

from offbeat_core._config.paths import ValueProblemError, place
from offbeat_core._config.schema import Key, keys_of, named_class, nested_class
from offbeat_core._config.setting import Setting
from offbeat_core._config.values import NONE, fit, fit_override, parse_scalar
from offbeat_core._errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class OverrideText:
    """The words of an override, which are read as the type of their setting asks."""

    text: str


Path = tuple[str, ...]
Report = Callable[[Path, str, bool], None]
"""Takes a problem: the keys that lead to it, the text, and whether an override has brought the value."""


def build_named(key: Key, tables: Any, report: Report) -> dict[str, Any]:
    """Return the instances of a setting `dict[str, D]`; what is wrong goes to `report`.

    Args:
        key: the setting.
        tables: what the file and the overrides hold, by the user's names.
        report: takes every problem.
    """
    path: Path = (key.name,)
    if not isinstance(tables, Mapping):
        report(path, f"must be {key.required}, got a single value", isinstance(tables, OverrideText))
        return {}
    found = {}
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            report((*path, name), "a name is letters, digits, dashes and underscores", False)
        found[name] = _build(named_class(key.annotation), table, (*path, name), report)
    return found


def _build(cls: Any, table: Any, path: Path, report: Report) -> Any:
    """Return an instance of a section class; None where something is wrong with it, which is reported."""
    if not isinstance(table, Mapping):
        report(path, f"must be a table, [...{'.'.join(path)}], got a single value", isinstance(table, OverrideText))
        return None
    keys, values, is_sound = keys_of(cls), dict[str, Any](), True

    def complain(where: Path, text: str, from_override: bool) -> None:
        nonlocal is_sound
        is_sound = False
        report(where, text, from_override)

    for name, value in table.items():
        if name in keys:
            values[keys[name].field_name] = _value(keys[name], value, (*path, name), complain)
        else:
            near = get_close_matches(name, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(keys)}"
            complain((*path, name), f"unknown key; {hint}", isinstance(value, OverrideText))
    for key in keys.values():
        if key.field_name not in values and key.default is MISSING:
            complain(path, f"{key.name}: required and not given ({key.required})", False)
    if not is_sound:
        return None
    try:
        return cls(**values)
    except (ConfigError, ValueError) as error:
        report(path, str(error), False)
        return None


def _value(key: Key, value: Any, path: Path, complain: Report) -> Any:
    if nested := nested_class(key.annotation):
        is_none = value == NONE or value == OverrideText(NONE)
        return None if is_none else _build(nested, value, path, complain)
    try:
        if isinstance(value, OverrideText):
            return fit_override(value.text, key.annotation, key.setting)
        return fit(_read(value, key.setting), key.annotation, key.setting)
    except ValueProblemError as problem:
        said = f"must be {key.required}, {problem}" if problem.got else str(problem)
        complain(path, said, isinstance(value, OverrideText))
        return None


def _read(value: Any, setting: Setting) -> Any:
    """Return a table, such as options, of which overrides have set entries, without the marks of these."""
    if not isinstance(value, Mapping):
        return value
    return {name: read_entry(name, item, setting) for name, item in value.items()}


def read_entry(name: str, item: Any, setting: Setting) -> Any:
    """Return an entry of a table of options; paths of an override are relative to the working folder."""
    if isinstance(item, Mapping):
        return {inner: read_entry("", each, setting) for inner, each in item.items()}
    return place({name: parse_scalar(item.text)}, setting)[name] if isinstance(item, OverrideText) else item
