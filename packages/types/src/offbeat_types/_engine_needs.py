"""What an engine needs in order to run on a kind of device: the device says it, so that no engine names kinds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from offbeat_types._backends import installed_backends, load_backend
from offbeat_types._rollout import RolloutEngineSettings

DEVICE_GROUP = "offbeat.device"


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """What an engine needs on one kind of device.

    Args:
        variables: of the environment that it must start with, whatever the user has set.
        options: in the engine's own words, in place of the user's of these names, which they hold.
        notice: what is known to speak against it; "" for nothing.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    notice: str = ""


def engine_needs(library: str, settings: RolloutEngineSettings, *, releases: Collection[str]) -> EngineNeeds:
    """Ask the kind of device that the settings name; nothing is needed where none is named, or it asks for nothing.

    The device need not be here. Its class is asked by `engine_needs(library, devices, options, releases)`, which it may
    have or not.

    Args:
        library: such as "vllm".
        settings: `device` such as "cuda:0", `tensor_parallel` devices from there on, `options` of the user.
        releases: of the library, such as "0.32", one of which is going to be used.

    Raises:
        ConfigError: an option that cannot be on this kind of device.
    """
    kind, _, first = settings.device.partition(":")
    if kind not in installed_backends(DEVICE_GROUP):
        return EngineNeeds()
    ask = getattr(load_backend(DEVICE_GROUP, kind), "engine_needs", None)
    if ask is None:
        return EngineNeeds()
    devices = range(int(first), int(first) + settings.tensor_parallel) if first.isdecimal() else range(0)
    needs: EngineNeeds = ask(library, devices, settings.options, releases)
    return needs
