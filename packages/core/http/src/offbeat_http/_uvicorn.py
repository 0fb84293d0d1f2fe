"""uvicorn on connections that `Admission` lets in. Imported late: it takes a while, and most processes never listen."""

import asyncio
import contextlib
import logging
import math
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
"""In the scope of a request whose sender was not let in."""


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
            log_config=None,  # whoever runs the server owns its logs
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


class _Connection(H11Protocol):
    """A connection that tells `Admission` what it is waiting for, and does not wait for a client that reads nothing."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, admission: Admission) -> None:
        super().__init__(config, server_state, app_state={})
        self.logger = _uvicorn_log
        self._admission = admission
        self._sending: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every byte that is not taken
        self._admission.meet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        self._admission.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            super().data_received(data)
        if not self._is_over:
            self._tell_admission()

    def on_response_complete(self) -> None:
        # A body that no one reads any more would come for as long as its sender likes; a stranger stays one.
        if self.conn.their_state is h11.SEND_BODY or self.scope.get(_REFUSED):
            self._linger()
        else:
            super().on_response_complete()
            self._tell_admission()

    def _linger(self) -> None:
        """End the connection for what it sends first: closed with bytes unread, it would take the answer with it."""
        self._is_over = True
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._admission.meet(self)

    def _tell_admission(self) -> None:
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._admission.hear(self)
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
