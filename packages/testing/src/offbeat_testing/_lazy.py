"""A copy of `offbeat_core._lazy` for a plugin that every session of pytest loads: offbeat_core imports numpy."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_lazily(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: its `__name__`.
        names: for each of its modules the public names in it, separated by spaces.
    """
    homes = {name: module for module, words in names.items() for name in words.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        except AttributeError as error:  # Python would drop it, and say only that the name cannot be imported
            raise ImportError(f"{name} of {package} cannot be loaded: {error}") from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})
