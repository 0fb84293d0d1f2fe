"""Moves weights from a trainer to rollout engines, and proves that they arrived: bucket plan and transports."""

from offbeat_core import TensorSpec
from offbeat_weightsync._addresses import new_address, new_socket_path
from offbeat_weightsync._changes import WeightCopy
from offbeat_weightsync._disk import (
    DiskStream,
    list_versions,
    read_weights,
    write_weights,
)
from offbeat_weightsync._fp8 import (
    DequantizedStream,
    dequantize_blocks,
    fp8_specs,
    is_fp8_weight,
    quantize_blocks,
    quantize_tensors,
)
from offbeat_weightsync._group import WeightGroup
from offbeat_weightsync._names import EXPERTS, GATE_UP, QKV, Fusion, NameMap, TensorSlice, merge_adapter, select_adapter
from offbeat_weightsync._plan import DEFAULT_BUCKET_BYTES, Bucket, BucketPlan, Piece
from offbeat_weightsync._receiver import (
    FolderStream,
    GroupStream,
    KeptStream,
    PeerStream,
    SharedMemoryStream,
    TcpStream,
    receive,
)
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._stream import ArrivingStream, InProcessStream
from offbeat_weightsync._tensors import describe_tensors, tensor_checksums
from offbeat_weightsync._transports import DiskSender, GroupSender, SharedMemorySender, TcpSender, open_sender

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "EXPERTS",
    "GATE_UP",
    "QKV",
    "ArrivingStream",
    "Bucket",
    "BucketPlan",
    "DequantizedStream",
    "DiskSender",
    "DiskStream",
    "FolderStream",
    "Fusion",
    "GroupSender",
    "GroupStream",
    "InProcessStream",
    "KeptStream",
    "NameMap",
    "PeerStream",
    "Piece",
    "SharedMemorySender",
    "SharedMemoryStream",
    "TcpSender",
    "TcpStream",
    "TensorSlice",
    "TensorSpec",
    "WeightCopy",
    "WeightGroup",
    "WeightSender",
    "dequantize_blocks",
    "describe_tensors",
    "fp8_specs",
    "is_fp8_weight",
    "list_versions",
    "merge_adapter",
    "new_address",
    "new_socket_path",
    "open_sender",
    "quantize_blocks",
    "quantize_tensors",
    "read_weights",
    "receive",
    "select_adapter",
    "tensor_checksums",
    "write_weights",
]
