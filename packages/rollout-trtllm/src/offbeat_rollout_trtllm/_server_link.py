"""HTTP to one engine server: JSON in and out, and lines as they come. Every wait has a deadline and a name.

Requests are HTTP/1.0: the server ends the body by closing the connection, which is all the framing there is to read.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from offbeat_liveness import waiting
from offbeat_types import ConfigError, DeadlineError, PeerFailedError

TOKEN_VARIABLE: Final = "OFFBEAT_TRTLLM_TOKEN"
"""Environment variable that holds the secret of server and clients; unset where the server listens on loopback."""

MAX_LINE_BYTES: Final = 1 << 20
MAX_ERROR_CHARS: Final = 400


class HttpEngine:
    """One engine server.

    Args:
        address: host:port.
        deadline_s: for each answer, or each line of one.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, *, deadline_s: float) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"an engine server's address is host:port, got {address!r}")
        self.address, self.deadline_s = address, deadline_s
        self._host, self._port = host.strip("[]"), int(port)

    @property
    def label(self) -> str:
        """For people."""
        return f"the TensorRT-LLM server {self.address}"

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the JSON it is answered with; None for an empty answer.

        Raises:
            PeerFailedError: the server is not there, dies, or refuses, with what it says.
            DeadlineError: it does not answer.
        """
        async with self._named(f"{method} {path}"):
            reader, writer = await self._open(method, path, body)
            try:
                content = await reader.read()
            finally:
                writer.close()
        return json.loads(content) if content.strip() else None

    async def lines(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Send a POST, and yield the JSON of each line of the answer as it comes."""
        name = f"POST {path}"
        async with self._named(name):
            reader, writer = await self._open("POST", path, body)
        try:
            while True:
                async with self._named(name):
                    line = await reader.readline()
                if not line:
                    return
                yield json.loads(line)
        finally:
            writer.close()

    @asynccontextmanager
    async def _named(self, name: str) -> AsyncIterator[None]:
        """A wait on this server: declared, ended at its deadline, its failures typed."""
        try:
            with waiting(name, on=self.label, deadline_s=self.deadline_s):
                async with asyncio.timeout(self.deadline_s):
                    yield
        except TimeoutError as error:
            raise DeadlineError(
                name, self.label, self.deadline_s, "see the server's log, or raise call_deadline_s"
            ) from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise PeerFailedError(self.label, f"{name}: {type(error).__name__}: {error}") from error

    async def _open(self, method: str, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.0\r\nHost: {self.address}\r\nContent-Length: {len(content)}\r\n"
            if token := os.environ.get(TOKEN_VARIABLE):
                head += f"Authorization: Bearer {token}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            await writer.drain()
            await self._take_head(reader, f"{method} {path}")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _take_head(self, reader: asyncio.StreamReader, name: str) -> None:
        """Read up to the body of a good answer."""
        status = (await reader.readline()).split(maxsplit=2)
        if len(status) < 2:
            raise ConnectionResetError("the connection ended before an answer came")
        while (await reader.readline()).strip():
            pass
        if not status[1].startswith(b"2"):
            text = (await reader.read()).decode(errors="replace")[:MAX_ERROR_CHARS]
            raise PeerFailedError(self.label, f"{name} was refused with {status[1].decode()}: {text}")
