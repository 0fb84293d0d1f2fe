"""The endpoint on a socket, in the event loop that owns the engine."""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

import uvicorn

from offbeat_data import Tokenizer
from offbeat_serve._endpoint import Endpoint
from offbeat_serve._sessions import Sessions
from offbeat_serve._settings import ServedModel, ServeSettings, read_token
from offbeat_types import ConfigError, DeadlineError, RolloutEngine

START_DEADLINE_S: Final = 30.0
_log = logging.getLogger(__name__)


class RolloutServer:
    """Serves one rollout engine over HTTP. Use it in an `async with` block; the engine stays its maker's to close.

    Args:
        engine: started, used from this event loop.
        tokenizer: of the model.
        model: what is served.
        settings: where, how much, how long; loopback by default.
        sessions_only: let nobody in but agents with the key of a session.

    Raises:
        ConfigError: the address can be reached from elsewhere and there is no token.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        model: ServedModel,
        settings: ServeSettings | None = None,
        *,
        sessions_only: bool = False,
    ) -> None:
        self._settings = settings or ServeSettings()
        token = secrets.token_urlsafe(32) if sessions_only else read_token(self._settings)
        self._endpoint = Endpoint(engine, tokenizer, model, self._settings, token)
        self._uvicorn: _Uvicorn
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    @property
    def sessions(self) -> Sessions:
        """Sessions of agents: see `Sessions.open`."""
        return self._endpoint.sessions

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen. From then on `url` is the address, without /v1.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listener = _listen(self._settings.host, self._settings.port)
        host, port = listener.getsockname()[:2]
        self._uvicorn = _Uvicorn(self._uvicorn_config())
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]), name="offbeat-serve")
        started = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait({started, self._serving}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            self._serving.result()
        if not self._uvicorn.listening.is_set():
            raise DeadlineError("serve.start", "the HTTP server to listen", START_DEADLINE_S)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Let nobody in, answer who is waiting with what there is, and stop. Closing twice is fine."""
        if self._serving is None or self._serving.done():
            return
        await self._endpoint.generation.close()
        self._uvicorn.should_exit = True
        deadline_s = 2 * self._settings.close_deadline_s + 1  # uvicorn's own, then its tasks' ends
        _, late = await asyncio.wait({self._serving}, timeout=deadline_s)
        if late:
            _log.warning("the HTTP server did not stop within %g s and is left behind", deadline_s)
            self._serving.cancel()

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._endpoint.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,  # whoever runs the server owns its logs
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(self._settings.close_deadline_s),
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn in somebody else's event loop: it says when it listens, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another") from error
    return listener
