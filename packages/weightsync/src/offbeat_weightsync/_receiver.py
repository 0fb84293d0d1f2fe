"""The rollout engine's side of the shared-memory transport."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import kernel_address
from offbeat_weightsync._connections import Connection, Deadline
from offbeat_weightsync._messages import Accepted, End, Filled, Hello, Join, Loaded, Proof, Ready
from offbeat_weightsync._plan import BucketPlan, Piece, TensorSpec
from offbeat_weightsync._proofs import compare_proofs, prove_tensors
from offbeat_weightsync._slots import Slots
from offbeat_weightsync._tensors import torch_dtype


@contextmanager
def receive(
    socket_path: str | Path, version: int, deadline_s: float, *, name: str = "rollout-0"
) -> Iterator["SharedMemoryStream"]:
    """Connect to a `SharedMemorySender` and yield the stream of one version. Blocking: use a thread.

        with receive(address, version, deadline_s=60, name="rollout-1") as stream:
            proof = engine.update_weights(stream, version)   # iterates, then calls stream.prove
            stream.confirm(proof)

    Leaving the block with an error, or without `confirm`, makes the sender fail with that reason.

    Args:
        socket_path: where the sender listens.
        version: policy version wanted.
        deadline_s: time allowed from here to the end of `confirm`.
        name: this side, for the sender's errors.

    Raises:
        WeightSyncError: the sender is not there, failed or died, sends another version, or the bytes differ.
        DeadlineError: it did not come in time.
    """
    connection = _connect(socket_path, Deadline(f"weight sync of version {version} at {name}", deadline_s))
    try:
        connection.send(Join(name, version))
        stream = _open_stream(connection, version)
        yield stream
        stream.check_confirmed(name)
    except BaseException as error:
        connection.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        connection.close()


class SharedMemoryStream:
    """A `WeightStream` from another process. Made by `receive`.

    Args:
        connection: to the sender.
        plan: what will come.
        slots: where it will lie.
        version: policy version.
    """

    def __init__(self, connection: Connection, plan: BucketPlan, slots: Slots, version: int) -> None:
        self.version, self.plan = version, plan
        self._connection, self._slots = connection, slots
        self._next_bucket = 0
        self._sent: WeightProof | None = None
        self._confirmed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in order, once. A tensor is valid until the next one is asked for: copy it."""
        if self._next_bucket:
            raise WeightSyncError("a weight stream can be read once")
        assembly = _Assembly()
        for index, bucket in enumerate(self.plan.buckets):
            self._next_bucket = index + 1
            self._wait_filled(index)
            slot = self._slots.of_bucket(index)
            for piece in bucket.pieces:
                spec = self.plan.specs[piece.tensor]
                part = slot[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
                elements = assembly.add(spec, piece, part)
                if elements is not None:
                    yield spec.name, elements.view(torch_dtype(spec.dtype)).view(spec.shape)
            self._connection.send(Loaded(index))
        self._sent = self._connection.receive(End, "the end of the weights").sent

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back with `read(name)`, compare with what was sent, and return what is held.

        Raises:
            WeightSyncError: a tensor is missing or differs. The engine must not serve these weights.
        """
        if self._sent is None:
            raise WeightSyncError("read the whole weight stream before you prove what you hold")
        held = prove_tensors(self.plan, self.version, read)
        compare_proofs(self.plan, self._sent, held, "the engine")
        return held

    def confirm(self, proof: WeightProof) -> None:
        """Send the engine's proof to the sender, and return when every receiver has proved the same.

        Raises:
            WeightSyncError: the sender refuses the proof, or another receiver failed.
            DeadlineError: no answer in time.
        """
        self._connection.send(Proof(proof))
        self._connection.receive(Accepted, "the sender's answer to the proof")
        self._confirmed = True

    def check_confirmed(self, name: str) -> None:
        """Raise WeightSyncError unless `confirm` has been called and has returned."""
        if not self._confirmed:
            raise WeightSyncError(f"{name} took the weights of version {self.version} but did not confirm them")

    def _wait_filled(self, index: int) -> None:
        what = f"bucket {index} of {len(self.plan.buckets)}"
        filled = self._connection.receive(Filled, what)
        if filled.bucket != index:
            raise WeightSyncError(f"{self._connection.peer} sent bucket {filled.bucket} where {what} was due")


class _Assembly:
    """Puts split tensors together in memory of its own; whole ones pass through without a copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def add(self, spec: TensorSpec, piece: Piece, part: Tensor) -> Tensor | None:
        """Take one piece; return all bytes of the tensor when it was the last."""
        if piece.num_bytes == spec.num_bytes:
            return part
        if self._buffer is None or self._buffer.numel() < spec.num_bytes:
            self._buffer = torch.empty(spec.num_bytes, dtype=torch.uint8)
        end = piece.tensor_offset + piece.num_bytes
        self._buffer[piece.tensor_offset : end].copy_(part)
        return self._buffer[: spec.num_bytes] if end == spec.num_bytes else None


def _connect(socket_path: str | Path, deadline: Deadline) -> Connection:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline.left_s() or 1e-3)
        sock.connect(kernel_address(socket_path))
    except TimeoutError:
        sock.close()
        raise deadline.missed(f"the sender at {socket_path}") from None
    except OSError as error:
        sock.close()
        raise WeightSyncError(f"no sender listens at {socket_path}: {error.strerror or error}") from error
    return Connection(sock, "the sender", deadline)


def _open_stream(connection: Connection, version: int) -> SharedMemoryStream:
    hello = connection.receive(Hello, "its plan")
    connection.peer = hello.name
    fd = connection.receive_descriptor()
    try:
        slots = Slots(fd, hello.slot_bytes, writable=False)
    finally:
        os.close(fd)
    plan = BucketPlan.build([TensorSpec(*spec) for spec in hello.specs], hello.bucket_bytes)
    if plan.digest != hello.digest or plan.longest_bucket_bytes > hello.slot_bytes:
        raise WeightSyncError(f"the plans differ: {hello.digest} at {hello.name}, {plan.digest} here; same version?")
    connection.send(Ready(plan.digest))
    return SharedMemoryStream(connection, plan, slots, version)
