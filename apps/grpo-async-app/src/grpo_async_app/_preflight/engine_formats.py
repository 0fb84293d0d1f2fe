"""The formats in which engines hold a model's weights, keys and values, as their backends tell."""

from typing import Any

from grpo_async_app._config.sections import RolloutConfig
from offbeat_core import HeldBytes, RolloutEngineSettings, installed_backends, load_backend


def held_bytes(backend: str, settings: RolloutEngineSettings) -> HeldBytes:
    """Return what a backend holds in FP8; of one that is not installed or does not say, the formats of `dtype`."""
    if backend not in installed_backends("offbeat.rollout"):
        return HeldBytes()
    notify: Any = getattr(load_backend("offbeat.rollout", backend), "held_bytes", None)
    held: HeldBytes = notify(settings) if notify else HeldBytes()
    return held


def rounding_reason(rollout: RolloutConfig) -> str:
    """Return why engines compute with coarser numbers than those of `rollout.dtype`; empty where they do not.

    `weight_format` rounds weights on their way, also of an engine that then holds them in `dtype`.
    """
    if rollout.weight_format != "dtype":
        return f"rollout.weight_format = {rollout.weight_format}: the engines sample with rounded weights"
    held = held_bytes(rollout.backend, rollout)
    if not (held.matrices or held.cache):
        return ""
    rounded = ("weights, keys and values" if held.cache else "weights") if held.matrices else "keys and values"
    return f"rollout.options: the engines hold {rounded} in FP8"
