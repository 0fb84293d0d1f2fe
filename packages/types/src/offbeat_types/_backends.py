"""Finds backends by entry point, so that no caller holds `if backend == ...`."""

from importlib.metadata import entry_points
from typing import Any, Final

from offbeat_types._errors import BackendError

INSTALL_LINES: Final = {
    ("offbeat.rollout", "torch"): "pip install offbeat-rollout-torch",
    ("offbeat.rollout", "vllm"): 'pip install "offbeat-rollout-vllm[engine]"',
    ("offbeat.rollout", "trtllm"): "pip install offbeat-rollout-trtllm, in the container of TensorRT-LLM",
    ("offbeat.engine", "torch"): "pip install offbeat-engine-torch",
    ("offbeat.engine", "megatron"): 'pip install "offbeat-engine-megatron[engine]"',
    ("offbeat.launcher", "local"): "pip install offbeat-cluster",
    ("offbeat.launcher", "ray"): 'pip install "offbeat-cluster[ray]"',
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
