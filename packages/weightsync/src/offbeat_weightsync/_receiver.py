"""The rollout engine's side of the shared-memory transport."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import kernel_address
from offbeat_weightsync._arrivals import ArrivingStream, Place, find_target
from offbeat_weightsync._changes import kept_digest
from offbeat_weightsync._connections import Connection, Deadline, LaneLostError
from offbeat_weightsync._cuda_ipc import OpenedCudaSlots
from offbeat_weightsync._lanes import assign_slots, run_lanes
from offbeat_weightsync._messages import Accepted, End, Filled, Hello, Join, Loaded, Proof, Ready, Welcome
from offbeat_weightsync._plan import BucketPlan, TensorSpec
from offbeat_weightsync._slots import OpenedSlots
from offbeat_weightsync._windows import cut_windows


@contextmanager
def receive(
    socket_path: str | Path,
    version: int,
    deadline_s: float,
    *,
    name: str = "rollout-0",
    held: Mapping[str, str] | None = None,
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
        held: checksum of each tensor the engine holds, from `tensor_checksums`, to be sent changes alone; the stream's
            plan then has only those. None: everything.

    Raises:
        WeightSyncError: the sender is not there, failed or died, sends another version, or the bytes differ.
        DeadlineError: it did not come in time.
    """
    connection = _connect(socket_path, Deadline(f"weight sync of version {version} at {name}", deadline_s))
    try:
        connection.send(Join(name, version, None if held is None else dict(held)))
        stream = _open_stream(connection, version, held)
        with closing(stream):
            yield stream
        stream.check_confirmed(name)
    except BaseException as error:
        connection.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        connection.close()


class SharedMemoryStream(ArrivingStream):
    """A `WeightStream` from another process. Made by `receive`.

    Args:
        connection: to the sender.
        plan: what will come.
        version: policy version.
        hello: how it will come.
        slots: where it will lie.
        lanes: their connections; none: all comes over the one.
    """

    def __init__(
        self,
        connection: Connection,
        plan: BucketPlan,
        version: int,
        hello: Hello,
        slots: OpenedSlots | OpenedCudaSlots,
        lanes: list[Connection],
    ) -> None:
        super().__init__(plan, version, cut_windows(plan, hello.slot_bytes))
        self._connection, self._slots, self._cpus = connection, slots, hello.lanes
        self._lanes = lanes or [connection]
        self._places = assign_slots(self._windows, len(self._lanes), hello.num_slots)
        self._confirmed = False

    def load(self, target: Callable[[str], Tensor]) -> None:
        """See `ArrivingStream.load`; the lanes load at once."""
        places = [Place(find_target(target, spec)) for spec in self.plan.specs] if self._cpus else []
        if not places or any(place.flat is None for place in places):
            super().load(target)
            return
        self._begin()
        bodies = [partial(self._load_lane, lane, places) for lane in range(len(self._lanes))]
        try:
            run_lanes(bodies, self._cpus, self._break_off)
        except LaneLostError as error:
            raise error.principal.last_words() from error
        self._sent = self._end()

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

    def close(self) -> None:
        """Hang up."""
        for lane in self._lanes if self._cpus else ():
            lane.close()

    def _break_off(self) -> None:
        for lane in self._lanes:
            lane.break_off()

    def _load_lane(self, lane: int, places: list[Place]) -> None:
        indices = [index for index, (its_lane, _) in enumerate(self._places) if its_lane == lane]
        for index, memory in self._arrive(indices):
            for piece in self._windows[index].pieces:
                part = memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
                places[piece.tensor].write(piece.tensor_offset, part)

    def _arrivals(self) -> Iterator[Tensor]:
        try:
            for _, memory in self._arrive(range(len(self._windows))):
                yield memory
        except LaneLostError as error:
            raise error.principal.last_words() from error

    def _arrive(self, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Wait for these windows, in order; whoever asks for the next has loaded the one before."""
        for index in indices:
            lane, slot = self._places[index]
            what = f"bucket {self._windows[index].bucket} of {len(self.plan.buckets)}"
            filled = self._lanes[lane].receive(Filled, what)
            if filled.window != index:
                raise WeightSyncError(
                    f"{self._connection.peer} sent window {filled.window} where {index} was due, in {what}"
                )
            yield index, self._slots.slot(slot)
            self._slots.flush()
            self._lanes[lane].send(Loaded(index))

    def _end(self) -> WeightProof:
        return self._connection.receive(End, "the end of the weights").sent


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


def _open_stream(connection: Connection, version: int, held: Mapping[str, str] | None) -> SharedMemoryStream:
    connection.peer = connection.receive(Welcome, "its plan").name
    hello = connection.receive(Hello, "its plan")
    slots = _open_slots(connection, hello)
    plan = BucketPlan.build([TensorSpec(*spec) for spec in hello.specs], hello.bucket_bytes)
    if plan.digest != hello.digest:
        raise WeightSyncError(
            f"the plans differ: {hello.digest} at {connection.peer}, {plan.digest} here; same version?"
        )
    if hello.kept and (held is None or kept_digest(held, {spec.name for spec in plan.specs}) != hello.kept):
        raise WeightSyncError(
            f"{connection.peer} sends changes to other weights than are held here; ask for everything"
        )
    lanes = []
    for _ in hello.lanes:
        sock = socket.socket(fileno=connection.receive_descriptor())
        lanes.append(Connection(sock, connection.peer, connection.deadline, connection))
    connection.send(Ready(plan.digest))
    return SharedMemoryStream(connection, plan, version, hello, slots, lanes)


def _open_slots(connection: Connection, hello: Hello) -> OpenedSlots | OpenedCudaSlots:
    if hello.cuda is not None:
        return OpenedCudaSlots(hello.cuda, hello.slot_bytes)
    fd = connection.receive_descriptor()
    try:
        return OpenedSlots(fd, hello.slot_bytes, hello.num_slots, writable=False)
    finally:
        os.close(fd)
