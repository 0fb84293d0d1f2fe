"""An OpenEnv server: what is said in one session with it, the prompts that its tasks make, a look at it before a run.

The package openenv is not needed: it wants mcp 1 and vLLM wants mcp 2, so that one environment cannot hold both. What
the two sides say to each other is JSON over a WebSocket.

Source: https://github.com/huggingface/OpenEnv (0.10.0), openenv/core: env_client.py (`EnvClient`), env_server/types.py
(`WSResetMessage`, `WSStepMessage`, `WSObservationResponse`, `WSErrorResponse`), env_server/http_server.py (`/ws`,
`/schema`).
"""

import asyncio
import ipaddress
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data._sources.rows import Row, as_text, find_column, has_column

OPENENV: Final = "openenv"
"""Column of a row, and field of a prompt: an object whose `reset` holds the arguments of the server's reset."""
DESCRIBE_TIMEOUT_S: Final = 30.0
"""Limit for a server to give its schema before a run begins."""
_DRAW_TIMEOUT_S: Final = 60.0
"""Limit for a server to begin one task while prompts are drawn."""
_CLOSE_TIMEOUT_S: Final = 1.0
"""Limit for a server to confirm the end of a session; after it the connection is cut."""
_NEXT_TRY_S: Final = 0.5
"""Between two tries to get a session from a server that has no place for another."""
_LARGEST_MESSAGE_BYTES: Final = 100 * 2**20  # as in OpenEnv's own client: observations may hold screenshots
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_log = logging.getLogger(__name__)


def import_websockets() -> Any:
    """Return the package.

    Raises:
        BackendError: it is not installed.
    """
    try:
        import_module("websockets.asyncio.client")  # absent before its release 13
        return import_module("websockets")
    except ImportError as error:
        line = 'pip install "offbeat-data[openenv]"'
        raise BackendError(
            f"a server of OpenEnv is asked with the package websockets; install it with: {line}"
        ) from error


class ServerRefusedError(DataError):
    """The server answered with an error.

    Args:
        code: one of OpenEnv's `WSErrorCode`, such as `VALIDATION_ERROR` for an action of another form.
        detail: what it said.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"the OpenEnv server says {self.code}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Answer of a server to reset and to step.

    Args:
        observation: its fields.
        reward: of the last action; None where there is none.
        done: the episode is over.
    """

    observation: dict[str, Any]
    reward: float | None
    done: bool

    def text_of(self, observation_field: str) -> str:
        """Return the field of the observation that the model reads, or a part of one; the whole as JSON without a name.

        Raises:
            DataError: there is no such field.
        """
        found = self.observation
        if not observation_field:
            return as_text({name: value for name, value in found.items() if name != "metadata" or value})
        if not has_column(found, observation_field):
            raise DataError(
                f"observation_field = {observation_field!r} is not in the observation {as_text(found):.200}"
            )
        value = find_column(found, observation_field)
        return "" if value is None else as_text(value)


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer:
    """Address of a server.

    Args:
        url: such as http://127.0.0.1:8000; https, ws and wss are known too.
        token_env: environment variable with the token that it asks for; empty for none.

    Raises:
        ConfigError: url is no such address.
    """

    url: str
    token_env: str = ""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in _SCHEMES or not urlsplit(self.url).hostname:
            raise ConfigError(f"the url of an OpenEnv server is like http://127.0.0.1:8000, got {self.url!r}")

    def describe(self) -> dict[str, Any]:
        """JSON schemas of its actions and observations. Blocks.

        Raises:
            DataError: no server answers, or something else than an OpenEnv server.
            ConfigError: the token is not there.
        """
        address = f"{self._address('http')}/schema"
        opener = build_opener(*([ProxyHandler({})] if self._is_local else []))
        try:
            with opener.open(Request(address, headers=self._headers), timeout=DESCRIBE_TIMEOUT_S) as answer:
                schemas = json.load(answer)
        except (OSError, HTTPException, ValueError) as error:
            raise DataError(f"no OpenEnv server answers at {address}: {error}; start it, or mend its url") from error
        if not isinstance(schemas, dict) or not isinstance(schemas.get("action"), dict):
            raise DataError(f"what answers at {address} is no OpenEnv server: it describes no action")
        return schemas

    async def connect(self) -> Any:
        """Return a WebSocket connection, which is a session of its own on the server. The caller has the deadline.

        Raises:
            DataError: no server answers.
            ConfigError: the token is not there.
        """
        websockets, headers = import_websockets(), self._headers
        try:
            return await websockets.asyncio.client.connect(
                f"{self._address('ws')}/ws",
                additional_headers=headers,
                open_timeout=None,
                ping_interval=None,
                close_timeout=_CLOSE_TIMEOUT_S,
                max_size=_LARGEST_MESSAGE_BYTES,
                **({"proxy": None} if self._is_local else {}),
            )
        except (OSError, websockets.exceptions.WebSocketException) as error:
            raise DataError(f"no OpenEnv server answers at {self.url}: {error}") from error

    @property
    def _headers(self) -> dict[str, str]:
        if not self.token_env:
            return {}
        token = os.environ.get(self.token_env, "")
        if not token:
            raise ConfigError(f"token_env = {self.token_env!r}: there is no such environment variable")
        return {"Authorization": f"Bearer {token}"}

    @property
    def _is_local(self) -> bool:
        """Return whether it is on this machine, where no proxy is asked."""
        host = urlsplit(self.url).hostname or ""
        with suppress(ValueError):
            return ipaddress.ip_address(host).is_loopback
        return host == "localhost"

    def _address(self, kind: str) -> str:
        scheme, _, rest = self.url.partition("://")
        secure = _SCHEMES[scheme.lower()] == "wss"
        return f"{kind}{'s' * secure}://{rest.rstrip('/')}"


class OpenEnvSession:
    """One session: the server keeps an environment for it. Every wait is bounded by the caller."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._connection: Any = None

    async def begin(self, arguments: Mapping[str, Any]) -> StepResult:
        """Connect and reset. A server that has no place for another session is asked again until it has.

        Args:
            arguments: of the environment's reset.

        Raises:
            DataError: no server answers, or it does with an error.
        """
        while True:
            self._connection = await self._server.connect()
            try:
                return await self.ask("reset", arguments)
            except ServerRefusedError as error:
                await self.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                _warn_of_full(self._server.url, error.detail)
            await asyncio.sleep(_NEXT_TRY_S)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> StepResult:
        """Reset or step.

        Raises:
            ServerRefusedError: the server answers with an error.
            DataError: it is gone, or says something else.
        """
        closed = import_websockets().exceptions.ConnectionClosed
        try:
            # A server without a place says so and hangs up, perhaps before it is asked. What it said can still be read.
            with suppress(closed):
                await self._connection.send(json.dumps({"type": kind, "data": dict(data)}))
            # hanglint: ignore[HL061] the deadline is the caller's, `EpisodeHost` or `_draw`
            answer = await self._connection.recv()
        except closed as error:
            raise DataError(f"the OpenEnv server {self._server.url} is gone: {error}") from error
        return _read_answer(answer)

    async def close(self) -> None:
        """End it; the server frees its environment."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(import_websockets().exceptions.ConnectionClosed):
                await connection.send(json.dumps({"type": "close"}))
            await connection.close()


def _read_answer(text: str | bytes) -> StepResult:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"an OpenEnv server answers with JSON, got {text!r:.200}: {error}") from error
    kind, data = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
    if not isinstance(data, dict):
        raise DataError(f"an OpenEnv server answers with objects of type and data, got {answer!r:.200}")
    if kind == "error":
        raise ServerRefusedError(str(data.get("code")), _complaint(data))
    observation, reward = data.get("observation"), data.get("reward")
    if kind != "observation" or not isinstance(observation, dict):
        raise DataError(f"an OpenEnv server answers reset and step with an observation, got {answer!r:.200}")
    if not isinstance(reward, int | float | None):
        raise DataError(f"an OpenEnv server answers with a reward that is a number or null, got {reward!r:.200}")
    return StepResult(
        observation=observation, reward=None if reward is None else float(reward), done=bool(data.get("done"))
    )


def _complaint(data: Mapping[str, Any]) -> str:
    """Return what an error says: its message, and of an action of another form which fields are wrong."""
    wrong = [
        f"{'.'.join(str(part) for part in error.get('loc', ()))}: {error.get('msg')}"
        for error in data.get("errors") or []
        if isinstance(error, dict)
    ]
    return "; ".join(wrong) or str(data.get("message"))


@lru_cache(maxsize=64)
def _warn_of_full(url: str, detail: str) -> None:
    """Once for each server and number of its sessions."""
    _log.warning(
        "the OpenEnv server %s is full, episodes wait: %s; start it with a greater max_concurrent_envs", url, detail
    )


@dataclass(frozen=True, kw_only=True)
class _DrawOptions:
    """`data.task_options` of a path openenv:URL; see `OpenEnvEnvironment` for the names it has, too."""

    reset: dict[str, Any] = field(default_factory=dict)
    observation_field: str = ""
    token_env: str = ""


def draw_tasks(url: str, *, num_items: int, first_seed: int, options: Mapping[str, Any]) -> list[Row]:
    """Begin an episode for each of `num_items` seeds, and take what the server says first as the prompt.

    Args:
        url: of the server.
        num_items: how many.
        first_seed: of them; the others follow it.
        options: `reset`: further arguments of the server's reset; `observation_field`: what of the observation is the
            prompt; `token_env`: see `OpenEnvServer`.

    Returns:
        Rows with the columns `prompt` and `openenv`.

    Raises:
        ConfigError: other options.
        DataError: no server answers, or not in time, or it has no such tasks.
    """
    try:
        settings = _DrawOptions(**options)
    except TypeError as error:
        raise ConfigError(
            f"data.task_options: of openenv:URL they are reset, observation_field, token_env: {error}"
        ) from error
    server = OpenEnvServer(url=url, token_env=settings.token_env)
    import_websockets()
    return asyncio.run(_draw(server, settings, range(first_seed, first_seed + num_items)))


async def _draw(server: OpenEnvServer, settings: _DrawOptions, seeds: range) -> list[Row]:
    session, rows = OpenEnvSession(server), list[Row]()
    try:
        for seed in seeds:
            arguments = {"seed": seed, **settings.reset}
            async with asyncio.timeout(_DRAW_TIMEOUT_S):
                began = await (session.ask("reset", arguments) if rows else session.begin(arguments))
            prompt = began.text_of(settings.observation_field)
            task = {"reset": arguments, "begins": prompt, "observation_field": settings.observation_field}
            rows.append({"prompt": prompt, OPENENV: task})
    except TimeoutError:
        raise DataError(f"the OpenEnv server {server.url} began no task within {_DRAW_TIMEOUT_S:g} s") from None
    finally:
        await session.close()
    return rows
