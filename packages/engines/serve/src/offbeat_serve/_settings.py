"""Settings of the server: what it serves, which clients may ask, and how it refuses.

Errors are as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` and a status.
Without a token only requests that name this machine are answered, because another site may have its own name lead here
(DNS rebinding) and have a browser ask in its place.

Source: https://platform.openai.com/docs/guides/error-codes/api-errors
"""

import hmac
import logging
import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import msgspec
from starlette.datastructures import Headers

from offbeat_core import (
    ConfigError,
    DeadlineError,
    ModelError,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    UserError,
    WeightSyncError,
    read_model_json,
    setting,
)
from offbeat_http import is_loopback


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, bounds and deadlines of the endpoint.

    Raises:
        ConfigError: one request may ask for more samples than may be in flight.
    """

    host: str = setting("127.0.0.1", "Address to listen on; any but loopback needs a token.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    public_url: str = setting(
        "",
        "Base URL that offered sessions name, such as https://policy.example/v1, where a proxy or a tunnel is in "
        "front; empty: the address that the agent has connected to.",
    )
    token_file: str = setting("", "File that holds the token; empty: OFFBEAT_SERVE_TOKEN where it is set.")
    max_in_flight: int = setting(1024, "Samples asked for and not answered yet; more get a 429.", "samples", ge=1)
    max_prompts: int = setting(16, "Prompts of one request at most.", "prompts", ge=1)
    max_samples: int = setting(64, "n: samples of one prompt at most.", "samples", ge=1)
    max_connections: int = setting(
        1024,
        "Connections at once, and never more than half the descriptors of the process; for a new one the oldest that "
        "is idle is closed.",
        "connections",
        ge=1,
    )
    max_encoding: int = setting(
        256, "Requests whose prompts are being encoded or wait for that; more get a 429.", "requests", ge=1
    )
    max_body_bytes: int = setting(4 * 2**20, "Longer request bodies get a 413.", "bytes", ge=1024)
    default_max_tokens: int = setting(
        0, "Longest completion where a request names none; 0: 16, and for a chat all that fits.", "tokens", ge=0
    )
    start_deadline_s: float = setting(600.0, "Longest wait of the command for the engine to load the model.", "s", gt=0)
    head_deadline_s: float = setting(2.0, "Longest wait for a request's head.", "s", gt=0)
    body_deadline_s: float = setting(30.0, "Longest wait for a request's body.", "s", gt=0)
    send_deadline_s: float = setting(60.0, "Longest wait for a client to take what it is sent.", "s", gt=0)
    generate_deadline_s: float = setting(600.0, "Longest wait for the engine to finish a request.", "s", gt=0)
    abort_deadline_s: float = setting(10.0, "Longest wait for the engine to end a request.", "s", gt=0)
    health_deadline_s: float = setting(10.0, "Longest wait for the engine to say how it is.", "s", gt=0)
    close_deadline_s: float = setting(10.0, "Time for requests in flight to end when the server closes.", "s", gt=0)

    def __post_init__(self) -> None:
        if self.max_prompts * self.max_samples > self.max_in_flight:
            raise ConfigError(
                f"max_prompts times max_samples, what one request may ask for, must be at most max_in_flight: "
                f"got {self.max_prompts} times {self.max_samples}, and {self.max_in_flight}"
            )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model behind the endpoint.

    Args:
        name: what clients call it.
        max_model_len: prompt and completion together at most, tokens.
        vocab_size: ids are below this; it may be more than the tokenizer has.
        adapter: LoRA adapter of the engine with which every request is sampled; empty: none.
    """

    name: str
    max_model_len: int
    vocab_size: int
    adapter: str = ""

    @classmethod
    def read(cls, config: RolloutEngineConfig, name: str = "") -> Self:
        """Read the model folder of an engine.

        Args:
            config: the engine's.
            name: what clients call the model; empty: the folder's name.

        Raises:
            ModelError: config.json is missing or corrupt, or names no vocabulary.
        """
        folder = Path(config.model_path).expanduser()
        outer = read_model_json(folder / "config.json")
        inner = outer.get("text_config")
        text = {**outer, **inner} if isinstance(inner, dict) else outer
        vocab_size, positions = text.get("vocab_size"), text.get("max_position_embeddings")
        if not isinstance(vocab_size, int):
            raise ModelError(f"{folder / 'config.json'} needs vocab_size, an integer: got {vocab_size!r}")
        limits = [config.max_model_len, *([positions] if isinstance(positions, int) else [])]
        return cls(name=name or folder.resolve().name, max_model_len=min(limits), vocab_size=vocab_size)


RETRY_LATER: Final = {"Retry-After": "1"}
"""Header of a refusal that need not last; in seconds."""
_log = logging.getLogger(__name__)
_TYPES: Final = {HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}


class RefusedError(OffbeatError):
    """A request that is not answered, and why.

    Args:
        status: HTTP's.
        message: one sentence: what was required, what was got, what to do.
        param: field of the request that is wrong, such as "messages[0].role".
        code: for programs, such as "model_not_found".
        headers: sent along.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}


class ErrorDetail(msgspec.Struct, kw_only=True):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


_MAX_MESSAGE_CHARS: Final = 1000
"""Longest refusal: it repeats what a client has sent, and an unknown name may have megabytes."""


def error_answer(refusal: RefusedError) -> ErrorAnswer:
    message, param = refusal.message, refusal.param
    if len(message) > _MAX_MESSAGE_CHARS:
        message = f"{message[: _MAX_MESSAGE_CHARS // 2]} … {message[-_MAX_MESSAGE_CHARS // 2 :]}"
    if param is not None:
        param = param[:_MAX_MESSAGE_CHARS]
    server_error = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _TYPES.get(refusal.status, "server_error" if server_error else "invalid_request_error")
    return ErrorAnswer(error=ErrorDetail(message=message, type=kind, param=param, code=refusal.code))


def refusal_of(error: Exception) -> RefusedError:
    """Return the refusal that reports an error to a client. An unexpected one goes to the log, not to the client."""
    match error:
        case RefusedError():
            return error
        case UserError():
            return RefusedError(HTTPStatus.BAD_REQUEST, str(error))
        case RecursionError():
            message = "the request is nested too deep: its tools, calls or chat_template_kwargs; send flatter ones"
            return RefusedError(HTTPStatus.BAD_REQUEST, message)
        case DeadlineError():
            return RefusedError(HTTPStatus.GATEWAY_TIMEOUT, str(error), code="deadline")
        case WeightSyncError() | PeerFailedError():
            return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_unusable")
        case OffbeatError():
            return RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    _log.error("a request failed with an unexpected error", exc_info=error)
    return RefusedError(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"unexpected {type(error).__name__}; the server's log says more"
    )


TOKEN_VARIABLE: Final = "OFFBEAT_SERVE_TOKEN"
"""Environment variable that holds the secret of server and clients."""
MIN_TOKEN_CHARS: Final = 16


def read_token(settings: ServeSettings) -> str:
    """Return the token that every request must bring; empty where none is asked for."""
    token = (
        _from_file(Path(settings.token_file).expanduser()) if settings.token_file else os.environ.get(TOKEN_VARIABLE)
    )
    if not token:
        if not settings.token_file and is_loopback(settings.host):
            return ""
        raise ConfigError(
            f"{settings.host} with {settings.token_file or f'no {TOKEN_VARIABLE}'}: a server that can be reached from "
            f"elsewhere needs a token; put one of {MIN_TOKEN_CHARS} characters or more into {TOKEN_VARIABLE} or into a "
            "file, or listen on 127.0.0.1"
        )
    if len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"the token needs {MIN_TOKEN_CHARS} printable ASCII characters or more, without blanks: got {len(token)} "
            "characters that do not fit"
        )
    return token


def _from_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from error


def check_access(headers: Headers, token: str) -> None:
    """Let a request through.

    Args:
        headers: of the request.
        token: that it must bring (`Authorization: Bearer ...`); empty: only this machine's names are known.
    """
    if token:
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            message = "this server needs its token, as in Authorization: Bearer TOKEN; the one given is not it"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RefusedError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=challenge)
        return
    host = headers.get("host", "")
    if not is_loopback(host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]):
        message = "without a token this server answers to 127.0.0.1, ::1 and localhost only, and Host says otherwise"
        raise RefusedError(HTTPStatus.FORBIDDEN, message, code="wrong_host")
