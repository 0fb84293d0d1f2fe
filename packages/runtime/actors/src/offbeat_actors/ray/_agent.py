"""The agent of a node as a Ray actor, which runs the processes of a block there.

Ray carries top-level bytes as they are, and numbers and short texts as msgpack, so that no call of ours is pickled.
Source: Ray 2.60, python/ray/_private/serialization.py, SerializationContext.serialize.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from offbeat_actors._agent import NodeAgent, Order, encode
from offbeat_actors.ray._cluster import import_ray
from offbeat_core import ConfigError


class AgentLocation(msgspec.Struct, frozen=True):
    """Location of a NodeAgent, sent to the driver.

    Args:
        node: Ray's id of the node, in hex.
        address: IP address of the node.
        devices: ids of its devices on that node, in order.
    """

    node: str
    address: str
    devices: list[str]


_TOKEN: Final = "RAY_AUTH_TOKEN"
_VISIBLE: Final = "VISIBLE"
"""Part of the name of every variable by which Ray gives a process its devices, whatever their kind."""


class RayNodeAgent(NodeAgent):
    """Runs the processes of a block; Ray has given it the devices."""

    async def whereabouts(self) -> bytes:
        """Return where it is and what it holds."""
        return encode(_whereabouts(import_ray()))

    def _environment_of(self, order: Order) -> Mapping[str, str]:
        """Return the variables of a process: see `NodeAgent`."""
        return {**_own_environment(), **_visible_devices(_whereabouts(import_ray()).devices, order.devices)}


def _own_environment() -> dict[str, str]:
    """Return the variables of this worker, without what opens the cluster: roles run code that models have written."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TOKEN)}


def _whereabouts(ray: Any) -> AgentLocation:
    context = ray.get_runtime_context()
    devices = [device for held in context.get_accelerator_ids().values() for device in held]
    return AgentLocation(context.get_node_id(), ray.util.get_node_ip_address(), sorted(devices, key=_device_order))


def _device_order(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (1 << 62, device)


def _visible_devices(held: list[str], ordinals: list[int] | None) -> Mapping[str, str]:
    """Variables that show a process its own part of what the block holds. Ray has shown the whole of it already.

    Raises:
        ConfigError: Ray is configured to set no such variable, so every process would see all devices of the node.
    """
    if ordinals is None or not held:
        return {}
    names = [name for name, value in os.environ.items() if _VISIBLE in name and _is_list_of(value, held)]
    if not names:
        raise ConfigError(
            "Ray set no environment variable with this worker's devices (RAY_EXPERIMENTAL_NOSET_...?): roles of one "
            "block cannot be kept apart"
        )
    return dict.fromkeys(names, ",".join(held[ordinal] for ordinal in ordinals))


def _is_list_of(value: str, devices: list[str]) -> bool:
    return sorted(value.split(",")) == sorted(devices)
