"""Serves the report of a run, which may still run, at an address that only its reader knows."""

import asyncio
import hmac
import http.client
import secrets
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from offbeat_core import ConfigError, OffbeatError
from offbeat_http import Page, PageServer, listen
from offbeat_run._console.printing import print_text
from offbeat_run._folder.folder import RunFolder
from offbeat_run._report.page import write_report

HOST: Final = "127.0.0.1"
"""Loopback only: the report holds prompts and completions, and there is no password."""
RENDER_EVERY_S: Final = 5.0
"""A report of a long run takes seconds to write, which no reader can ask for more often."""
_HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def serve_report(run: RunFolder, port: int) -> None:
    """Serve until interrupted.

    Other users of this machine reach the port too, so the address that is printed has a random path.

    Args:
        run: open for reading.
        port: on the loopback interface, 1 to 65535.

    Raises:
        ConfigError: the port is out of range or in use.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"--serve needs a port from 1 to 65535: got {port}")
    try:
        listener = listen(HOST, port)
    except OSError as error:
        raise ConfigError(f"port {port} on {HOST} cannot be used: {error.strerror}; choose another") from error
    served = ServedReport(run, port)
    with PageServer(listener, served.answer, name="report") as server:
        print_text(f"report of {run.path} at {server.url}{served.path} (Ctrl-C ends)")
        threading.Event().wait()


class ServedReport:
    """The report as it is asked for: written anew when the run has changed, and not more often than it may be.

    Args:
        run: open for reading.
        port: that it is served at.
        render_every_s: shortest time between two reports.

    Attributes:
        path: where it is; without this path there is nothing to read.
    """

    def __init__(self, run: RunFolder, port: int, render_every_s: float = RENDER_EVERY_S) -> None:
        self._run, self._render_every_s = run, render_every_s
        self.path = f"/{secrets.token_urlsafe(24)}/"
        # Another site may have its own name lead here (DNS rebinding), and a browser would then let it read the report.
        bare = {HOST, "localhost"} if port == http.client.HTTP_PORT else set()
        self._names = {f"{HOST}:{port}", f"localhost:{port}"} | bare
        self._page = b""
        self._state: list[tuple[str, int, int]] = []
        self._written_s = -render_every_s
        self._writing = asyncio.Lock()

    async def answer(self, path: str, headers: Mapping[str, str]) -> Page:
        """Answer a request."""
        if headers.get("host") not in self._names:
            return Page.refuse(HTTPStatus.FORBIDDEN, "this address is read as 127.0.0.1 or localhost")
        if not hmac.compare_digest(path.encode(errors="replace"), self.path.encode()):
            return Page.refuse(HTTPStatus.NOT_FOUND, "the report is at the address that its command has printed")
        async with self._writing:
            try:
                await asyncio.to_thread(self._renew)
            except (OffbeatError, OSError) as error:
                return Page.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"the report cannot be written: {error}")
        return Page(body=self._page, content_type="text/html; charset=utf-8", headers=_HEADERS)

    def _renew(self) -> None:
        if time.monotonic() < self._written_s + self._render_every_s:
            return
        state = self._look()
        if state == self._state and self._page:
            return
        try:
            self._page = write_report(self._run).read_bytes()
            self._state = state
        finally:
            self._written_s = time.monotonic()

    def _look(self) -> list[tuple[str, int, int]]:
        """Name, size and time of change of all files that a report is made of."""
        run = self._run
        single = [run.metrics, run.sessions, run.alarms, run.timeline, run.plan, run.config, run.settled]
        folders = [run.generations, run.validation, run.profile]
        paths = [*single, *(path for folder in folders for path in sorted(folder.glob("*")))]
        found = [(path, path.stat()) for path in paths if path.is_file()]
        return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
