"""The endpoint on a socket, in the event loop that owns the engine."""

import secrets
from types import TracebackType
from typing import Self

from offbeat_core import ConfigError, RolloutEngine
from offbeat_data import Tokenizer
from offbeat_http import ConnectionLimits, HttpServer, listen
from offbeat_serve._endpoint import Endpoint
from offbeat_serve._sessions import Sessions
from offbeat_serve._settings import ServedModel, ServeSettings, read_token


class RolloutServer:
    """Serves one rollout engine over HTTP. Use it in an `async with` block; the engine stays its maker's to close.

    Args:
        engine: started, used from this event loop.
        tokenizer: of the model.
        model: what is served.
        settings: where, how much, how long; loopback by default.
        sessions_only: admit only agents with the key of a session.

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
        self._http: HttpServer | None = None
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
        settings = self._settings
        try:
            listener = listen(settings.host, settings.port)
        except OSError as error:
            where = f"{settings.host}, port {settings.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another") from error
        limits = ConnectionLimits(
            max_connections=settings.max_connections,
            head_deadline_s=settings.head_deadline_s,
            send_deadline_s=settings.send_deadline_s,
        )
        close_deadline_s = settings.close_deadline_s
        self._http = HttpServer(self._endpoint.app, listener, limits=limits, close_deadline_s=close_deadline_s)
        await self._http.start()
        self.url = self._http.url

    async def close(self) -> None:
        """Admit no more clients, answer those that wait with what has been sampled, and stop. Closing twice is fine."""
        if self._http:
            await self._endpoint.generation.close()
            await self._http.close()
            self._endpoint.encoder.close()
