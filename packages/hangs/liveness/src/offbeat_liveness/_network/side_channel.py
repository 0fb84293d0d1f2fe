"""Messages between monitors: one question and one answer over TCP, each proven to be of the run.

A connection is served by one thread until it has proven that it belongs to the run; only then is its message read.

    server: MAGIC, nonce                                    HELLO_BYTES
    client: nonce, length, digest of the body, HMAC         HEADER_BYTES, then the body
    server: length, digest of the body, HMAC                REPLY_BYTES, then the body

Each HMAC is SHA-256 under the secret of the run over a label, both nonces, the length and the digest. So the secret is
never sent over it (it lies in the job's store, which torch does not protect); a message cannot be replayed, since its
nonce is the server's; an answer cannot be made by a process outside the run, nor kept for another question. Bodies
travel in clear: names, file paths, line numbers, shapes, and what a rank waits for, such as a host, a command line or
the text of an exception.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from offbeat_liveness._process.stacks import OwnThread

Message = dict[str, Any]

REFUSED_S: Final = 0.2
MAGIC: Final = b"offbeat2"
NONCE_BYTES: Final = 16
DIGEST_BYTES: Final = 32
LENGTH: Final = struct.Struct(">I")
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
HEADER_BYTES: Final = NONCE_BYTES + LENGTH.size + 2 * DIGEST_BYTES
REPLY_BYTES: Final = LENGTH.size + 2 * DIGEST_BYTES
MAX_BODY_BYTES: Final = 16 << 20
ASKS: Final = b"asks"
ANSWERS: Final = b"answers"
Answer = Callable[[Message], Message]
READ_BYTES: Final = 1 << 16
MAX_UNPROVEN: Final = 64  # connections that have not proven themselves; more wait in the kernel
CROWDED_S: Final = 0.25  # while so many are there, each is given as long
MAX_ANSWERING: Final = 64  # threads; each may hold a body
MAX_OPENED: Final = 4096  # questions of the run that wait for a thread
UNPROVEN_S: Final = 2.0  # to prove oneself
EXCHANGE_S: Final = 10.0  # for the whole exchange, but what the answer itself takes
LACK_S: Final = 0.1  # between two tries while the process has no descriptor or thread to spare
LOOPBACK: Final = "127.0.0.1"
PROBE_PORT: Final = 9


class RefusedError(Exception):
    """A message is not of this run, or not whole."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """Return the message in a body; RefusedError if there is none."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise RefusedError("not an object")
    return message


def hello() -> bytes:
    """Return the server's first bytes, the nonce at their end."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def read_hello(data: bytes) -> bytes:
    """Return the nonce of the server; RefusedError if something else listens there."""
    if len(data) != HELLO_BYTES or not data.startswith(MAGIC):
        raise RefusedError("no monitor of this version listens there")
    return data[len(MAGIC) :]


class Question:
    """The client's side of an exchange; many may share one body."""

    def __init__(self, body: bytes, secret: str) -> None:
        self._body, self._secret, self._nonce = body, secret, secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""

    def to_send(self, server_nonce: bytes) -> bytes:
        self._nonces = server_nonce + self._nonce
        return self._nonce + _seal(ASKS, self._nonces, self._body, self._secret) + self._body

    def open_header(self, header: bytes) -> tuple[int, bytes]:
        """Length and digest of the answer, from its header; RefusedError if no process of the run has made it."""
        return _open(ANSWERS, self._nonces, header, self._secret)


def open_question(header: bytes, server_nonce: bytes, secret: str) -> tuple[int, bytes, bytes]:
    """Length and digest of the question's body, and both nonces.

    Raises:
        RefusedError: it was not made by a process of the run, or is too long.
    """
    nonces = server_nonce + header[:NONCE_BYTES]
    length, digest = _open(ASKS, nonces, header[NONCE_BYTES:], secret)
    return length, digest, nonces


def seal_answer(body: bytes, nonces: bytes, secret: str) -> bytes:
    return _seal(ANSWERS, nonces, body, secret) + body


def check_body(body: bytes, digest: bytes) -> bytes:
    """Return the body itself; RefusedError if it is not the one that its header announced."""
    if not hmac.compare_digest(hashlib.sha256(body).digest(), digest):
        raise RefusedError("the body is not the one that was announced")
    return body


def _seal(label: bytes, nonces: bytes, body: bytes, secret: str) -> bytes:
    said = LENGTH.pack(len(body)) + hashlib.sha256(body).digest()
    return said + _mac(label, nonces, said, secret)


def _open(label: bytes, nonces: bytes, header: bytes, secret: str) -> tuple[int, bytes]:
    said, mac = header[:-DIGEST_BYTES], header[-DIGEST_BYTES:]
    if not secret or not hmac.compare_digest(mac, _mac(label, nonces, said, secret)):
        raise RefusedError("not of this run")
    (length,) = LENGTH.unpack(said[: LENGTH.size])
    if length > MAX_BODY_BYTES:
        raise RefusedError(f"{length} bytes are too many")
    return length, said[LENGTH.size :]


def _mac(label: bytes, nonces: bytes, said: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), label + nonces + said, "sha256")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of the monitor of one process.

    `born` distinguishes it from a later process with its pid, `job` from processes of another job ("" if unknown).
    """

    host: str
    port: int
    machine: str
    pid: int
    born: int
    name: str
    rank: int | None = None
    world: str = ""
    job: str = ""

    @property
    def order(self) -> tuple[bool, int, str, str, int]:
        """The lowest leads: ranks before other roles; no two have the same, though two worlds may have a rank 0."""
        return self.rank is None, self.rank or 0, self.name, self.machine, self.pid

    @property
    def slot(self) -> tuple[str, int | None] | None:
        """Name and rank, held by one process at a time; None for those without a name of their own."""
        is_named = self.name not in (f"rank {self.rank}", f"pid {self.pid}")
        return (self.name, self.rank) if is_named else None


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host get there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def address_toward(*hosts: str) -> str:
    """Return the address by which this host reaches the first that is another one; loopback if none is."""
    for host in hosts:
        if host and not is_loopback(host):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect((host, PROBE_PORT))  # sends nothing: it only chooses a route
                return str(probe.getsockname()[0])
    return LOOPBACK


class Endpoint(Protocol):
    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Listener:
    """Server that answers the other monitors.

    One thread sleeps in a selector and reads the first bytes of all clients. A message of the run then has a thread
    of its own, since an answer may take a while (an investigation) and others must not wait for it.

    Args:
        host: address to bind; the port is chosen by the system.
        secret: what a message must have been sealed with to be answered; none is while it is "".
    """

    def __init__(self, host: str, secret: Callable[[], str], answer: Answer) -> None:
        self._secret, self._answer, self._is_closed = secret, answer, False
        self._socket = socket.create_server((host, 0), backlog=1024)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._pending: dict[socket.socket, _Unproven] = {}
        self._opened: deque[_Opened] = deque(maxlen=MAX_OPENED)
        self._num_answering, self._counting = 0, threading.Lock()
        self._takes_in = True
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ)
        OwnThread(self._serve, "listen").start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """In a forked child: close the copies without disturbing the parent."""
        self._selector.close()
        for each in (self._socket, self._wake, self._waker, *self._pending):
            each.close()

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                try:
                    self._step()
                except (OSError, RuntimeError, ValueError):  # no descriptor or no thread to be had
                    time.sleep(LACK_S)  # a process that falls silent may be ended
        finally:
            self._selector.close()
            for each in (self._wake, self._waker, *self._pending):
                each.close()

    def _step(self) -> None:
        oldest = next(iter(self._pending.values()), None)
        wait_s = max(0.0, oldest.begun_s + self._patience_s - time.monotonic()) if oldest else None
        for chosen, _ in self._selector.select(wait_s):
            if self._is_closed:
                return
            if chosen.fileobj is self._socket:
                self._take_in()
            elif chosen.fileobj in self._pending:
                self._read_on(self._pending[chosen.fileobj])
        begun_s = time.monotonic() - self._patience_s
        for late in [each for each in self._pending.values() if each.begun_s <= begun_s]:
            self._drop(late.connection).close()
        self._take_in_if(len(self._pending) < MAX_UNPROVEN)

    @property
    def _patience_s(self) -> float:
        return UNPROVEN_S if len(self._pending) < MAX_UNPROVEN else CROWDED_S

    def _take_in_if(self, has_room: bool) -> None:
        """Accept new connections if there is room; else they wait in the kernel."""
        if has_room and not self._takes_in:
            self._selector.register(self._socket, selectors.EVENT_READ)
        elif self._takes_in and not has_room:
            self._selector.unregister(self._socket)
        self._takes_in = has_room

    def _take_in(self) -> None:
        connection, _ = self._socket.accept()
        greeting = hello()
        connection.setblocking(False)
        try:
            connection.send(greeting)  # a new connection has room for so few bytes
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            connection.close()
            return
        self._pending[connection] = _Unproven(connection, read_hello(greeting), time.monotonic())

    def _drop(self, connection: socket.socket) -> socket.socket:
        del self._pending[connection]
        self._selector.unregister(connection)
        return connection

    def _read_on(self, client: "_Unproven") -> None:
        """Read no more than the header; the thread that answers, if there is to be one, reads the rest."""
        connection = client.connection
        try:
            part = connection.recv(HEADER_BYTES - len(client.header))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        client.header += part
        if part and len(client.header) < HEADER_BYTES:
            return
        self._drop(connection)
        try:
            opened = open_question(bytes(client.header), client.nonce, self._secret()) if part else None
        except RefusedError:
            opened = None
        if opened is None or len(self._opened) == MAX_OPENED:
            connection.close()
        else:
            self._opened.append(_Opened(connection, *opened))
            self._answer_in_a_thread()

    def _answer_in_a_thread(self) -> None:
        with self._counting:
            if self._num_answering == MAX_ANSWERING:
                return  # one of these takes it next
            self._num_answering += 1
        try:
            OwnThread(self._answer_all, "answer").start()
        except RuntimeError:
            with self._counting:
                self._num_answering -= 1
            raise

    def _answer_all(self) -> None:
        while True:
            with self._counting:
                if not self._opened:
                    self._num_answering -= 1
                    return
                opened = self._opened.popleft()
            try:
                self._reply(opened)
            except BaseException:
                with self._counting:
                    self._num_answering -= 1
                raise

    def _reply(self, opened: "_Opened") -> None:
        connection = opened.connection
        with connection, contextlib.suppress(OSError, RefusedError):
            body = _read_exactly(connection, opened.num_bytes, time.monotonic() + EXCHANGE_S)
            message = decode(check_body(body, opened.digest))
            answer = encode(self._answer(message))
            connection.settimeout(EXCHANGE_S)
            connection.sendall(seal_answer(answer, opened.nonces, self._secret()))


@dataclass(eq=False)
class _Unproven:
    """A connection that has not proven yet that it belongs to the run."""

    connection: socket.socket
    nonce: bytes
    begun_s: float
    header: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Opened:
    """A question of the run; only its header has been read."""

    connection: socket.socket
    num_bytes: int
    digest: bytes
    nonces: bytes


def _read_exactly(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Read exactly so many bytes; a sender that is not done at `end_s` is cut off."""
    data = bytearray()
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        part = connection.recv(min(READ_BYTES, num_bytes - len(data)))
        if not part or time.monotonic() >= end_s:
            raise RefusedError("the message did not come whole in time")
        data += part
    return bytes(data)


def ask(door: Endpoint, message: Message, secret: str, timeout_s: float) -> Message | None:
    """Ask one question, and return the answer; None if none comes in time."""
    return ask_all({0: door}, message, secret, timeout_s).get(0)


def ask_all(doors: Mapping[Any, Endpoint], message: Message, secret: str, timeout_s: float) -> dict[Any, Message]:
    """Ask many one question at once.

    Returns:
        Replies by the keys of `doors`; without those that refused, failed, were late, or are not of this run.
    """
    end_s = time.monotonic() + timeout_s
    body = encode(message)
    replies: dict[Any, Message] = {}
    waiting = deque(doors.items())
    with selectors.DefaultSelector() as selector:
        while (waiting or selector.get_map()) and (left_s := end_s - time.monotonic()) > 0:
            while waiting and _begin(selector, *waiting[0], Question(body, secret)):
                waiting.popleft()
            for chosen, _ in selector.select(left_s if selector.get_map() else min(left_s, LACK_S)):
                _advance(selector, chosen, replies)
        for chosen in list(selector.get_map().values()):
            chosen.fileobj.close()  # type: ignore[union-attr]
    return replies


def is_refused(door: Endpoint) -> bool:
    """Return whether no process listens there any more; of one that is only busy the kernel takes the connections."""
    try:
        socket.create_connection((door.host, door.port), timeout=REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _begin(selector: selectors.BaseSelector, key: Any, door: Endpoint, question: Question) -> bool:
    """Open an exchange; not while the process has no descriptor to spare: a run may have more ranks than those."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    connection.setblocking(False)
    connection.connect_ex((door.host, door.port))
    selector.register(connection, selectors.EVENT_READ, _Exchange(key, question))
    return True


@dataclass
class _Exchange:
    """State of one exchange: a greeting, then all sent, then the answer's header, then its body."""

    key: Any
    question: Question
    awaited_bytes: int = HELLO_BYTES
    is_greeted: bool = False
    digest: bytes = b""
    to_send: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def take(self) -> Message | None:
        data, self.received = bytes(self.received), bytearray()
        if not self.is_greeted:
            self.is_greeted, self.awaited_bytes = True, REPLY_BYTES
            self.to_send += self.question.to_send(read_hello(data))
            return None
        if not self.digest:
            self.awaited_bytes, self.digest = self.question.open_header(data)
            return None
        return decode(check_body(data, self.digest))


def _advance(selector: selectors.BaseSelector, chosen: selectors.SelectorKey, replies: dict[Any, Message]) -> None:
    connection, each = chosen.fileobj, chosen.data
    assert isinstance(connection, socket.socket)
    try:
        if each.to_send:
            del each.to_send[: connection.send(each.to_send)]
            if not each.to_send:
                selector.modify(connection, selectors.EVENT_READ, each)
            return
        part = connection.recv(min(READ_BYTES, each.awaited_bytes - len(each.received)))
        each.received += part
        if part and len(each.received) < each.awaited_bytes:
            return
        answer = each.take() if part else None
        if part and answer is None:
            if each.to_send:
                selector.modify(connection, selectors.EVENT_WRITE, each)
            return
        if answer is not None:
            replies[each.key] = answer
    except BlockingIOError:
        return
    except (OSError, RefusedError):
        pass  # refused, reset or not of this run: no answer, which the caller sees by its absence
    selector.unregister(connection)
    connection.close()
