"""The rollout engine's side of the shared-memory transport."""

import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from offbeat_types import WeightSyncError
from offbeat_weightsync._addresses import kernel_address
from offbeat_weightsync._connections import Connection, Deadline, same_user
from offbeat_weightsync._cuda_ipc import OpenedCudaSlots
from offbeat_weightsync._filling import Copies, cut_copies
from offbeat_weightsync._messages import Hello
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._places import Place
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._slots import OpenedSlots


class SharedMemoryStream(PeerStream):
    """A `WeightStream` through slots of shared memory. Made by `receive`.

    Args:
        connection: to the sender.
        plan: what will come.
        version: policy version.
        hello: how it will come.
    """

    def __init__(self, connection: Connection, plan: BucketPlan, version: int, hello: Hello) -> None:
        self._slots = _open_slots(connection, hello)
        lanes: list[Connection] = []
        for _ in hello.lanes:
            sock = socket.socket(fileno=connection.receive_descriptor())
            lanes.append(Connection(sock, connection.peer, connection.deadline, connection))
        super().__init__(connection, plan, version, hello, lanes)
        self._slots_per_lane = hello.num_slots // len(lanes)

    def close(self) -> None:
        """See `PeerStream.close`; the slots are unmapped now, not when the next version is awaited."""
        super().close()
        if hasattr(self, "_slots"):
            del self._slots

    def _load_lane(self, lane: int, indices: list[int], places: list[Place]) -> None:
        copies = [self._plan_copies(index, self._slot(lane, turn), places) for turn, index in enumerate(indices)]
        for (index, memory), planned in zip(self._arrive(lane, indices), copies, strict=True):
            if planned is None:
                self._write(index, memory, places)
            else:
                for target, source in planned:
                    np.copyto(target, source)  # torch's copy_ is up to a third slower

    def _plan_copies(self, index: int, memory: Tensor, places: list[Place]) -> Copies | None:
        """See `PlannedTensors.plan_copies`: what to do is laid out before the first byte moves."""
        if not memory.is_cpu or any(places[piece.tensor].bytes is None for piece in self._windows[index].pieces):
            return None
        room, copies = memory.numpy(), Copies()
        for piece in self._windows[index].pieces:
            target = places[piece.tensor].bytes
            assert target is not None
            copies += cut_copies(target, piece.tensor_offset, room, piece.bucket_offset, piece.num_bytes)
        return copies

    def _slot(self, lane: int, turn: int) -> Tensor:
        return self._slots.slot(lane * self._slots_per_lane + turn % self._slots_per_lane)

    def _arrive(self, lane: int, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        connection = self._lanes[lane]
        for turn, index in enumerate(indices):
            filled = connection.receive_signal(self._bucket(index))
            if filled != index:
                raise WeightSyncError(
                    f"{connection.peer} sent window {filled} where {index} was due, in {self._bucket(index)}"
                )
            yield index, self._slot(lane, turn)
            self._slots.flush()
            connection.signal(index)


def connect_shared(socket_path: str | Path, deadline: Deadline) -> Connection:
    """Connect to a `SharedMemorySender`.

    Raises:
        WeightSyncError: it is not there, or is somebody else's.
        DeadlineError: it does not answer.
    """
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
    if not same_user(sock):  # a name in the kernel is free for whoever takes it first
        sock.close()
        raise WeightSyncError(f"who listens at {socket_path} is another user's process: run both as the same user")
    return Connection(sock, "the sender", deadline)


def _open_slots(connection: Connection, hello: Hello) -> OpenedSlots | OpenedCudaSlots:
    if hello.cuda is not None:
        return OpenedCudaSlots(hello.cuda, hello.slot_bytes)
    fd = connection.receive_descriptor()
    try:
        return OpenedSlots(fd, hello.slot_bytes, hello.num_slots, writable=False)
    finally:
        os.close(fd)
