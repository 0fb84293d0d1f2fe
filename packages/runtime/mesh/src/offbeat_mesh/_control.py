"""Messages between the processes of a world beside their collectives: which failed, died or left, and their positions.

The control server is a thread of rank 0; every rank, rank 0 too, holds one connection to it, its client. The kernel
closes a dead process's connection, so a death is known within milliseconds and needs no heartbeat; a stopped process
keeps its connection and is not taken for dead.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from offbeat_core import DeadlineError, OffbeatError, PeerFailedError
from offbeat_liveness import waiting
from offbeat_mesh._control_messages import (
    Ask,
    CallPosition,
    ControlMessage,
    Hello,
    Inbox,
    Left,
    Record,
    Roll,
    Welcome,
    pack,
)

MAX_UNSENT_BYTES: Final = 16 << 20
"""A stopped rank takes no messages. This much is kept for when it continues; it misses the messages beyond."""

LACK_S: Final = 0.1
"""Between two tries to let a rank in while the process has no descriptor to spare."""

ANSWER_S: Final = 1.0
"""Time for members to answer with their position; a thread of theirs answers, whatever their main thread does."""


def keep_watch(connection: socket.socket) -> None:
    """Let the kernel notice a host that vanished, in about 10 s; a process that dies closes its socket at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ServerConnection:
    """The control server's end of one connection.

    It never blocks: bytes that the client's socket has no room for wait here, or one stopped rank would hold up the
    messages to all others, and a frame that had been sent in part would make what follows it unreadable.
    """

    def __init__(self, accepted: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket, self._selector = accepted, selector
        self.inbox = Inbox()
        self._unsent = bytearray()
        accepted.setblocking(False)
        keep_watch(accepted)
        selector.register(accepted, selectors.EVENT_READ, self)

    def send(self, message: ControlMessage) -> None:
        """Send a message, or as much of it as can go now; `flush` sends the rest."""
        if len(self._unsent) < MAX_UNSENT_BYTES:
            self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it, and let the selector report when it takes more."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # a death is dealt with when its connection is read
            self._unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self.socket, events, self)

    def close(self) -> None:
        """End the connection."""
        self._selector.unregister(self.socket)
        self.socket.close()


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
        self._connections: set[ServerConnection] = set()
        self._ranks: dict[int, ServerConnection] = {}
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
        accepted = (connection.socket for connection in self._connections)
        for each in (self._listener, self._wake_reader, self._wake_writer, *accepted):
            each.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._wake_reader:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:  # an earlier event of this round may have dropped it
                    if events & selectors.EVENT_WRITE:
                        key.data.flush()
                    if events & selectors.EVENT_READ:
                        self._read(key.data)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # no descriptor to be had now; without the control server no failure would be reported
            time.sleep(LACK_S)
            return
        self._connections.add(ServerConnection(accepted, self._selector))

    def _read(self, connection: ServerConnection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            for message in connection.inbox.feed(data):
                self._take(message, connection)
        except BlockingIOError:  # the selector may report what is not there
            return
        except (OSError, ValueError):  # reset by a death, or an unknown client's bytes: either way it is over
            data = b""
        if not data:
            self._drop(connection)

    def _take(self, message: ControlMessage, connection: ServerConnection) -> None:
        if isinstance(message, Hello):
            self._welcome(message, connection)
        elif connection not in self._ranks.values():  # those alone that have shown the token may send
            raise ValueError("a message before a hello")
        elif isinstance(message, Roll):
            connection.send(Roll(tuple(sorted(self._to_come))))
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

    def _welcome(self, hello: Hello, connection: ServerConnection) -> None:
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
        if (connection := self._ranks.get(rank)) is not None:
            connection.send(message)

    def _drop(self, connection: ServerConnection) -> None:
        self._connections.remove(connection)
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
