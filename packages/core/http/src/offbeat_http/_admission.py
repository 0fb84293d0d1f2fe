"""Admission of connections: how many there may be, and for how long one may stay without a request.

    accepted ──> pending ── complete head ──> active ── answered ──> idle ── first byte of the next head ──> pending
                    │  after head_deadline_s,                         │  after idle_s,
                    │  or the oldest of too many                      │  or the oldest, when there is no room for more
                    v                                                 v
                  closed                                            closed

A request that is being answered is never ended from here.
"""

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

_log = logging.getLogger(__name__)

BACKLOG: Final = 1024
"""Connections that the kernel keeps for us while accepting is paused."""
ACCEPTED_AT_ONCE: Final = 8
"""Connections accepted in one round of the event loop: what others send is read in between."""
CROWDED_S: Final = 0.1
"""Time that every pending connection has: of many clients that connect at once and then send, none is dropped. So 640
pending connections a second are closed, and a client behind a full kernel queue waits 1.6 s."""
LACK_S: Final = 0.25
"""Pause before the next try where no connection can be accepted, as where the process has no descriptor to spare."""
SILENT_S: Final = 2
"""Time for which a kernel that can (Linux) keeps a connection before its first byte, at no cost to us."""
LOG_EVERY_S: Final = 60.0
"""Unknown clients decide how often something is wrong with them, but not how fast a log grows."""

Event = Literal["crowded", "late", "slow", "malformed", "paused"]
_WORDS: Final[dict[Event, str]] = {
    "crowded": "closed for newer ones before they had sent a whole request head",
    "late": "closed without a whole request head in time",
    "slow": "closed for not reading their answer",
    "malformed": "malformed requests",
    "paused": "pauses because no connection could be accepted, as for lack of a descriptor",
}


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of what clients may hold.

    Args:
        max_pending: pending connections, which have not sent a complete request head yet. For one more the oldest is
            closed, once it has had a moment; others wait in the kernel meanwhile.
        max_connections: connections in all, and never more than half the descriptors of the process. For one more the
            one that is idle for longest is closed; while none is, new ones wait in the kernel.
        head_deadline_s: longest wait for a whole request head.
        idle_s: longest pause between two requests of a connection.
        send_deadline_s: longest wait for a client to take what it is sent.
    """

    max_pending: int = 64
    max_connections: int = 1024
    head_deadline_s: float = 2.0
    idle_s: int = 5
    send_deadline_s: float = 60.0


class Connection(Protocol):
    """A connection as it is seen from here."""

    transport: asyncio.Transport


@dataclass(frozen=True)
class _Wait:
    """Wait for a head."""

    began_s: float
    timer: asyncio.TimerHandle


class Admission:
    """Accepts connections in the running event loop.

    Args:
        listener: bound.
        make: the protocol of a new connection, which reports its state by `meet`, `end_wait`, `rest` and `forget`.
        limits: bounds.
    """

    def __init__(
        self, listener: socket.socket, make: "Callable[[Admission], asyncio.Protocol]", limits: ConnectionLimits
    ) -> None:
        self._listener, self._make, self.limits = listener, make, limits
        self._loop = asyncio.get_running_loop()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = limits.max_connections
        self._max_open = most if soft == resource.RLIM_INFINITY else max(min(most, soft // 2), 1)
        self._taking: set[asyncio.Task[None]] = set()
        self._open: set[Connection] = set()
        self._pending: dict[Connection, _Wait] = {}
        self._idle: dict[Connection, None] = {}
        self._accepts = self._is_closed = False
        self._trying_again: asyncio.TimerHandle | None = None
        self._noted: Counter[Event] = Counter()
        self._log_timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more; the connections that are there stay."""
        self._is_closed = True
        self._pause(None)
        self._listener.close()
        for task in self._taking:
            task.cancel()
        if self._log_timer:
            self._log_timer.cancel()
            self._notify()

    # ── what connections report ───────────────────────────────────────────────────────────────────────────────────

    def meet(self, connection: Connection) -> None:
        """Wait for a head: the connection is new, or has begun to send another one."""
        self._open.add(connection)
        self._idle.pop(connection, None)
        if connection not in self._pending:
            timer = self._loop.call_later(self.limits.head_deadline_s, self.turn_away, connection, "late")
            self._pending[connection] = _Wait(self._loop.time(), timer)

    def end_wait(self, connection: Connection) -> None:
        """Note that a complete head has arrived, or that none is awaited any more."""
        self._idle.pop(connection, None)
        if wait := self._pending.pop(connection, None):
            wait.timer.cancel()
            self._resume()

    def rest(self, connection: Connection) -> None:
        """Note that all requests are answered."""
        self._idle[connection] = None
        self._resume()

    def forget(self, connection: Connection) -> None:
        """Note that the connection is gone."""
        self.end_wait(connection)
        self._open.discard(connection)
        self._resume()

    def turn_away(self, connection: Connection, event: Event) -> None:
        """End a connection at once."""
        self.note(event)
        self.end_wait(connection)
        connection.transport.abort()

    def note(self, event: Event) -> None:
        """Count what is wrong with clients; it is logged in one line a minute."""
        self._noted[event] += 1
        if self._log_timer is None:
            self._log_timer = self._loop.call_later(LOG_EVERY_S, self._notify)

    def _notify(self) -> None:
        counts = ", ".join(f"{count} {_WORDS[event]}" for event, count in sorted(self._noted.items()))
        _log.warning("HTTP connections in the last %g s: %s", LOG_EVERY_S, counts)
        self._noted.clear()
        self._log_timer = None

    # ── accepting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        for number in range(ACCEPTED_AT_ONCE):
            # Only the first is known to be there: room is made for no other.
            if (self._is_full or self._has_many_pending) and (number or not self._made_room()):
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no descriptor or memory, or what a firewall has said: the next try may do
                self.note("paused")
                self._pause(LACK_S)
                return
            task = self._loop.create_task(self._take(sock))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    async def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._make(self), sock)
        except OSError:  # it has gone again
            sock.close()

    @property
    def _has_many_pending(self) -> bool:
        return len(self._pending) + len(self._taking) >= self.limits.max_pending

    @property
    def _is_full(self) -> bool:
        return len(self._open) + len(self._taking) >= self._max_open

    def _made_room(self) -> bool:
        """End a pending connection that has had its moment, or an idle one; while there is none, pause."""
        if self._is_full:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                self._pause(None)  # until one is, or has ended
                return False
            del self._idle[oldest]
            self._open.discard(oldest)
            oldest.transport.close()
        if self._has_many_pending:
            oldest_pending, wait = next(iter(self._pending.items()), (None, None))
            left_s = CROWDED_S if wait is None else wait.began_s + CROWDED_S - self._loop.time()
            if oldest_pending is None or left_s > 0:
                self._pause(left_s)
                return False
            self.turn_away(oldest_pending, "crowded")
        return True

    def _pause(self, wait_s: float | None) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._listener)
        if wait_s is not None:
            self._trying_again = self._loop.call_later(wait_s, self._resume)

    def _resume(self) -> None:
        if self._trying_again:
            self._trying_again.cancel()
            self._trying_again = None
        if not self._accepts and not self._is_closed:
            self._accepts = True
            self._loop.add_reader(self._listener, self._accept)
