"""Imports Ray, the first time that something needs it."""

import os
from importlib import import_module
from typing import Any, Final

from offbeat_types import INSTALL_LINES, BackendError

_OLDEST: Final = (2, 60)
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray has every worker started anew by `uv run` when the driver was.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def import_ray() -> Any:
    """The module, with everything that this package uses of it.

    Raises:
        BackendError: it is not installed, with the install line, or too old.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    line = INSTALL_LINES["offbeat.launcher", "ray"]
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
        import_module("ray.exceptions")
    except ImportError as error:
        raise BackendError(f'cluster.launcher = "ray" needs Ray: {line}') from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _OLDEST:
        raise BackendError(f"needs Ray {_OLDEST[0]}.{_OLDEST[1]} or newer, got {ray.__version__}: {line}")
    return ray
