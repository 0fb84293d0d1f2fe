"""The hub: rank 0's thread that passes news between the ranks and sees at once when one of them dies.

Every rank, rank 0 too, holds one connection to it. The kernel closes a dead process's connection, so a death is known
within milliseconds and needs no heartbeat; a stopped process keeps its connection and is not taken for dead.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Final

from offbeat_mesh._news import Ask, Bye, Hello, Inbox, News, Record, Standing, Welcome, keep_watch, pack

SEND_TIMEOUT_S: Final = 2.0
"""A rank that takes no news for so long, although its socket has room for thousands, is stopped: it misses the news."""


LACK_S: Final = 0.1
"""Between two tries to let a rank in while the process has no descriptor to spare."""


class Hub:
    """Listens for the ranks of one world and relays their news until `close`.

    Args:
        host: address to listen on.
        token: what a rank must know to be let in; it comes from the world's store.
    """

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._inboxes: dict[socket.socket, Inbox] = {}
        self._ranks: dict[int, socket.socket] = {}
        self._records: list[Record] = []
        self._said_bye: set[int] = set()
        _open_hubs.add(self)
        self._thread = threading.Thread(target=self._serve, name="offbeat-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop relaying; the ranks that are still connected see their connection end."""
        self._wake_writer.send(b"x")
        self._thread.join(timeout=5)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close this process's handles without a word; a forked child does this."""
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
        except OSError:  # no descriptor to be had now; without the hub no failure would be heard
            time.sleep(LACK_S)
            return
        connection.settimeout(SEND_TIMEOUT_S)
        keep_watch(connection)
        self._inboxes[connection] = Inbox()
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            for news in self._inboxes[connection].feed(data):
                self._take(news, connection)
        except (OSError, ValueError):  # reset by a death, or a stranger's bytes: either way it is over
            data = b""
        if not data:
            self._drop(connection)

    def _take(self, news: News, connection: socket.socket) -> None:
        if isinstance(news, Hello):
            self._welcome(news, connection)
        elif connection not in self._ranks.values():
            raise ValueError("news before a hello")
        elif isinstance(news, Record):
            self._relay(news)
        elif isinstance(news, Ask):
            for rank in news.members:
                self._send(rank, news)
        elif isinstance(news, Standing):
            self._send(news.asker, news)
        elif isinstance(news, Bye):
            self._said_bye.add(news.rank)
            self._relay(Record(kind="left", rank=news.rank))

    def _welcome(self, hello: Hello, connection: socket.socket) -> None:
        if hello.token != self._token or hello.rank in self._ranks:
            raise ValueError("a hello from a stranger")
        self._ranks[hello.rank] = connection
        self._send(hello.rank, Welcome())
        for record in self._records:
            self._send(hello.rank, record)

    def _relay(self, record: Record) -> None:
        self._records.append(record)
        for rank in list(self._ranks):
            self._send(rank, record)

    def _send(self, rank: int, news: News) -> None:
        connection = self._ranks.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # a death is dealt with when its connection is read
                connection.sendall(pack(news))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._inboxes[connection]
        connection.close()
        for rank in [rank for rank, each in self._ranks.items() if each is connection]:
            del self._ranks[rank]
            if rank not in self._said_bye:
                self._relay(Record(kind="died", rank=rank))


_open_hubs: "weakref.WeakSet[Hub]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not keep its parent's connections alive beyond its death."""
    for hub in list(_open_hubs):
        hub.close_sockets()
    _open_hubs.clear()


os.register_at_fork(after_in_child=_close_in_child)
