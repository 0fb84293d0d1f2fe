"""The device seam: kinds of devices found by name, what each can do, memory that is lent, compiling, and traces.

Names are loaded when they are asked for: importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from offbeat_device._compiling import compiled, prepare_compiler
    from offbeat_device._cuda import StreamLane, copy_to_device
    from offbeat_device._device import (
        AttendedTokens,
        Device,
        DeviceMemory,
        MaskedAttention,
        Profiler,
        StableMemory,
        WorkGraphs,
        accelerator_kind,
        open_device,
        rank_device,
    )
    from offbeat_device._offload import MemoryOffloader
    from offbeat_device._streaming import StreamedMemory
    from offbeat_device._tracing import StepTracer, TraceFiles

__all__ = [
    "AttendedTokens",
    "Device",
    "DeviceMemory",
    "MaskedAttention",
    "MemoryOffloader",
    "Profiler",
    "StableMemory",
    "StepTracer",
    "StreamLane",
    "StreamedMemory",
    "TraceFiles",
    "WorkGraphs",
    "accelerator_kind",
    "compiled",
    "copy_to_device",
    "open_device",
    "prepare_compiler",
    "rank_device",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_compiling": "compiled prepare_compiler",
        "_cuda": "copy_to_device StreamLane",
        "_device": (
            "accelerator_kind AttendedTokens Device DeviceMemory MaskedAttention open_device Profiler rank_device "
            "StableMemory WorkGraphs"
        ),
        "_offload": "MemoryOffloader",
        "_streaming": "StreamedMemory",
        "_tracing": "StepTracer TraceFiles",
    },
)
