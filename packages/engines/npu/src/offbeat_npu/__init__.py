"""Ascend NPUs as a device of offbeat. The only package that names them."""

from offbeat_npu._device import NpuDevice
from offbeat_npu._environment import RAY_RESOURCE, VISIBLE_DEVICES, cann_version, check_pair, examine_environment
from offbeat_npu._masks import (
    PackedBatch,
    PaddedBatch,
    VisionBatch,
    dense_batch,
    packed_batch,
    vision_batch,
)
from offbeat_npu._operators import REFERENCE, Operators, substitute_operators
from offbeat_npu._runtime import patch_megatron

__all__ = [
    "RAY_RESOURCE",
    "REFERENCE",
    "VISIBLE_DEVICES",
    "NpuDevice",
    "Operators",
    "PackedBatch",
    "PaddedBatch",
    "VisionBatch",
    "cann_version",
    "check_pair",
    "dense_batch",
    "examine_environment",
    "packed_batch",
    "patch_megatron",
    "substitute_operators",
    "vision_batch",
]
