"""Makes a recipe fit a cluster: finds the smallest changes of settings, and writes them into the recipe's own text."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from offbeat_placement import Change, Suggestion, suggest_changes
from offbeat_recipes._placement import Site, Wanted
from offbeat_recipes._recipe_text import ConfigT, Setting, change_recipe, with_settings
from offbeat_run import write_new_file
from offbeat_types import ConfigError, PlacementError

_MADE_TO_FIT: Final = "made to fit another cluster: where words and settings differ, the settings hold."
_MAX_ROUNDS: Final = 4
"""The allocation may need a change, and then a group within it."""

Companions = Callable[[ConfigT, Mapping[str, Setting]], Mapping[str, Setting]]
"""Settings that must change together with those that are changed."""


def no_companions(_: object, __: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """No setting needs another."""
    return {}


def fit_settings(
    config: ConfigT, site: Site, want: Callable[[ConfigT], Wanted], companions: Companions[ConfigT] = no_companions
) -> dict[str, Setting]:
    """Settings that make a run fit, by "section.key"; empty when it fits as it is.

    Args:
        config: of the run.
        site: to fit it to.
        want: what a configuration asks for.
        companions: see `Companions`.

    Raises:
        PlacementError: no change of settings makes it fit.
    """
    settings: dict[str, Setting] = {}
    for _ in range(_MAX_ROUNDS):
        wanted = want(with_settings(config, settings))
        try:
            wanted.place(site)
        except PlacementError as error:
            suggestions = suggest_changes(site.nodes, wanted.groups, wanted.allocation)
            usable = [each for each in suggestions if _can_be_set(each)]
            if not usable:
                raise error from None
            settings |= {change.key: _value(change) for change in usable[0]}
            settings |= companions(config, settings)
        else:
            return settings
    raise PlacementError("no change of settings was found that makes the recipe fit: choose the cluster first")


def _can_be_set(suggestion: Suggestion) -> bool:
    return all(change.field != "nodes" for change in suggestion)


def _value(change: Change) -> Setting:
    return True if change.field == "shares_devices_with" else int(change.setting)


def write_fitted(recipe: Path, target: Path, config: ConfigT, settings: Mapping[str, Setting]) -> ConfigT:
    """Write a recipe with changed settings to a new file.

    Args:
        recipe: to change; stays as it is.
        target: the new file.
        config: of the recipe.
        settings: of `fit_settings`.

    Returns:
        The configuration with the changes.

    Raises:
        ConfigError: there is nothing to change, or the text cannot be changed line by line.
        RunFolderError: the new file is there already, or cannot be written.
    """
    if not settings:
        raise ConfigError(f"{recipe} fits as it is: nothing to write to {target}")
    changed = change_recipe(recipe.read_text(), settings, type(config))
    write_new_file(target, f"# {recipe.name} {_MADE_TO_FIT}\n#\n{changed}", "--fit")
    return with_settings(config, settings)
