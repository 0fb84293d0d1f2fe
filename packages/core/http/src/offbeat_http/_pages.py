"""Pages that are read: GET and HEAD, from an event loop of their own."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Self

from offbeat_http._admission import ConnectionLimits
from offbeat_http._listening import address_of
from offbeat_http._server import START_DEADLINE_S, HttpServer

CHUNK_BYTES: Final = 1 << 18
"""Longest piece of an answer. Each has `send_deadline_s`, so that a slow line gets the whole page, and a client that
reads nothing is let go."""
CLOSE_DEADLINE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Page:
    """One answer.

    Args:
        body: what a GET gets.
        content_type: of the body.
        headers: further ones.
        status: HTTP's.
    """

    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def refuse(cls, status: HTTPStatus, message: str, **headers: str) -> Self:
        """Return an error, as one line."""
        return cls(body=f"{message}\n".encode(), status=status, headers=headers)


Answer = Callable[[str, Mapping[str, str]], Awaitable[Page]]
"""Makes the page of a path; the second argument is the request's headers under lower-case names."""


class PageServer:
    """Pages from a thread of their own. Use it in a `with` block.

    Args:
        listener: bound; see `listen`. It is closed with the server.
        answer: makes each page, in that thread.
        name: of the thread.
        limits: bounds of what clients may hold.

    Attributes:
        url: the address, without a path.
    """

    def __init__(
        self, listener: socket.socket, answer: Answer, *, name: str, limits: ConnectionLimits | None = None
    ) -> None:
        self._listener, self._answer, self._limits = listener, answer, limits
        self.url = address_of(listener)
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_up.wait(START_DEADLINE_S):
            raise TimeoutError(f"waited {START_DEADLINE_S:g} s for the HTTP server at {self.url} to listen")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join(3 * CLOSE_DEADLINE_S)
        self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        application = _application(self._answer)
        server = HttpServer(application, self._listener, limits=self._limits, close_deadline_s=CLOSE_DEADLINE_S)
        await server.start()
        try:
            self._is_up.set()
            await self._is_over.wait()
        finally:
            await server.close()


def _application(answer: Answer) -> Any:
    """Return the ASGI application of pages."""

    async def application(scope: dict[str, Any], _: Any, send: Any) -> None:
        if scope["method"] in ("GET", "HEAD"):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            page = await answer(scope["path"], headers)
        else:
            page = Page.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered here", Allow="GET, HEAD")
        said = {"Content-Type": page.content_type, "Content-Length": str(len(page.body)), "Connection": "close"}
        pairs = [(name.lower().encode(), value.encode()) for name, value in {**said, **page.headers}.items()]
        await send({"type": "http.response.start", "status": page.status, "headers": pairs})
        body = memoryview(b"" if scope["method"] == "HEAD" else page.body)
        for start in range(0, len(body), CHUNK_BYTES):
            await send(
                {"type": "http.response.body", "body": bytes(body[start : start + CHUNK_BYTES]), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    return application
