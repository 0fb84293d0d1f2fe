"""Messages between the sender and the receivers of one sync, over a socket, until a deadline.

    receiver                         sender
    Join          ->
                  <-                 Welcome
                  <-                 Offer; by shared memory then its descriptor
    Ready         ->
                  <-                 the weights: over TCP as frames of bytes, each hashed on its way;
    Loaded        ->                 by shared memory Filled, as far as a bucket lies in its slot; over a group
    ...                              by its broadcast; on disk, with Written once all is there; of changes alone
                                     Changes, each with a frame
                  <-                 End
    Proof         ->
                  <-                 Accepted    once every receiver has proved

Either side may say Failure at any point, and then hangs up. A frame is its length in 4 bytes, and then a message in
msgpack, or plain bytes where the highest bit of the length is set.
"""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from offbeat_core import DeadlineError, OffbeatError, TensorSpec, WeightProof, WeightSyncError
from offbeat_liveness import waiting
from offbeat_weightsync._tensors import Checksum

T = TypeVar("T")

UNDECLARED_S: Final = 0.05
"""Shorter waits are not declared to the liveness monitor. A longer one is, and ends with the deadline."""

POLL_EVERY_S: Final = 0.2
"""A longer wait is interrupted so often, to see whether the sync has been withdrawn."""

_DRAIN_S: Final = 1.0
"""Time for which a side that has said why it gives up still takes what was sent to it: see `Connection.close`."""

_REASON_S: Final = 5.0
"""Time that a side whose sending failed waits for the reason. One that gives up sends it before it hangs up."""

_HEADER: Final = struct.Struct("<I")
_DATA: Final = 1 << 31
_MAX_MESSAGE_BYTES: Final = 256 << 20
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # no program that is started here inherits it


class CudaHandle(msgspec.Struct, frozen=True):
    """CUDA memory of another process, in the order in which torch gives and takes the values.

    `device` is the index at the sender, `uuid` the same in every process; `event` is waited for before the first use.
    """

    device: int
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool
    uuid: str


class GroupMember(msgspec.Struct, frozen=True):
    """A process that can join a group from a `device` of a `kind`, and its rank in `group`; "" is no group."""

    kind: str
    device: str
    group: str = ""
    rank: int = 0


class GroupAddress(msgspec.Struct, frozen=True):
    """The address at which the members of a group meet, and the rank of the receiver among them."""

    group: str
    rank: int
    size: int
    host: str
    port: int


class Join(msgspec.Struct, tag="join", frozen=True):
    """A receiver asks for the weights of a version.

    `held`: a checksum of each tensor it has, for changed tensors alone. `copy`: the digest of the weights that it keeps
    a copy of, for changed elements alone. `member`: how a broadcast may reach it. `engine`: the engine of which it is
    one of the `workers`, by rank, that ask this sender; "" is an engine that receives in one process, under `name`.
    """

    name: str
    version: int
    held: dict[str, str] | None = None
    copy: str = ""
    member: GroupMember | None = None
    engine: str = ""
    workers: tuple[int, ...] = ()


def worker_name(engine: str, rank: int) -> str:
    """Return what a worker that receives by itself is called."""
    return f"{engine}.worker-{rank}"


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The sender has noted the request, and gives its name; what it sends follows when all receivers are there."""

    name: str


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """The sender says what will come, and by which transport. The receiver builds the plan; the digests must be equal.

    `kept` is the digest of what will not come because the receiver holds it; "" when all will come. Slots of
    `slot_bytes` lie at `cuda`, or in the memory whose descriptor follows; 0: the bytes come over the group that meets
    at `place`, in files of `folder`, or else over the connection. With `changes` those elements alone come, over the
    connection, that differ from the receiver's copy.
    """

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    digest: str
    kept: str = ""
    slot_bytes: int = 0
    cuda: CudaHandle | None = None
    changes: bool = False
    checksum: Checksum = "xxh3"
    place: GroupAddress | None = None
    folder: str = ""
    transport: str = "tcp"


class Ready(msgspec.Struct, tag="ready", frozen=True):
    digest: str


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """Notice that this number of bytes of a bucket is in its slot."""

    bucket: int
    num_bytes: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    bucket: int


class FilesWritten(msgspec.Struct, tag="written", frozen=True):
    """All files of the version are in the folder."""


class Changes(msgspec.Struct, tag="changes", frozen=True):
    """The changes in a bucket: of each run how that is coded and how many elements it is; a frame follows."""

    runs: list[tuple[str, int]]
    num_bytes: int


class End(msgspec.Struct, tag="end", frozen=True):
    """All buckets were sent, and these are their checksums."""

    sent: WeightProof


class Proof(msgspec.Struct, tag="proof", frozen=True):
    held: WeightProof


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """Every receiver holds what was sent."""


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """Failure of the side that sends it, which gives up, and the reason."""

    text: str


Message = Join | Welcome | Offer | Ready | Filled | Loaded | FilesWritten | Changes | End | Proof | Accepted | Failure
M = TypeVar("M", bound=Message)
_DECODER: Final = msgspec.msgpack.Decoder(Message)


class Deadline:
    """A point in time, shared by all the waits of one sync, which `waiting` names: "weight sync of version 3".

    `is_withdrawn` is polled during a wait for another process: True ends the wait, as none will come or answer.
    """

    def __init__(self, waiting: str, seconds: float, is_withdrawn: Callable[[], bool] = lambda: False) -> None:
        self.waiting, self.seconds, self.is_withdrawn = waiting, seconds, is_withdrawn
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def declared(self, on: str) -> waiting:
        """Let the liveness monitor see a wait for `on`, for a verdict to name it."""
        return waiting(self.waiting, on=on, deadline_s=self.seconds)

    def raise_if_withdrawn(self, on: str) -> None:
        """Raise WeightSyncError if the sync, which waits for `on`, is not wanted any more."""
        if self.is_withdrawn():
            raise WeightSyncError(f"{self.waiting} was withdrawn while it waited for {on}")

    def missed(self, on: str) -> DeadlineError:
        """Return the error to raise when it has passed while waiting for `on`."""
        return DeadlineError(self.waiting, on, self.seconds, "is it stuck, or is the deadline too short?")


class Connection:
    def __init__(self, sock: socket.socket, peer: str, deadline: Deadline) -> None:
        self.peer, self.deadline = peer, deadline
        self._socket, self._failed = sock, False
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        sock.settimeout(UNDECLARED_S)  # of the first try of each operation: see `_wait_for`

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """Address of this machine from which the other side is reached; of a connection over TCP."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        self.send_plain(memoryview(_HEADER.pack(len(body)) + body))

    def send_data(self, data: memoryview) -> None:
        """Send a frame of bytes; raises as `send` does."""
        self.send_plain(memoryview(_HEADER.pack(_DATA | len(data))), more=True)
        self.send_plain(data)

    def send_plain(self, data: memoryview, *, more: bool = False) -> None:
        """Send bytes without a frame, with `more` if others follow at once; raises as `send` does."""
        flags = getattr(socket, "MSG_MORE", 0) if more else 0  # Linux alone has it
        try:
            while data:
                data = data[self._wait_for(partial(self._socket.send, data, flags), self.peer) :]
        except OSError as error:
            raise self._why_gone() from error

    def receive(self, kind: type[M], what: str) -> M:
        """Return the next message, which must be of this kind."""
        header = self._receive_header(what)
        if header & _DATA:
            raise WeightSyncError(f"{self.peer} sent weights where {kind.__name__} was due")
        message = self._receive_body(header, what)
        if not isinstance(message, kind):
            raise WeightSyncError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def receive_data(self, room: memoryview, what: str) -> None:
        """Fill memory with the bytes of the next frame; raises as `receive` does."""
        header = self._receive_header(what)
        if header == _DATA | len(room):
            self.receive_plain(room, what)
            return
        found = f"{header ^ _DATA} bytes" if header & _DATA else type(self._receive_body(header, what)).__name__
        raise WeightSyncError(f"{self.peer} sent {found} where {len(room)} bytes of {what} were due")

    def receive_plain(self, room: memoryview, what: str) -> None:
        """Fill memory with bytes without a frame; raises as `receive` does."""
        done = 0
        while done < len(room):
            done += self.receive_some(room[done:], what)

    def receive_some(self, room: memoryview, what: str) -> int:
        """Fill memory with what has come, and return how many bytes, at least 1; raises as `receive` does."""
        try:
            num_bytes = self._wait_for(lambda: self._socket.recv_into(room), f"{self.peer} ({what})")
        except OSError as error:
            raise self._gone(f"while {what} was awaited") from error
        if not num_bytes:
            raise self._gone(f"while {what} was awaited")
        return num_bytes

    def raise_if_spoken(self) -> None:
        """Raise if the other side, from which nothing is due, has given up or is gone."""
        if self._readable.poll(0):
            raise self._why_gone()

    def send_descriptor(self, fd: int) -> None:
        try:
            socket.send_fds(self._socket, [b"\0"], [fd])  # a descriptor travels beside at least one byte
        except OSError as error:
            raise self._why_gone() from error

    def receive_descriptor(self) -> int:
        when = "before it handed over the memory"
        try:
            _, fds, _, _ = self._wait_for(
                lambda: socket.recv_fds(self._socket, 1, 1, _CLOSE_ON_EXEC), f"{self.peer} to hand over the memory"
            )
        except OSError as error:
            raise self._gone(when) from error
        if not fds:
            raise self._gone(when)
        return fds[0]

    def fail(self, error: BaseException) -> None:
        """Send the other side the reason why this one gives up, if it still listens."""
        self._failed = True  # `close` then gives the reason time to arrive
        with contextlib.suppress(WeightSyncError, DeadlineError):
            self.send(Failure(reason_of(error)))

    def close(self) -> None:
        if self._failed and self._socket.family != getattr(socket, "AF_UNIX", None):
            self._drain()
        self._socket.close()

    def _drain(self) -> None:
        """TCP that is closed with bytes unread is reset, and the reset may overtake the reason that was given."""
        end = time.monotonic() + _DRAIN_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            # Ends where the other side hangs up, or sends nothing for the socket's own timeout.
            while self._socket.recv(1 << 20) and time.monotonic() < end:
                pass

    def _receive_header(self, what: str) -> int:
        header = bytearray(_HEADER.size)
        self.receive_plain(memoryview(header), what)
        return int.from_bytes(header, "little")

    def _receive_body(self, num_bytes: int, what: str) -> Message:
        if num_bytes > _MAX_MESSAGE_BYTES:  # before so much memory is taken
            raise WeightSyncError(f"{self.peer} announced a message of {num_bytes} bytes: it is none of ours")
        body = bytearray(num_bytes)
        self.receive_plain(memoryview(body), what)
        try:
            message: Message = _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise WeightSyncError(f"{self.peer} sent a message that cannot be read: {error}") from error
        if isinstance(message, Failure):
            raise WeightSyncError(f"{self.peer} gave up: {message.text}", is_peers=True)
        return message

    def _wait_for(self, operation: Callable[[], T], on: str) -> T:
        """Do what may wait, declared if it takes long, until the deadline."""
        # The first try has the socket's short timeout: most operations end within it, undeclared.
        if self.deadline.left_s() > UNDECLARED_S:
            with contextlib.suppress(TimeoutError):
                return operation()
        try:
            with self.deadline.declared(self.peer):
                while True:
                    # Never 0: that would make the socket non-blocking, which raises something else than TimeoutError.
                    self._socket.settimeout(min(self.deadline.left_s(), POLL_EVERY_S) or 1e-3)
                    try:
                        return operation()
                    except TimeoutError as error:
                        self.deadline.raise_if_withdrawn(on)  # polled, as a lost host closes no connection
                        if not self.deadline.left_s():
                            raise self.deadline.missed(on) from error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(UNDECLARED_S)

    def _why_gone(self) -> WeightSyncError:
        """Return why sending failed: a side that gives up sends the reason before it hangs up."""
        deadline = self.deadline
        self.deadline = Deadline(deadline.waiting, min(deadline.left_s(), _REASON_S))
        try:
            # Ends by an error: the reason, the end of the connection, or the deadline.
            while True:  # what it had said before comes first
                self._receive_body(self._receive_header("its reason"), "its reason")
        except DeadlineError:
            return self._gone("before all was sent")
        except WeightSyncError as error:
            return error if error.is_peers else self._gone("before all was sent")
        finally:
            self.deadline = deadline

    def _gone(self, when: str) -> WeightSyncError:
        return WeightSyncError(f"{self.peer} hung up or died {when}")


def reason_of(error: BaseException) -> str:
    return str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
