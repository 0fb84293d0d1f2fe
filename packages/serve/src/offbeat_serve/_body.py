"""Reads a request's body: as long as is allowed, as slowly as is allowed, JSON of one type."""

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from offbeat_serve._refusals import RefusedError
from offbeat_serve._settings import ServeSettings

T = TypeVar("T")
_AT_FIELD: Final = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(\w+)`")


async def read_json(request: Request, decoder: "msgspec.json.Decoder[T]", settings: ServeSettings) -> T:
    """The body, decoded and checked.

    Raises:
        RefusedError: too long, too slow, of another media type, no JSON, or not of the decoder's type.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site may send a browser here with any other type, without asking first.
        message = f"the body must come with Content-Type: application/json, got {media_type[:80]!r}"
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    return _decode(await _read(request, settings), decoder)


async def _read(request: Request, settings: ServeSettings) -> bytes:
    limit, body = settings.max_body_bytes, bytearray()
    announced = request.headers.get("content-length", "")
    too_long = RefusedError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have {limit} bytes at most (max_body_bytes)"
    )
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise too_long
    try:
        async with asyncio.timeout(settings.body_deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        message = f"the body did not come within {settings.body_deadline_s:g} s (body_deadline_s)"
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, message) from None
    return bytes(body)


def _decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            value: T = msgspec.convert(_with_integers(msgspec.json.decode(body)), decoder.type)
            return value
    except msgspec.ValidationError as error:
        raise _refusal(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error


def _with_integers(value: Any) -> Any:
    """The same with 1.0 as 1: in JSON, and to JSON Schema, they are one number, and to msgspec they are not."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(item) for item in value]
        case dict():
            return {key: _with_integers(item) for key, item in value.items()}
    return value


def _refusal(error: msgspec.ValidationError) -> RefusedError:
    """What msgspec says, and which field it is about."""
    found, unknown = _AT_FIELD.search(str(error)), _UNKNOWN_FIELD.search(str(error))
    param = ".".join(filter(None, (found and found[1], unknown and unknown[1])))
    advice = "; this server does not serve it" if unknown else ""
    return RefusedError(HTTPStatus.BAD_REQUEST, f"{error}{advice}", param=param or None)
