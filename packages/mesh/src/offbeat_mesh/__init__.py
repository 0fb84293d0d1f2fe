"""Where a process computes (the device seam), which groups it belongs to (the mesh), and what they say to each other.

Names are loaded when they are asked for: importing a part of it does not import torch before that part needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_mesh._asleep import Asleep
    from offbeat_mesh._device import Device, DeviceMemory, Profiler, available_devices, open_device, rank_device
    from offbeat_mesh._group import Group
    from offbeat_mesh._guard import Guard
    from offbeat_mesh._join import join_world
    from offbeat_mesh._layout import AXES, Layout
    from offbeat_mesh._meeting import open_store
    from offbeat_mesh._mesh import Mesh
    from offbeat_mesh._parking import Parking
    from offbeat_mesh._tensors import ReduceOp
    from offbeat_mesh._trace_files import TraceFiles
    from offbeat_mesh._tracing import StepTracer
    from offbeat_mesh._world import World, current_world

_HOMES = {
    "AXES": "_layout",
    "Asleep": "_asleep",
    "Device": "_device",
    "DeviceMemory": "_device",
    "Group": "_group",
    "Guard": "_guard",
    "Layout": "_layout",
    "Mesh": "_mesh",
    "Parking": "_parking",
    "Profiler": "_device",
    "ReduceOp": "_tensors",
    "StepTracer": "_tracing",
    "TraceFiles": "_trace_files",
    "World": "_world",
    "available_devices": "_device",
    "current_world": "_world",
    "join_world": "_join",
    "open_device": "_device",
    "open_store": "_meeting",
    "rank_device": "_device",
}

__all__ = [
    "AXES",
    "Asleep",
    "Device",
    "DeviceMemory",
    "Group",
    "Guard",
    "Layout",
    "Mesh",
    "Parking",
    "Profiler",
    "ReduceOp",
    "StepTracer",
    "TraceFiles",
    "World",
    "available_devices",
    "current_world",
    "join_world",
    "open_device",
    "open_store",
    "rank_device",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except AttributeError as error:  # Python would drop it, and say only that the name cannot be imported
        raise ImportError(f"{name} of {__name__} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
