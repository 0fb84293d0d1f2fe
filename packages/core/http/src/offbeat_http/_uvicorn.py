"""uvicorn on connections that `Admission` lets in. Imported late: it takes a while, and most processes never listen."""

import asyncio
import contextlib
import logging
import math
import re
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from offbeat_http._admission import Admission, ConnectionLimits

# uvicorn writes a warning for each malformed request; these are counted. What an application raises is an error.
_uvicorn_log = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)
_REFUSED: Final = "offbeat.refused"
"""Key in the scope of a request that was refused."""
MAX_HEAD_LINES: Final = 128
"""Most lines in the head of a request: browsers and proxies send about 30. Each costs the event loop some 30 us."""
FREE_CHUNKS: Final = 256
LEAST_CHUNK_BYTES: Final = 128
"""Chunks of a body beyond `FREE_CHUNKS` are this long on average: one costs some 20 us, however short it is, so that a
megabyte of single bytes would keep the event loop for three seconds."""
_MAX_HEAD_BYTES: Final = 1 << 16
_HEAD_END: Final = re.compile(rb"\n\r?\n")


class BoundedUvicorn(uvicorn.Server):
    """uvicorn in an event loop that is not its own: `Admission` accepts for it, and signals are left alone."""

    def __init__(self, app: Any, listener: socket.socket, limits: ConnectionLimits, close_deadline_s: float) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def look_and_send(message: Any) -> None:
                if message.get("status") in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    scope[_REFUSED] = True
                await send(message)

            await app(scope, receive, look_and_send)

        config = uvicorn.Config(
            answer,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,  # the process that runs the server owns its logs
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.idle_s,
            timeout_graceful_shutdown=math.ceil(close_deadline_s),
        )
        super().__init__(config)
        self.listening = asyncio.Event()
        self._listener, self._limits = listener, limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connect(admission: Admission) -> "_Connection":
            return _Connection(self.config, self.server_state, admission)

        self.servers = []
        self._admission = Admission(self._listener, connect, self._limits)
        self.started = True
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedParser(h11.Connection):
    """h11 with bounds on the parts that a request may have, and one opinion of where its body ends.

    Source: RFC 9112, section 6.3, which lets a server refuse a request that has both Content-Length and
    Transfer-Encoding: what is in front of this server may have believed the other one.
    """

    _is_chunked = False
    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:
        """Return the next part of a request.

        Raises:
            h11.RemoteProtocolError: it is no HTTP, or has more parts than it may.
        """
        if self.their_state is h11.IDLE and _num_head_lines(self.trailing_data[0]) > MAX_HEAD_LINES:
            raise h11.RemoteProtocolError(f"a request has {MAX_HEAD_LINES} lines of head at most")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self._is_chunked = b"transfer-encoding" in names
            self._num_chunks = self._num_bytes = 0
            if self._is_chunked and b"content-length" in names:
                raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, and not both")
        elif isinstance(event, h11.Data) and self._is_chunked:
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_bytes < (self._num_chunks - FREE_CHUNKS) * LEAST_CHUNK_BYTES:
                raise h11.RemoteProtocolError(f"chunks have {LEAST_CHUNK_BYTES} bytes or more on average")
        return event


def _num_head_lines(data: bytes) -> int:
    end = _HEAD_END.search(data)
    return data.count(b"\n", 0, end.start() if end else len(data))


class _Connection(H11Protocol):
    """A connection that reports its state to `Admission`, and does not wait for a client that reads nothing."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, admission: Admission) -> None:
        super().__init__(config, server_state, app_state={})
        self.conn = _BoundedParser(h11.SERVER, _MAX_HEAD_BYTES)
        self.logger = _uvicorn_log
        self._admission = admission
        self._sending: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called for every byte that is not read
        self._admission.meet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        self._admission.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            super().data_received(data)
        if not self._is_over:
            self._report_state()

    def on_response_complete(self) -> None:
        # A body that is not read any more could go on forever; a refused client's connection stays pending.
        if self.conn.their_state is h11.SEND_BODY or self.scope.get(_REFUSED):
            self._linger()
        else:
            super().on_response_complete()
            self._report_state()

    def _linger(self) -> None:
        """End the connection for what it sends first: closed with bytes unread, it would take the answer with it."""
        self._is_over = True
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._admission.meet(self)

    def _report_state(self) -> None:
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._admission.end_wait(self)
        elif self.conn.trailing_data[0]:
            self._admission.meet(self)
        else:
            self._admission.rest(self)

    def send_400_response(self, msg: str) -> None:
        self._admission.note("malformed")
        if self.cycle is not None:
            self.cycle.disconnected = True
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is on its way already
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            deadline_s = self._admission.limits.send_deadline_s
            self._sending = self.loop.call_later(deadline_s, self._admission.turn_away, self, "slow")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending:
            self._sending.cancel()
            self._sending = None
