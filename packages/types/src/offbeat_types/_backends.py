"""Finds backends by entry point, so that no caller holds `if backend == ...`."""

import os
import sys
from importlib.metadata import entry_points
from typing import Any, Final

from offbeat_types._errors import BackendError

AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
INSTALL_LINES: Final = {
    ("offbeat.rollout", "torch"): "pip install offbeat-rollout-torch",
    ("offbeat.rollout", "vllm"): 'pip install "offbeat-rollout-vllm[engine]"',
    ("offbeat.rollout", "trtllm"): "pip install offbeat-rollout-trtllm",
    ("offbeat.engine", "torch"): "pip install offbeat-engine-torch",
    ("offbeat.engine", "megatron"): 'pip install "offbeat-engine-megatron[engine]"',
    ("offbeat.launcher", "local"): "pip install offbeat-actors",
    ("offbeat.launcher", "ray"): 'pip install "offbeat-actors[ray]"',
}


def installed_backends(kind: str) -> tuple[str, ...]:
    """Names registered under the entry-point group `kind`, such as "offbeat.rollout", sorted."""
    return tuple(sorted({point.name for point in entry_points(group=kind)}))


def load_backend(kind: str, name: str) -> Any:
    """Load the object that a backend registered.

    Args:
        kind: entry-point group: `offbeat.rollout`, `offbeat.engine`, `offbeat.device`, `offbeat.launcher`.
        name: such as "torch" or "vllm".

    Raises:
        BackendError: not installed, with the install line, or unknown, with the names that are.
    """
    for point in entry_points(group=kind):
        if point.name == name:
            return point.load()
    installed = ", ".join(installed_backends(kind)) or "none"
    line = INSTALL_LINES.get((kind, name))
    advice = f"install it with: {line}" if line else "check the name"
    raise BackendError(f"{kind} backend {name!r} is not installed (installed: {installed}); {advice}")


def defer_device_backends() -> None:
    """Let a plugin of torch for a kind of device be imported when that device is opened, and not before.

    torch imports installed plugins by itself, and transformers those it knows; where a plugin's driver is missing, both
    imports fail, and with them whatever does not need the device. So torch is told not to, and until `restore_module`
    the plugins look as if they were not installed. Every process of a command calls this before it imports torch. Where
    the user has set TORCH_DEVICE_BACKEND_AUTOLOAD, nothing is done.
    """
    if os.environ.setdefault(AUTOLOAD, "0") == "0":
        for point in entry_points(group="torch.backends"):
            sys.modules.setdefault(point.module.partition(".")[0], None)  # type: ignore[arg-type]


def restore_module(name: str) -> None:
    """Let a plugin be imported that `defer_device_backends` has hidden."""
    if name in sys.modules and sys.modules[name] is None:
        del sys.modules[name]
