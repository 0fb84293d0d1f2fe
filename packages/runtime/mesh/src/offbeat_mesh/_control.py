"""Messages between the processes of a world beside their collectives: which failed, died or left, and their positions.

The control server is a thread of rank 0; every rank, rank 0 too, holds one connection to it, its client. The kernel
closes a dead process's connection, so a death is known within milliseconds and needs no heartbeat; a stopped process
keeps its connection and is not taken for dead.
"""

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from offbeat_core import DeadlineError, OffbeatError, PeerFailedError
from offbeat_liveness import waiting

LENGTH: Final = struct.Struct("!I")
MAX_FRAME_BYTES: Final = 1 << 20
"""A message is short; a longer frame is not ours."""

MAX_LINE_CHARS: Final = 1000
"""Longest line of an error; user code may raise one that is longer than a frame."""

SEND_TIMEOUT_S: Final = 2.0
"""A rank that takes no message for so long, although its socket has room for thousands, is stopped, and misses it."""

LACK_S: Final = 0.1
"""Between two tries to let a rank in while the process has no descriptor to spare."""

ANSWER_S: Final = 1.0
"""How long members have to answer with their position; a thread of theirs answers, whatever their main thread does."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first frame of a connection."""

    rank: int
    token: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The control server's answer to a hello, once every rank has said it."""


class Roll(msgspec.Struct, tag="roll", frozen=True):
    """Question of a rank that waits for its welcome, and the control server's answer: the ranks without a hello."""

    missing: tuple[int, ...] = ()


class Record(msgspec.Struct, tag="record", frozen=True, kw_only=True):
    """A failure, or an end: why a group, or every group of a rank, can go no further.

    Args:
        kind: "failed" raised an error; "deadline" waited too long; "died" ended without a word; "left" ended well.
        rank: the rank that failed or ended, a global rank.
        group: key of the one group that it ends; "" ends every group that holds the rank.
        peer: the process at fault, for people; "" means `rank`.
        reason: the error in one line; for "deadline" the advice.
        waiting, deadline_s: of a "deadline", with `peer` as the process that did not come.
    """

    kind: Literal["failed", "deadline", "died", "left"]
    rank: int
    group: str = ""
    peer: str = ""
    reason: str = ""
    waiting: str = ""
    deadline_s: float = 0.0

    @classmethod
    def of(cls, error: BaseException, rank: int, group: str = "", peer: str = "") -> "Record":
        """Return the record of an error; of a peer's failure it keeps the first cause."""
        if isinstance(error, DeadlineError):
            said = {"peer": error.on, "reason": error.advice, "waiting": error.waiting}
            return cls(kind="deadline", rank=rank, group=group, deadline_s=error.deadline_s, **said)
        if isinstance(error, PeerFailedError):
            return cls(kind="failed", rank=rank, group=group, peer=error.peer, reason=error.reason)
        return cls(kind="failed", rank=rank, group=group, peer=peer, reason=one_line(error))

    def error(self, name: str) -> OffbeatError:
        """Return what the other members raise; `name` is what they call the rank."""
        if self.kind == "deadline":
            return DeadlineError(self.waiting, self.peer, self.deadline_s, self.reason)
        return PeerFailedError(self.peer or name, self.reason or ENDS[self.kind])


ENDS: Final = {
    "failed": "it raised an error",
    "died": "its process ended without a word: killed, out of memory, or crashed; look at its log",
    "left": "it has left the world, so it comes to no further call",
}


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Asks where the members of a group are. Relayed to each of them."""

    asker: int
    number: int
    group: str
    members: tuple[int, ...]


class CallPosition(msgspec.Struct, tag="standing", frozen=True):
    """Position of one member in a group: collectives entered, its newest call ("" if none), and if it is in it."""

    asker: int
    number: int
    rank: int
    entered: int
    call: str
    inside: bool


class Left(msgspec.Struct, tag="bye", frozen=True):
    """The rank has left well: the end of its connection is no death."""

    rank: int


ControlMessage: TypeAlias = Hello | Welcome | Roll | Record | Ask | CallPosition | Left
DECODER: Final = msgspec.msgpack.Decoder(ControlMessage)


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, cut, in characters that can travel (file names may not)."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line[:MAX_LINE_CHARS].encode(errors="backslashreplace").decode()


def pack(message: ControlMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts what arrives on a socket into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Messages completed by `data`; a ValueError says that the bytes are none."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._buffer) < LENGTH.size + length:
                return
            body = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            yield DECODER.decode(body)  # msgspec's errors are ValueErrors


def keep_watch(connection: socket.socket) -> None:
    """Let the kernel notice a host that vanished, in about 10 s; a process that dies closes its socket at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ControlServer:
    """Listens for the ranks of one world, which know the token, and relays their messages until `close`.

    It welcomes them all at once. Otherwise rank 0 could end before another rank has connected, and take the server with
    it; and the ranks that wait for another rank could not be notified of its end.
    """

    def __init__(self, host: str, token: str, size: int) -> None:
        self._token, self._to_come = token, set(range(size))
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_reader, self._wake_writer = socket.socketpair()  # `close` ends the thread's select by it
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._inboxes: dict[socket.socket, Inbox] = {}
        self._ranks: dict[int, socket.socket] = {}
        self._records: list[Record] = []
        self._left_ranks: set[int] = set()
        _open.add(self)
        self._thread = threading.Thread(target=self._serve, name="offbeat-control-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop relaying; the ranks that are still connected see their connection end."""
        self._wake_writer.send(b"x")
        self._thread.join(timeout=5)
        self.close_handles()

    def close_handles(self) -> None:
        """Close this process's handles without a word."""
        self._selector.close()
        for each in (self._listener, self._wake_reader, self._wake_writer, *self._inboxes):
            each.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_reader:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor to be had now; without the control server no failure would be reported
            time.sleep(LACK_S)
            return
        connection.settimeout(SEND_TIMEOUT_S)
        keep_watch(connection)
        self._inboxes[connection] = Inbox()
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            for message in self._inboxes[connection].feed(data):
                self._take(message, connection)
        except (OSError, ValueError):  # reset by a death, or an unknown client's bytes: either way it is over
            data = b""
        if not data:
            self._drop(connection)

    def _take(self, message: ControlMessage, connection: socket.socket) -> None:
        if isinstance(message, Hello):
            self._welcome(message, connection)
        elif connection not in self._ranks.values():  # those alone that have shown the token may send
            raise ValueError("a message before a hello")
        elif isinstance(message, Roll):
            connection.sendall(pack(Roll(tuple(sorted(self._to_come)))))
        elif isinstance(message, Record):
            self._relay(message)
        elif isinstance(message, Ask):
            for rank in message.members:
                self._send(rank, message)
        elif isinstance(message, CallPosition):
            self._send(message.asker, message)
        elif isinstance(message, Left):
            self._left_ranks.add(message.rank)
            self._relay(Record(kind="left", rank=message.rank))

    def _welcome(self, hello: Hello, connection: socket.socket) -> None:
        if hello.token != self._token or hello.rank not in self._to_come:
            raise ValueError("a hello from an unknown client")
        self._to_come.remove(hello.rank)
        self._ranks[hello.rank] = connection
        for record in self._records:  # of a rank that has died since its hello
            self._send(hello.rank, record)
        if not self._to_come:
            for rank in self._ranks:
                self._send(rank, Welcome())

    def _relay(self, record: Record) -> None:
        self._records.append(record)
        for rank in list(self._ranks):
            self._send(rank, record)

    def _send(self, rank: int, message: ControlMessage) -> None:
        connection = self._ranks.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # a death is dealt with when its connection is read
                connection.sendall(pack(message))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._inboxes[connection]
        connection.close()
        for rank in [rank for rank, each in self._ranks.items() if each is connection]:
            del self._ranks[rank]
            if rank not in self._left_ranks:
                self._relay(Record(kind="died", rank=rank))


class Listener(Protocol):
    """A group's calls, as this connection sees them. `key` names the group alike on all members."""

    key: str

    def receive(self, record: Record) -> None:
        """Take in a failure or an end; from any thread."""

    def standing(self) -> tuple[int, str, bool]:
        """See `CallPosition`: collectives entered, the newest call, and whether it is in it."""


class ControlClient:
    """The connection of this rank to the control server, made when all ranks have theirs.

    Raises:
        DeadlineError: rank 0 cannot be reached, or other ranks do not connect to it.
        PeerFailedError: rank 0 has ended, or another rank that had connected.
    """

    def __init__(self, rank: int, address: tuple[str, int], token: str, deadline_s: float) -> None:
        self.rank = rank
        self.records: list[Record] = []
        self.closed = False
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()  # a group that is let go listens no more
        self._standings: dict[int, dict[int, CallPosition]] = {}
        self._asked = 0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()  # callers send, and the thread that answers with positions does
        self._inbox = Inbox()
        self._early: list[ControlMessage] = []  # what came while joining, for the thread to take
        self._socket = self._connect(address, token, deadline_s)
        _open.add(self)
        self._thread = threading.Thread(target=self._serve, name="offbeat-client", daemon=True)
        self._thread.start()

    def _connect(self, address: tuple[str, int], token: str, deadline_s: float) -> socket.socket:
        where = f"control server at {address[0]}:{address[1]}"
        end_s = time.monotonic() + deadline_s
        try:
            connection = socket.create_connection(address, timeout=deadline_s)
        except TimeoutError as error:
            advice = "is it reachable from here?"
            raise DeadlineError("join_world", f"rank 0's {where}", deadline_s, advice) from error
        except OSError as error:
            reason = f"its {where} cannot be reached: {error}; has it ended, or do a firewall or a route forbid it?"
            raise PeerFailedError("rank 0", reason) from error
        try:
            keep_watch(connection)
            connection.sendall(pack(Hello(self.rank, token)))
            with waiting("join_world", on="the other ranks", deadline_s=deadline_s):
                self._await_welcome(connection, end_s, deadline_s)
        except OSError as error:
            connection.close()
            raise PeerFailedError("rank 0", f"its {where} was lost while all were joining: {error}") from error
        except OffbeatError as error:
            if isinstance(error, DeadlineError):  # otherwise those that still wait would take this rank for dead
                with contextlib.suppress(OSError):
                    connection.sendall(pack(Record.of(error, self.rank)))
            connection.close()
            raise
        connection.settimeout(None)
        return connection

    def _await_welcome(self, connection: socket.socket, end_s: float, deadline_s: float) -> None:
        has_asked = False
        while not self._is_welcome():
            try:
                self._early += self._receive(connection, end_s)
            except TimeoutError:
                if has_asked:
                    raise
                connection.sendall(pack(Roll()))
                has_asked, end_s = True, time.monotonic() + ANSWER_S
            for each in self._early:
                if isinstance(each, Roll) and each.missing:
                    on = f"rank {', '.join(map(str, each.missing))} to connect to rank 0"
                    advice = "do their processes still run, and does a network lead from them to rank 0?"
                    raise DeadlineError("join_world", on, deadline_s, advice)

    def _is_welcome(self) -> bool:
        """Return whether all ranks have come; where one has died before, no rank can begin."""
        for each in self._early:
            if isinstance(each, Record):
                raise each.error(f"rank {each.rank}")
            if isinstance(each, Welcome):
                return True
        return False

    def _receive(self, connection: socket.socket, end_s: float) -> list[ControlMessage]:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise TimeoutError("it did not answer")
        connection.settimeout(left_s)
        if not (data := connection.recv(1 << 16)):
            raise ConnectionError("it closed the connection")
        return list(self._inbox.feed(data))

    def listen(self, listener: Listener) -> None:
        """Pass every record to `listener`, past ones too."""
        with self._changed:
            self._listeners.add(listener)  # under one lock with the copy: it gets each record, and once
            past = list(self.records)
        for record in past:
            listener.receive(record)

    def post(self, record: Record) -> None:
        """Send a record to all ranks; on this one it takes effect at once."""
        self._record(record)
        self._send(record)

    def ask(self, group: str, members: Sequence[int]) -> dict[int, CallPosition]:
        """Return the positions of a group's members; those that do not answer within a second are left out."""
        with self._changed:
            number = self._asked = self._asked + 1
            answers = self._standings[number] = {}
        if self._send(Ask(self.rank, number, group, tuple(members))):
            self.wait_until(lambda: len(answers) == len(members), ANSWER_S)
        with self._changed:
            return dict(self._standings.pop(number))

    def wait_until(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Wait for a message that makes `holds` true; False when it did not become so in time."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while not holds():
                if self.closed or not self._changed.wait(max(0.0, end - time.monotonic())):
                    return holds()
            return True

    def leave(self) -> None:
        """Say that this rank leaves well."""
        self._send(Left(self.rank))

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's recv, which closing alone would not
        self._thread.join(timeout=5)
        self._socket.close()

    def close_handles(self) -> None:
        """Close this process's handle without a word."""
        self.closed = True
        self._socket.close()  # no shutdown, which would end the parent's connection

    def _send(self, message: ControlMessage) -> bool:
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(pack(message))
            return True
        return False

    def _serve(self) -> None:
        for message in self._early:
            self._take(message)
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
                for message in self._inbox.feed(data):
                    self._take(message)
            except (OSError, ValueError):
                data = b""
            if not data:
                break
        if not self.closed:  # the control server lives in rank 0
            self.closed = True
            self._record(Record(kind="died", rank=0))
        with self._changed:
            self._changed.notify_all()  # `wait_until` looks at `closed`

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, Record):
            self._record(message)
        elif isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, CallPosition):
            with self._changed:
                if message.number in self._standings:
                    self._standings[message.number][message.rank] = message
                self._changed.notify_all()
        else:
            assert isinstance(message, Welcome | Roll), message

    def _record(self, record: Record) -> None:
        with self._changed:
            if record in self.records:  # our own, come back from the control server
                return
            self.records.append(record)
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener.receive(record)

    def _answer(self, ask: Ask) -> None:
        with self._changed:
            found = [listener for listener in self._listeners if listener.key == ask.group]
        entered, call, inside = found[0].standing() if found else (0, "", False)
        self._send(CallPosition(ask.asker, ask.number, self.rank, entered, call, inside))


_open: "weakref.WeakSet[ControlServer | ControlClient]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not keep its parent's connections alive beyond its death."""
    for each in list(_open):
        each.close_handles()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
