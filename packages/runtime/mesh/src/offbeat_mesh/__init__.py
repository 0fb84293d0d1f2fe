"""Where a process computes (the device seam), which groups it belongs to (the mesh), and what they say to each other.

Names are loaded when they are asked for: importing a part of it does not import torch before that part needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_mesh._calls import break_off
    from offbeat_mesh._device import (
        AttendedTokens,
        Device,
        DeviceMemory,
        MaskedAttention,
        Profiler,
        StepTracer,
        TraceFiles,
        WorkGraphs,
        open_device,
        rank_device,
    )
    from offbeat_mesh._group import Group, ReduceOp
    from offbeat_mesh._guard import Guard
    from offbeat_mesh._layout import AXES, Layout
    from offbeat_mesh._mesh import Mesh
    from offbeat_mesh._offload import MemoryOffloader
    from offbeat_mesh._rendezvous import Rendezvous, open_rendezvous
    from offbeat_mesh._world import World, current_world, join_world, open_store
    from offbeat_types import available_devices

__all__ = [
    "AXES",
    "AttendedTokens",
    "Device",
    "DeviceMemory",
    "Group",
    "Guard",
    "Layout",
    "MaskedAttention",
    "MemoryOffloader",
    "Mesh",
    "Profiler",
    "ReduceOp",
    "Rendezvous",
    "StepTracer",
    "TraceFiles",
    "WorkGraphs",
    "World",
    "available_devices",
    "break_off",
    "current_world",
    "join_world",
    "open_device",
    "open_rendezvous",
    "open_store",
    "rank_device",
]

_NAMES = {
    "_calls": "break_off",
    "_device": "AttendedTokens Device DeviceMemory MaskedAttention Profiler StepTracer TraceFiles WorkGraphs"
    " available_devices open_device rank_device",
    "_group": "Group ReduceOp",
    "_guard": "Guard",
    "_layout": "AXES Layout",
    "_mesh": "Mesh",
    "_offload": "MemoryOffloader",
    "_rendezvous": "Rendezvous open_rendezvous",
    "_world": "World current_world join_world open_store",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


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
