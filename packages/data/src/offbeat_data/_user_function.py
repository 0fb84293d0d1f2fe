"""Functions and classes of a user's own, named in a configuration as module:name."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from offbeat_types import ConfigError


def find_function(section: str, name: str) -> Callable[..., Any]:
    """Import `module:function`, looking in the working folder too, as a script beside it would.

    Args:
        section: of the configuration that names it, for messages.
        name: such as "my_rewards:brevity".

    Raises:
        ConfigError: the import failed, or there is no such function (nearest names).
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{section} {name}: importing {module_name} failed: {type(error).__name__}: {error}; "
            f"Python looks in the working folder {os.getcwd()} and in what is installed"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        if hasattr(module, attribute):
            raise ConfigError(
                f"{section} {name}: {module_name} has no function {attribute!r}: what it has of that name is of type "
                f"{type(function).__name__}, which cannot be called"
            )
        near = difflib.get_close_matches(attribute, vars(module), n=3)
        advice = f"; nearest: {', '.join(near)}" if near else ""
        raise ConfigError(f"{section} {name}: {module_name} has no function {attribute!r}{advice}")
    return function  # type: ignore[no-any-return]
