"""Data sets of the Hub that need no settings: their columns, split, instruction and reward are known here by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from offbeat_core import find_hub_name
from offbeat_data._sources.sources import SourceConfig

SectionT = TypeVar("SectionT")
DataT = TypeVar("DataT", bound=SourceConfig)


@cache
def _known() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("offbeat_data").joinpath("_sources/known_sets.toml").read_text())


def fill_known_data(data: DataT) -> tuple[DataT, tuple[str, ...]]:
    """Set what section `data` leaves at its defaults as the data set that `path` names has it.

    Returns:
        The section, and each choice in words; the same section where the set is not known.
    """
    name = find_hub_name(data.path, "dataset")
    known = _known().get(name.repository, {}) if name else {}
    if name is None or not known:
        return data, ()
    filled, choices = _fill(data, "data", known.get("data", {}), name.repository)
    if (config := known.get("config")) and not name.config:
        filled = replace(filled, path=str(replace(name, config=config)))
    return filled, choices


def fill_known_reward(reward: SectionT, data: SourceConfig) -> tuple[SectionT, tuple[str, ...]]:
    """Set a section `reward` that names none as the data set has it: see `fill_known_data`."""
    name = find_hub_name(data.path, "dataset")
    known = _known().get(name.repository, {}) if name else {}
    return _fill(reward, "reward", known.get("reward", {}), name.repository if name else "")


def _fill(
    section: SectionT, title: str, values: Mapping[str, Any], repository: str
) -> tuple[SectionT, tuple[str, ...]]:
    """Set the keys that have their default."""
    defaults = {each.name: each.default for each in fields(section)}  # type: ignore[arg-type]
    changed = {
        key: value
        for key, value in values.items()
        if key in defaults and getattr(section, key) == defaults[key] and value != defaults[key]
    }
    choices = tuple(f"{title}.{key} = {value!r} (as {repository} has it)" for key, value in changed.items())
    return (replace(section, **changed), choices) if changed else (section, ())  # type: ignore[type-var]
