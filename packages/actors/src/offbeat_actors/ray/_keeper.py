"""The keeper: a Ray actor that holds one block of a node and runs the processes of its roles there.

The processes are its children and die with it. It does nothing itself but pass bytes on, so it answers at once
whatever they do: it tells their exit codes, their last lines, and whether one is stopped.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

from offbeat_actors.ray._import import import_ray
from offbeat_actors.ray._kept_process import KeptProcess
from offbeat_actors.ray._messages import Order, Started, Whereabouts, decode, encode
from offbeat_types import ConfigError, OffbeatError

_TOKEN: Final = "RAY_AUTH_TOKEN"
_VISIBLE: Final = "VISIBLE"
"""In the name of every variable by which Ray tells a process its devices, whatever their kind."""


class Keeper:
    """All its methods take and give bytes, numbers and texts: see `_messages`."""

    def __init__(self) -> None:
        self._processes: dict[str, KeptProcess] = {}

    async def whereabouts(self) -> bytes:
        """Where it is and what it holds."""
        return encode(_whereabouts(import_ray()))

    async def start(self, order: bytes) -> bytes:
        """Start a process."""
        wanted = decode(order, Order)
        try:
            devices = _visible_devices(_whereabouts(import_ray()).devices, wanted.devices)
            process = KeptProcess(wanted, {**_own_environment(), **devices, **wanted.env})
        except (OSError, OffbeatError) as error:
            return encode(Started(0, str(error)))
        self._processes[wanted.key] = process
        return encode(Started(process.pid))

    async def send(self, key: str, data: bytes) -> None:
        """Write to the socket of a process."""
        if process := self._processes.get(key):
            await process.send(data)

    async def receive(self, key: str, patience_s: float) -> bytes:
        """Wait for news of a process; the last report, with its end, is given once."""
        report = await self._processes[key].report(patience_s)
        if report.ended is not None:
            self._processes.pop(key, None)
        return encode(report)

    async def send_signal(self, key: str, number: int) -> None:
        """Send a signal to the group of a process."""
        if process := self._processes.get(key):
            process.send_signal(number)

    async def state(self, key: str) -> str:
        """What a process is doing, when that is odd."""
        process = self._processes.get(key)
        return process.state() if process else ""


def _own_environment() -> dict[str, str]:
    """The variables of this worker, without what opens the cluster: roles run code that models have written."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TOKEN)}


def _whereabouts(ray: Any) -> Whereabouts:
    context = ray.get_runtime_context()
    devices = [device for held in context.get_accelerator_ids().values() for device in held]
    return Whereabouts(context.get_node_id(), ray.util.get_node_ip_address(), sorted(devices, key=_device_order))


def _device_order(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (1 << 62, device)


def _visible_devices(held: list[str], ordinals: list[int] | None) -> Mapping[str, str]:
    """Variables that show a process its own part of what the block holds. Ray has shown the whole of it already.

    Raises:
        ConfigError: Ray was told to set no such variable, so that every process would see all devices of the node.
    """
    if ordinals is None or not held:
        return {}
    names = [name for name, value in os.environ.items() if _VISIBLE in name and _is_list_of(value, held)]
    if not names:
        raise ConfigError(
            "Ray told this worker its devices in no environment variable (RAY_EXPERIMENTAL_NOSET_...?): roles of one "
            "block cannot be kept apart"
        )
    return dict.fromkeys(names, ",".join(held[ordinal] for ordinal in ordinals))


def _is_list_of(value: str, devices: list[str]) -> bool:
    return sorted(value.split(",")) == sorted(devices)
