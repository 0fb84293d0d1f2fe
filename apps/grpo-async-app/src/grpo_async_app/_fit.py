"""Makes a recipe fit a cluster: finds the smallest changes of settings, and writes them into the recipe's own text."""

import keyword
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._placement import Site, place_run, wanted_allocation, wanted_groups
from offbeat_cluster.placement import Change, Suggestion, suggest_changes
from offbeat_run import parse_config
from offbeat_types import ConfigError, PlacementError

Setting = bool | int
_IN_TURNS: Final[Mapping[str, Setting]] = {
    "async.staleness_threshold": 0,
    "async.trigger_parameter_sync_step": 1,
    "async.partial_rollout": False,
}
"""What goes with cluster.colocate: roles that take turns train synchronously."""
_MAX_ROUNDS: Final = 4
"""The allocation may need a change, and then a group within it."""


def fit_settings(config: GrpoConfig, site: Site) -> dict[str, Setting]:
    """Settings that make a run fit, by key; empty when it fits as it is.

    Args:
        config: of the run.
        site: to fit it to.

    Raises:
        PlacementError: no change of settings makes it fit.
    """
    settings: dict[str, Setting] = {}
    for _ in range(_MAX_ROUNDS):
        changed = with_settings(config, settings)
        try:
            place_run(changed, site)
        except PlacementError as error:
            groups = wanted_groups(changed, site)
            suggestions = suggest_changes(site.nodes, groups, wanted_allocation(changed, site))
            usable = [each for each in suggestions if _can_be_set(each)]
            if not usable:
                raise error from None
            settings |= {change.key: _value(change) for change in usable[0]}
            if "cluster.colocate" in settings and config.async_.mode != "on-policy pipeline":
                settings |= _IN_TURNS
        else:
            return settings
    raise PlacementError("no change of settings was found that makes the recipe fit: choose the cluster first")


def _can_be_set(suggestion: Suggestion) -> bool:
    return all(change.field != "nodes" for change in suggestion)


def _value(change: Change) -> Setting:
    return True if change.field == "shares_devices_with" else int(change.setting)


def with_settings(config: GrpoConfig, settings: Mapping[str, Setting]) -> GrpoConfig:
    """The configuration with settings changed.

    Args:
        config: to change.
        settings: by "section.key".
    """
    by_section: dict[str, dict[str, Setting]] = {}  # together: one setting may be allowed with another only
    for path, value in settings.items():
        section, key = _field(path)
        kept = isinstance(getattr(getattr(config, section), key), bool)
        by_section.setdefault(section, {})[key] = bool(value) if kept else value
    changed = {section: replace(getattr(config, section), **keys) for section, keys in by_section.items()}
    return replace(config, **changed)


def _field(path: str) -> tuple[str, str]:
    """Names of the section's field and the key's, of "section.key"; `async` is a word of Python's."""
    section, _, key = path.partition(".")
    return section + "_" * keyword.iskeyword(section), key


def change_recipe(text: str, settings: Mapping[str, Setting]) -> str:
    """Write settings into a recipe; every other line, and every comment, stays as it is.

    Args:
        text: of the recipe.
        settings: by "section.key".

    Raises:
        ConfigError: the recipe is written in a way that cannot be changed line by line.
    """
    lines = text.splitlines()
    for path, value in settings.items():
        section, _, key = path.partition(".")
        _set(lines, section, key, str(value).lower())
    changed = "\n".join(lines) + "\n"
    found = parse_config(changed, GrpoConfig, name="the changed recipe")
    for path, value in settings.items():
        if getattr(getattr(found, _field(path)[0]), _field(path)[1]) != value:
            wanted = ", ".join(f"{name} = {str(each).lower()}" for name, each in settings.items())
            raise ConfigError(
                f"the recipe's [{path.partition('.')[0]}] cannot be rewritten line by line: set by hand {wanted}"
            )
    return changed


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    """Change one line, or add one."""
    header = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]")
    start = next((number for number, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    held = re.compile(rf"(\s*{re.escape(key)}\s*=\s*)[^#]*?(\s*#.*)?$")
    for number in range(start + 1, len(lines)):
        if re.match(r"\s*\[", lines[number]):
            break
        if found := held.match(lines[number]):
            lines[number] = f"{found[1]}{value}{found[2] or ''}"
            return
    lines.insert(start + 1, f"{key} = {value}")
