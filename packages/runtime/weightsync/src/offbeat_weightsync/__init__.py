"""Moves weights from a trainer to rollout engines, and proves that they arrived: bucket plan and transports."""

from offbeat_weightsync._addresses import new_address, new_socket_path
from offbeat_weightsync._changes import WeightCopy
from offbeat_weightsync._fp8 import (
    DequantizedStream,
    dequantize_blocks,
    fp8_specs,
    is_fp8_weight,
    quantize_blocks,
    quantize_tensors,
)
from offbeat_weightsync._names import EXPERTS, GATE_UP, QKV, NameMap, TensorSlice, merge_adapter, select_adapter
from offbeat_weightsync._peer_stream import KeptStream, PeerStream
from offbeat_weightsync._plan import Bucket, BucketPlan, Piece
from offbeat_weightsync._receiver import receive, transport_class
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._stream import ArrivingStream, InProcessStream
from offbeat_weightsync._sums.parts import HeldPart, PartSum
from offbeat_weightsync._tensors import describe_tensors, tensor_checksums
from offbeat_weightsync._transport import Endpoint, Reach, Route, Transport, open_transport
from offbeat_weightsync._transports.auto import open_sender
from offbeat_weightsync._transports.disk import DiskSender, FolderStream
from offbeat_weightsync._transports.group import GroupSender, GroupStream
from offbeat_weightsync._transports.shared_memory import (
    SharedMemorySender,
    SharedMemoryStream,
    SharedMemoryTransport,
)
from offbeat_weightsync._transports.tcp import TcpSender, TcpStream
from offbeat_weightsync._transports.version_folder import read_weights, write_weights
from offbeat_weightsync._weight_group import WeightGroup

__all__ = [
    "EXPERTS",
    "GATE_UP",
    "QKV",
    "ArrivingStream",
    "Bucket",
    "BucketPlan",
    "DequantizedStream",
    "DiskSender",
    "Endpoint",
    "FolderStream",
    "GroupSender",
    "GroupStream",
    "HeldPart",
    "InProcessStream",
    "KeptStream",
    "NameMap",
    "PartSum",
    "PeerStream",
    "Piece",
    "Reach",
    "Route",
    "SharedMemorySender",
    "SharedMemoryStream",
    "SharedMemoryTransport",
    "TcpSender",
    "TcpStream",
    "TensorSlice",
    "Transport",
    "WeightCopy",
    "WeightGroup",
    "WeightSender",
    "dequantize_blocks",
    "describe_tensors",
    "fp8_specs",
    "is_fp8_weight",
    "merge_adapter",
    "new_address",
    "new_socket_path",
    "open_sender",
    "open_transport",
    "quantize_blocks",
    "quantize_tensors",
    "read_weights",
    "receive",
    "select_adapter",
    "tensor_checksums",
    "transport_class",
    "write_weights",
]
