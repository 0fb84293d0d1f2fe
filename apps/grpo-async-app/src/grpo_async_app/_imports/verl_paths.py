"""Paths of a script of verl, written so that the file runs on other machines too."""

import os
import re
from collections.abc import Mapping
from typing import Final

from offbeat_recipes import Entry, RecipeBuilder

_KEYS: Final = ("model.path", "teacher.path", "critic.path", "data.path", "data.eval_path", "reward.reward_model.path")
_FOLDERS: Final = {"data": ("OFFBEAT_DATA", "data"), "models": ("OFFBEAT_MODELS", "models")}
"""Folders below the home folder, with the variable that names another in the recipes here, and what it holds."""
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_ARGUMENT: Final = re.compile(r"\$\{\d+\}")
_UNSET: Final = "~/verl"
"""Place of a variable that nothing sets. Source: verl, scripts of DAPO (RAY_DATA_HOME is ${HOME}/verl)."""


def write_portable_paths(draft: RecipeBuilder, variables: Mapping[str, tuple[str, str]]) -> None:
    """Write paths with variables of the environment: those of the script, with its defaults, and those of our recipes.

    Args:
        draft: with the paths as the script has them.
        variables: by option, the variable that its path begins with, and the default of the script.
    """
    for key in _KEYS:
        entry = draft.entries.get(key)
        if entry is not None and isinstance(entry.value, str):
            draft.entries[key] = Entry(_portable(draft, entry, variables), entry.source)
    if sets := draft.entries.get("eval.sets"):
        tables = {
            name: {**table, "path": _portable(draft, Entry(table["path"], sets.source), variables)}
            for name, table in sets.value.items()
        }
        draft.entries["eval.sets"] = Entry(tables, sets.source)


def _portable(draft: RecipeBuilder, entry: Entry, variables: Mapping[str, tuple[str, str]]) -> str:
    path = str(entry.value)
    found = variables.get(_option(entry))
    if found is None:
        return _outer(draft, entry, path)
    name, usual = found
    default = _inner(draft, entry, usual)
    if "${" in default:  # a default in our files holds no other variable
        return path
    return f"${{{name}:-{default}}}{path.removeprefix(usual)}"


def _outer(draft: RecipeBuilder, entry: Entry, path: str) -> str:
    """Rewrite a path that does not begin with a variable to which the script gives a default."""
    if _ARGUMENT.match(path):
        _notify(draft, entry, f"an argument of the script: name it in place of {_UNSET}")
        return _ARGUMENT.sub(_UNSET, path, count=1)
    found = _REFERENCE.match(path)
    if found is None:
        return path
    rest = path[found.end() :]
    if found[1] != "HOME":
        if os.environ.get(found[1]) is None:
            _notify(draft, entry, f"{found[1]} is not set: {_UNSET} is used until it is")
        return f"${{{found[1]}:-{_UNSET}}}{rest}"
    folder = rest.strip("/").partition("/")[0]
    if folder not in _FOLDERS:
        return f"~{rest}"
    variable, what = _FOLDERS[folder]
    _notify(draft, entry, f"{variable} names the folder of {what}; without it ~/{folder}")
    return f"${{{variable}:-~/{folder}}}{rest.removeprefix(f'/{folder}')}"


def _inner(draft: RecipeBuilder, entry: Entry, default: str) -> str:
    """Return a default of the script without a variable at its beginning."""
    found = _REFERENCE.match(default)
    if found is None:
        return default
    value = "~" if found[1] == "HOME" else os.environ.get(found[1])
    if value is None:
        _notify(draft, entry, f"{found[1]} is not set: using {_UNSET}")
    return (value or _UNSET) + default[found.end() :]


def _notify(draft: RecipeBuilder, entry: Entry, text: str) -> None:
    draft.change(_option(entry), text)


def _option(entry: Entry) -> str:
    """Return the option that a path comes from: the first if several set it."""
    return entry.source.partition(" and ")[0]
