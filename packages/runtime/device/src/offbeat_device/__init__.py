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
    from offbeat_device._exact import (
        ExactLayer,
        can_pack,
        check_exact,
        check_exact_family,
        exact_attention,
        exact_head,
        exact_layer,
        exact_logsumexp,
        exact_norm,
        exact_product,
        exact_with_gradient_of,
        pack_matrix,
        row_sum,
        trained_product,
    )
    from offbeat_device._offload import MemoryOffloader
    from offbeat_device._streaming import StreamedMemory
    from offbeat_device._tracing import StepTracer, TraceFiles

__all__ = [
    "AttendedTokens",
    "Device",
    "DeviceMemory",
    "ExactLayer",
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
    "can_pack",
    "check_exact",
    "check_exact_family",
    "compiled",
    "copy_to_device",
    "exact_attention",
    "exact_head",
    "exact_layer",
    "exact_logsumexp",
    "exact_norm",
    "exact_product",
    "exact_with_gradient_of",
    "open_device",
    "pack_matrix",
    "prepare_compiler",
    "rank_device",
    "row_sum",
    "trained_product",
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
        "_exact": (
            "can_pack check_exact check_exact_family exact_attention exact_head exact_layer exact_logsumexp exact_norm "
            "exact_product exact_with_gradient_of ExactLayer pack_matrix row_sum trained_product"
        ),
        "_offload": "MemoryOffloader",
        "_streaming": "StreamedMemory",
        "_tracing": "StepTracer TraceFiles",
    },
)
