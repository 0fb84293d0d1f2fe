"""Errors as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` and a status.

Source: https://platform.openai.com/docs/guides/error-codes/api-errors
"""

import logging
from http import HTTPStatus
from typing import Final

import msgspec

from offbeat_types import DeadlineError, OffbeatError, PeerFailedError, UserError, WeightSyncError

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
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


def error_answer(refusal: RefusedError) -> ErrorAnswer:
    """The body that goes with a refusal."""
    server_error = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _TYPES.get(refusal.status, "server_error" if server_error else "invalid_request_error")
    return ErrorAnswer(error=ErrorDetail(message=refusal.message, type=kind, param=refusal.param, code=refusal.code))


def refusal_of(error: Exception) -> RefusedError:
    """The refusal that tells a client of an error. What nobody expected goes to the log, and not to the client."""
    match error:
        case RefusedError():
            return error
        case UserError():
            return RefusedError(HTTPStatus.BAD_REQUEST, str(error))
        case DeadlineError():
            return RefusedError(HTTPStatus.GATEWAY_TIMEOUT, str(error), code="deadline")
        case WeightSyncError() | PeerFailedError():
            return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_unusable")
        case OffbeatError():
            return RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    _log.error("a request failed in a way nobody expected", exc_info=error)
    return RefusedError(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"unexpected {type(error).__name__}; the server's log says more"
    )
