"""The argument `reward`: names, functions, or several of them, as the `reward` section and the functions by name."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offbeat_core import ConfigError

RewardName: TypeAlias = str | Callable[..., Any]
RewardArgument: TypeAlias = RewardName | list[RewardName] | Mapping[Any, Any] | None
"""A reward, several of them, or several with their weights; or the `reward` section, which has `name` or `weights`."""


def read_reward(reward: RewardArgument) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Return the `reward` section, and the functions that it names, by their names.

    Raises:
        ConfigError: it is nothing that a reward may be.
    """
    functions: dict[str, Callable[..., Any]] = {}

    def name_of(given: Any) -> str:
        if isinstance(given, str):
            return given
        if not callable(given):
            raise ConfigError(f"reward: must be a name or a function, or several in a list or dict, got {given!r:.80}")
        name = next((name for name, known in functions.items() if known is given), "") or _free_name(given, functions)
        functions[name] = given
        return f"offbeat.caller:{name}"

    def weights_of(given: Any) -> dict[str, Any]:
        pairs = given.items() if isinstance(given, Mapping) else [(each, 1.0) for each in given]
        return {name_of(each): weight for each, weight in pairs}

    if reward is None:
        return {}, {}
    if isinstance(reward, Mapping) and not {"name", "weights"}.isdisjoint(reward):
        section = dict(reward)
        if "name" in section:
            section["name"] = name_of(section["name"])
        if "weights" in section:
            section["weights"] = weights_of(section["weights"])
        return section, functions
    if isinstance(reward, Mapping | list | tuple):
        return {"weights": weights_of(reward)}, functions
    return {"name": name_of(reward)}, functions


def _free_name(function: Callable[..., Any], taken: Mapping[str, Any]) -> str:
    """Return the function's own name, as a name of Python: a lambda is called `lambda_`, a second one `lambda_2`."""
    own = getattr(function, "__name__", type(function).__name__)
    name = re.sub(r"\W", "", own).strip("_") or "reward"
    name = f"{name}_" if name == "lambda" or not name.isidentifier() else name
    return next(each for each in (name, *(f"{name}{n}" for n in range(2, len(taken) + 3))) if each not in taken)
