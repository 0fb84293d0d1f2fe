"""Who may ask: anybody on this machine, or whoever brings the token.

Without a token only requests that name this machine are answered, because another site may have its own name lead here
(DNS rebinding) and have a browser ask in its place.
"""

import hmac
import ipaddress
import os
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers

from offbeat_serve._refusals import RefusedError
from offbeat_serve._settings import ServeSettings
from offbeat_types import ConfigError

TOKEN_VARIABLE: Final = "OFFBEAT_SERVE_TOKEN"
"""Environment variable that holds the secret of server and clients."""
MIN_TOKEN_CHARS: Final = 16


def read_token(settings: ServeSettings) -> str:
    """The token that every request must bring; empty where none is asked for.

    Raises:
        ConfigError: the address can be reached from elsewhere and there is no token; the file cannot be read; the token
            is too short, or holds what no header can.
    """
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Access:
    """Lets requests through, or not.

    Args:
        token: that every request must bring (`Authorization: Bearer ...`); empty: only this machine's names are known.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    @property
    def needs_token(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._expected)

    def check(self, headers: Headers) -> None:
        """Let a request through.

        Raises:
            RefusedError: its token is missing or wrong; or there is no token, and it does not name this machine.
        """
        if self._expected:
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._expected):
                message = "this server needs its token, as in Authorization: Bearer TOKEN; the one given is not it"
                challenge = {"WWW-Authenticate": "Bearer"}
                raise RefusedError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=challenge)
        elif not is_loopback(_host_name(headers.get("host", ""))):
            message = (
                "without a token this server answers to 127.0.0.1, ::1 and localhost only, and Host says otherwise"
            )
            raise RefusedError(HTTPStatus.FORBIDDEN, message, code="wrong_host")


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
