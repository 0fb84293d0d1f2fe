"""The server, in the event loop that starts it."""

import asyncio
import logging
import socket
from typing import Any, Final

from offbeat_http._admission import ConnectionLimits
from offbeat_http._listening import address_of

START_DEADLINE_S: Final = 30.0
_log = logging.getLogger(__name__)


class HttpServer:
    """An ASGI application on a socket, in the event loop that starts it.

    Args:
        app: the application.
        listener: bound; see `listen`. It is closed with the server.
        limits: bounds of what clients may hold.
        close_deadline_s: time for requests to end when the server closes.

    Attributes:
        url: the address, without a path.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        limits: ConnectionLimits | None = None,
        close_deadline_s: float = 1.0,
    ) -> None:
        from offbeat_http._uvicorn import BoundedUvicorn

        limits = limits or ConnectionLimits()
        self._listener, self._close_deadline_s = listener, close_deadline_s
        self.url = address_of(listener)
        self._uvicorn = BoundedUvicorn(app, listener, limits, close_deadline_s)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            TimeoutError: it does not begin within 30 s.
        """
        self._serving = asyncio.create_task(self._uvicorn.serve(), name="offbeat-http")
        started = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait({started, self._serving}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            self._serving.result()
        if not self._uvicorn.listening.is_set():
            raise TimeoutError(f"waited {START_DEADLINE_S:g} s for the HTTP server to listen")

    async def close(self) -> None:
        """Accept no connection any more, wait for requests to be answered, and stop. Closing twice is fine."""
        if self._serving is None or self._serving.done():
            return
        self._uvicorn.should_exit = True
        deadline_s = 2 * self._close_deadline_s + 1  # uvicorn's own, then its tasks' ends
        _, late = await asyncio.wait({self._serving}, timeout=deadline_s)
        if late:
            _log.warning("the HTTP server did not stop within %g s and is left behind", deadline_s)
            self._serving.cancel()
