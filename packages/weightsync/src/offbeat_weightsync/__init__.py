"""Moves weights from a trainer to rollout engines, and proves that they arrived: bucket plan and transports."""

from offbeat_weightsync._addresses import new_socket_path
from offbeat_weightsync._in_process import InProcessStream
from offbeat_weightsync._plan import Bucket, BucketPlan, Piece, TensorSpec
from offbeat_weightsync._receiver import SharedMemoryStream, receive
from offbeat_weightsync._sender import SharedMemorySender
from offbeat_weightsync._tensors import describe_tensors

__all__ = [
    "Bucket",
    "BucketPlan",
    "InProcessStream",
    "Piece",
    "SharedMemorySender",
    "SharedMemoryStream",
    "TensorSpec",
    "describe_tensors",
    "new_socket_path",
    "receive",
]
