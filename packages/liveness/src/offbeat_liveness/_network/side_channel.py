"""Messages between monitors: one JSON line each way over TCP, answered by a thread that nothing else uses."""

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from offbeat_liveness._process.stacks import OWN_THREADS

Message = dict[str, Any]
Answer = Callable[[Message], Message]

MAX_MESSAGE_BYTES: Final = 16 << 20
READ_BYTES: Final = 1 << 16
LACK_S: Final = 0.1  # between two tries while the process has no descriptor or thread to spare
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the monitor of one process listens, and whose it is; `born` tells it from a later bearer of its pid."""

    host: str
    port: int
    machine: str
    pid: int
    born: int
    name: str
    rank: int | None = None
    world: str = ""

    @property
    def order(self) -> tuple[bool, int, str]:
        """The lowest leads: ranks before other roles."""
        return self.rank is None, self.rank or 0, self.name

    @property
    def seat(self) -> tuple[str, int | None] | None:
        """What one process at a time has in the run; None for those without a name of their own."""
        is_named = self.name not in (f"rank {self.rank}", f"pid {self.pid}")
        return (self.name, self.rank) if is_named else None


class Door(Protocol):
    """Where something listens."""

    @property
    def host(self) -> str:
        """IP address."""
        ...

    @property
    def port(self) -> int:
        """Number of the port."""
        ...


class Listener:
    """Answers the other monitors, from a thread of its own that sleeps in accept().

    Args:
        host: address to bind; the port is chosen by the system.
        secret: what a message must hold to be answered; nobody is while it is "".
        answer: makes the reply.
    """

    def __init__(self, host: str, secret: Callable[[], str], answer: Answer) -> None:
        self._secret, self._answer, self._is_closed = secret, answer, False
        self._socket = socket.create_server((host, 0), backlog=256)
        self.host, self.port = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, name=f"{OWN_THREADS}-listen", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """In a forked child: close the copy without disturbing the parent."""
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
                # A thread each: an answer may take a while (an investigation), and others must not wait for it.
                threading.Thread(
                    target=self._reply, args=(connection,), name=f"{OWN_THREADS}-answer", daemon=True
                ).start()
            except (OSError, RuntimeError):  # no descriptor or no thread to be had: whoever falls silent may be ended
                time.sleep(LACK_S)

    def _reply(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, RecursionError):  # a stranger's bytes may be anything
            connection.settimeout(5.0)
            message = json.loads(_read_line(connection))
            if isinstance(message, dict) and _is_same(str(message.pop("secret", "")), self._secret()):
                connection.sendall(_line(self._answer(message)))


def ask(door: Door, message: Message, secret: str, timeout_s: float) -> Message | None:
    """One question, one answer; None if none comes in time."""
    return ask_all({0: door}, message, secret, timeout_s).get(0)


def ask_all(doors: Mapping[Any, Door], message: Message, secret: str, timeout_s: float) -> dict[Any, Message]:
    """One question to many at once.

    Returns:
        Replies by the keys of `doors`; without those who refused, failed or were late.
    """
    end_s = time.monotonic() + timeout_s
    line = _line({**message, "secret": secret})
    replies: dict[Any, Message] = {}
    waiting = deque(doors.items())
    with selectors.DefaultSelector() as selector:
        while (waiting or selector.get_map()) and (left_s := end_s - time.monotonic()) > 0:
            while waiting and _begin(selector, *waiting[0], line):
                waiting.popleft()
            for chosen, _ in selector.select(left_s if selector.get_map() else min(left_s, LACK_S)):
                _go_on(selector, chosen, replies)
        for chosen in list(selector.get_map().values()):
            chosen.fileobj.close()  # type: ignore[union-attr]
    return replies


def _begin(selector: selectors.BaseSelector, key: Any, door: Door, line: bytes) -> bool:
    """Open an exchange; not while the process has no descriptor to spare: a run may have more ranks than those."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    connection.setblocking(False)
    connection.connect_ex((door.host, door.port))
    selector.register(connection, selectors.EVENT_WRITE, _Exchange(key, bytearray(line), bytearray()))
    return True


@dataclass
class _Exchange:
    key: Any
    to_send: bytearray
    received: bytearray


def _go_on(selector: selectors.BaseSelector, chosen: selectors.SelectorKey, replies: dict[Any, Message]) -> None:
    """One step of one exchange: send the rest, or read some."""
    connection, exchange = chosen.fileobj, chosen.data
    assert isinstance(connection, socket.socket)
    try:
        if exchange.to_send:
            del exchange.to_send[: connection.send(exchange.to_send)]
            if not exchange.to_send:
                selector.modify(connection, selectors.EVENT_READ, exchange)
            return
        part = connection.recv(READ_BYTES)
        exchange.received += part
        if part and not part.endswith(b"\n"):
            return
        if exchange.received:
            replies[exchange.key] = json.loads(exchange.received)
    except BlockingIOError:
        return
    except (OSError, ValueError):
        pass  # refused, reset or garbled: no answer, which the caller sees by its absence
    selector.unregister(connection)
    connection.close()


def _is_same(said: str, secret: str) -> bool:
    return bool(secret) and hmac.compare_digest(said.encode(errors="replace"), secret.encode())


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MAX_MESSAGE_BYTES:
        part = connection.recv(READ_BYTES)
        if not part:
            break
        data += part
    return bytes(data)
