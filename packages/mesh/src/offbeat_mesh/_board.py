"""A rank's side of the hub: failures of other ranks arrive here, and questions about where a group's members stand."""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from offbeat_mesh._news import Ask, Bye, Hello, Inbox, News, Record, Standing, Welcome, keep_watch, pack
from offbeat_types import DeadlineError

ANSWER_S: Final = 1.0
"""How long members are given to say where they stand; a thread of theirs answers, whatever their main thread does."""


class Listener(Protocol):
    """A group, as the board sees it."""

    key: str

    def hear(self, record: Record) -> None:
        """Take note of a record, if it concerns the group. Called on the board's thread; never blocks."""
        ...

    def standing(self) -> tuple[int, str, bool]:
        """Calls entered, the newest of them, and whether it is still going on."""
        ...


class Board:
    """The connection of this rank to the hub.

    Args:
        rank: of this process.
        address: the hub's.
        token: the hub's.
        deadline_s: for being let in.

    Raises:
        DeadlineError: the hub does not answer.
    """

    def __init__(self, rank: int, address: tuple[str, int], token: str, deadline_s: float) -> None:
        self.rank = rank
        self.records: list[Record] = []
        self.closed = False
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._standings: dict[int, dict[int, Standing]] = {}
        self._asked = 0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._inbox = Inbox()
        self._early: list[News] = []
        self._socket = self._connect(address, token, deadline_s)
        _open_boards.add(self)
        self._thread = threading.Thread(target=self._serve, name="offbeat-board", daemon=True)
        self._thread.start()

    def _connect(self, address: tuple[str, int], token: str, deadline_s: float) -> socket.socket:
        try:
            connection = socket.create_connection(address, timeout=deadline_s)
            keep_watch(connection)
            connection.sendall(pack(Hello(self.rank, token)))
            while not self._early:
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionError("the hub closed the connection")
                self._early += self._inbox.feed(data)
        except OSError as error:
            on = f"rank 0's hub at {address[0]}:{address[1]}"
            raise DeadlineError("join_world", on, deadline_s, f"is it reachable from here? {error}") from error
        connection.settimeout(None)
        return connection

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of every record, past ones too."""
        with self._changed:
            self._listeners.add(listener)
            past = list(self.records)
        for record in past:
            listener.hear(record)

    def post(self, record: Record) -> None:
        """Tell all ranks, this one included; here it is heard at once."""
        self._hear(record)
        self._send(record)

    def ask(self, group: str, members: Sequence[int]) -> dict[int, Standing]:
        """Where the members of a group stand; who does not answer within a second is not in the result."""
        with self._changed:
            self._asked += 1
            number = self._asked
            answers = self._standings[number] = {}
        if self._send(Ask(self.rank, number, group, tuple(members))):
            self.wait_until(lambda: len(answers) == len(members), ANSWER_S)
        with self._changed:
            return dict(self._standings.pop(number))

    def wait_until(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Wait for news that make `holds` true; False when it did not become so in time."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while not holds():
                if self.closed or not self._changed.wait(max(0.0, end - time.monotonic())):
                    return holds()
            return True

    def leave(self) -> None:
        """Say that this rank leaves well."""
        self._send(Bye(self.rank))

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._socket.close()

    def close_in_child(self) -> None:
        """Drop a forked child's handle: its parent's connection must end with the parent."""
        self.closed = True
        self._socket.close()

    def _send(self, news: News) -> bool:
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(pack(news))
            return True
        return False

    def _serve(self) -> None:
        for news in self._early:
            self._take(news)
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
                for news in self._inbox.feed(data):
                    self._take(news)
            except (OSError, ValueError):
                data = b""
            if not data:
                break
        if not self.closed:  # the hub lives in rank 0
            self.closed = True
            self._hear(Record(kind="died", rank=0))
        with self._changed:
            self._changed.notify_all()

    def _take(self, news: News) -> None:
        if isinstance(news, Record):
            self._hear(news)
        elif isinstance(news, Ask):
            self._answer(news)
        elif isinstance(news, Standing):
            with self._changed:
                if news.number in self._standings:
                    self._standings[news.number][news.rank] = news
                self._changed.notify_all()
        else:
            assert isinstance(news, Welcome), news

    def _hear(self, record: Record) -> None:
        with self._changed:
            if record in self.records:  # our own, come back from the hub
                return
            self.records.append(record)
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener.hear(record)

    def _answer(self, ask: Ask) -> None:
        with self._changed:
            found = [listener for listener in self._listeners if listener.key == ask.group]
        entered, call, inside = found[0].standing() if found else (0, "", False)
        self._send(Standing(ask.asker, ask.number, self.rank, entered, call, inside))


_open_boards: "weakref.WeakSet[Board]" = weakref.WeakSet()


def _close_in_child() -> None:
    for board in list(_open_boards):
        board.close_in_child()
    _open_boards.clear()


os.register_at_fork(after_in_child=_close_in_child)
