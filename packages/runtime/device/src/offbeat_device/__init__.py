"""The device seam: kinds of devices found by name, what each can do, memory that is lent, and traces.

Names are loaded when they are asked for: importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_device._device import (
        AttendedTokens,
        Device,
        DeviceMemory,
        MaskedAttention,
        Profiler,
        WorkGraphs,
        open_device,
        rank_device,
    )
    from offbeat_device._offload import MemoryOffloader
    from offbeat_device._tracing import StepTracer, TraceFiles

__all__ = [
    "AttendedTokens",
    "Device",
    "DeviceMemory",
    "MaskedAttention",
    "MemoryOffloader",
    "Profiler",
    "StepTracer",
    "TraceFiles",
    "WorkGraphs",
    "open_device",
    "rank_device",
]

_NAMES = {
    "_device": "AttendedTokens Device DeviceMemory MaskedAttention Profiler WorkGraphs open_device rank_device",
    "_offload": "MemoryOffloader",
    "_tracing": "StepTracer TraceFiles",
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
