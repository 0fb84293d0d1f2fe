"""Requests on their way through the engine: let in, waited for, ended."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from offbeat_serve._refusals import RefusedError
from offbeat_serve._settings import ServeSettings
from offbeat_types import (
    Completion,
    DeadlineError,
    EngineHealth,
    GenerateRequest,
    OffbeatError,
    RolloutEngine,
    StreamingEngine,
)

_RETRY_AFTER_S = 1
_log = logging.getLogger(__name__)


class ClientGoneError(OffbeatError):
    """Whoever asked has left, so nobody hears the answer."""


class Generation:
    """Samples for clients, as much at once as is allowed, and never longer than is allowed.

    Args:
        engine: shared with whoever else uses it; request ids must differ from theirs.
        settings: limits and deadlines.
    """

    def __init__(self, engine: RolloutEngine, settings: ServeSettings) -> None:
        self._engine, self._settings = engine, settings
        self._num_in_flight = 0
        self._request_ids: set[str] = set()
        self._closing = False

    async def health(self) -> EngineHealth:
        """How the engine is.

        Raises:
            DeadlineError: it does not say.
        """
        deadline_s = self._settings.health_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._engine.health()
        except TimeoutError:
            raise DeadlineError("health", "the rollout engine", deadline_s) from None

    @contextlib.contextmanager
    def admitted(self, num_samples: int) -> Iterator[None]:
        """Count samples in flight.

        Raises:
            RefusedError: there are too many, or the server is closing.
        """
        limit = self._settings.max_in_flight
        if self._closing:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is closing", code="closing")
        if self._num_in_flight + num_samples > limit:
            message = (
                f"{self._num_in_flight} samples are in flight, and {limit} may be (max_in_flight): "
                f"there is no room for {num_samples} more now, try again"
            )
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_samples", headers=headers)
        self._num_in_flight += num_samples
        try:
            yield
        finally:
            self._num_in_flight -= num_samples

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        gone: Callable[[], Awaitable[None]],
        tell: Callable[[int, int, int, float], None] | None = None,
    ) -> list[list[Completion]]:
        """Complete every prompt. Whatever ends the wait, the engine is told to end what it still does for it.

        Args:
            requests: one per prompt.
            gone: returns when the client has left.
            tell: called for each token with the number of its prompt and what `TellToken` is, where the engine streams.

        Raises:
            ClientGoneError: the client has left.
            DeadlineError: the engine takes too long.
            OffbeatError: of the engine.
        """
        if tell is not None and isinstance(self._engine, StreamingEngine):
            streams = [self._engine.stream(request, partial(tell, at)) for at, request in enumerate(requests)]
            work = [asyncio.ensure_future(stream) for stream in streams]
        else:
            work = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        done, leaving = asyncio.gather(*work), asyncio.ensure_future(gone())
        done.add_done_callback(heard)
        request_ids = [request.request_id for request in requests]
        self._request_ids.update(request_ids)
        try:
            return await self._first_of(done, leaving)
        finally:
            self._request_ids.difference_update(request_ids)
            leaving.cancel()
            await self._end(request_ids, [task for task in work if not task.done()])

    async def _first_of(
        self, done: "asyncio.Future[list[list[Completion]]]", leaving: "asyncio.Future[None]"
    ) -> list[list[Completion]]:
        deadline_s = self._settings.generate_deadline_s
        ends: set[asyncio.Future[Any]] = {done, leaving}
        await asyncio.wait(ends, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        if leaving.done():
            raise ClientGoneError("the client has left")
        advice = "ask for fewer tokens, or raise generate_deadline_s"
        raise DeadlineError("generate", "the rollout engine to finish the samples", deadline_s, advice)

    async def _end(self, request_ids: Sequence[str], pending: Sequence["asyncio.Future[list[Completion]]"]) -> None:
        """See that nothing of a request is left in the engine. One that is stuck is not waited for longer."""
        if pending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.abort_deadline_s):
                    await asyncio.gather(self._abort(request_ids), *pending, return_exceptions=True)

    async def close(self) -> None:
        """Let nothing more in, and have the engine return what it has: its clients are answered with that."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.abort_deadline_s):
                await self._abort(list(self._request_ids))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        aborts = (self._engine.abort(request_id) for request_id in request_ids)
        for outcome in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.warning("the engine did not end a request: %s", outcome)


def heard(outcome: "asyncio.Future[Any]") -> None:
    """Take note of how it ended, so that asyncio does not complain where nobody waits for it any more."""
    if not outcome.cancelled():
        outcome.exception()
