"""Requests of agents about sessions over HTTP: to be given one, and to end its own, with a reward or without."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from offbeat_data import parts_complaint
from offbeat_serve._requests import InThread, read_json
from offbeat_serve._sessions import Session, Sessions
from offbeat_serve._settings import RefusedError, ServeSettings

JSON: Final = "application/json"


class SessionOffer(msgspec.Struct, kw_only=True):
    """Something to do: answer `row` with the model at `base_url`, whose key is `session_key`, within `deadline_s`.

    `reward_key` ends the session with a reward; empty where no reward is accepted.
    """

    session_key: str
    reward_key: str
    base_url: str
    row: dict[str, Any]
    deadline_s: float


class SessionEnding(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The agent has done what it could; its reward, if it knows one."""

    reward: float | None = None
    parts: dict[str, float] = msgspec.field(default_factory=dict)


class SessionSummary(msgspec.Struct, kw_only=True):
    """A session that is over."""

    num_calls: int


_ENDING: Final = msgspec.json.Decoder(SessionEnding)


def offer_session(request: Request, sessions: Sessions, public_url: str) -> Response:
    """Answer POST /v1/sessions: 204 where nothing waits for an agent."""
    session = sessions.next_offer()
    if session is None:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers={"Retry-After": "1"})
    offer = SessionOffer(
        session_key=session.key,
        base_url=public_url or _bound_url(request),
        reward_key=session.reward_key,
        row=session.plan.row,
        deadline_s=session.plan.deadline_s,
    )
    return Response(msgspec.json.encode(offer), media_type=JSON)


def _bound_url(request: Request) -> str:
    """Return the base URL of the address that the request came to, whatever its Host header says."""
    host, port = request.scope["server"]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


async def end_session(
    request: Request, session: Session | None, settings: ServeSettings, in_thread: InThread[SessionEnding]
) -> Response:
    """Answer POST /v1/sessions/end."""
    if session is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "this call needs the key of a session, as in Authorization: Bearer")
    session.check_open()
    ending = await read_json(request, _ENDING, settings, in_thread)
    if ending.reward is None:
        session.end("call")
    else:
        _check_reward(bearer(request), session, ending)
        session.end("reward", ending.reward, ending.parts)
    return Response(msgspec.json.encode(SessionSummary(num_calls=session.num_calls)), media_type=JSON)


def _check_reward(key: str, session: Session, ending: SessionEnding) -> None:
    if key != session.reward_key:
        advice = "a reward needs the reward key" if session.reward_key else "this session takes no reward"
        raise RefusedError(HTTPStatus.FORBIDDEN, f"this key ends a session without one; {advice}", code="no_reward")
    if complaint := parts_complaint(ending.parts):
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"parts: {complaint}")


def session_of(request: Request) -> Session | None:
    """Return the session that a request belongs to; None without one."""
    found: Session | None = getattr(request.state, "session", None)
    return found


def bearer(request: Request) -> str:
    """Return the key or token of a request; empty without one."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


async def gone_or_over(gone: Callable[[], Awaitable[None]], session: Session) -> None:
    """Return when the client has left, or its session has ended."""
    waits = [asyncio.ensure_future(gone()), asyncio.ensure_future(session.over.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waits, return_exceptions=True)
