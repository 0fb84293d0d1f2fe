"""The ASGI application: access, what is asked, the samples, and the answer, or an error where there is none."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from offbeat_core import (
    Completion,
    DeadlineError,
    EngineHealth,
    GenerateRequest,
    Ids,
    OffbeatError,
    RolloutEngine,
    SamplingParams,
    StreamingEngine,
)
from offbeat_data import Tokenizer
from offbeat_serve._answers import Answerer, HealthAnswer, ModelCard, ModelList, Sampled
from offbeat_serve._encoding import CONTEXT_EXCEEDED, PromptEncoder
from offbeat_serve._openapi import describe
from offbeat_serve._requests import (
    COMPLETION_TOKENS,
    SamplingRequest,
    bounded_types,
    chat_prompt,
    completion_prompts,
    read_json,
)
from offbeat_serve._session_routes import bearer, end_session, gone_or_over, offer_session, session_of
from offbeat_serve._sessions import Sessions
from offbeat_serve._settings import (
    RETRY_LATER,
    RefusedError,
    ServedModel,
    ServeSettings,
    check_access,
    error_answer,
    refusal_of,
)
from offbeat_serve._stream import KEEP_ALIVE, AnswerStream, MakeAnswer, error_event

_log = logging.getLogger(__name__)


class ClientGoneError(OffbeatError):
    """The client has left, so its answer would not be read."""


class Generation:
    """Samples for clients, as much at once as is allowed, and never longer than is allowed."""

    def __init__(self, engine: RolloutEngine, settings: ServeSettings) -> None:
        self._engine, self._settings = engine, settings
        self._num_in_flight = 0
        self._request_ids: set[str] = set()
        self._closing = False

    async def health(self) -> EngineHealth:
        deadline_s = self._settings.health_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._engine.health()
        except TimeoutError:
            raise DeadlineError("health", "the rollout engine", deadline_s) from None

    @contextlib.contextmanager
    def admitted(self, num_samples: int) -> Iterator[None]:
        limit = self._settings.max_in_flight
        if self._closing:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is closing", code="closing")
        if self._num_in_flight + num_samples > limit:
            message = (
                f"{self._num_in_flight} samples are in flight, and {limit} may be (max_in_flight): "
                f"there is no room for {num_samples} more now, try again"
            )
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_samples", headers=RETRY_LATER)
        self._num_in_flight += num_samples
        try:
            yield
        finally:
            self._num_in_flight -= num_samples

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        gone: Callable[[], Awaitable[None]],
        notify: Callable[[int, int, int, float], None] | None = None,
    ) -> list[list[Completion]]:
        """Complete every prompt. Whatever ends the wait, the engine then aborts what it still does for it."""
        if notify is not None and isinstance(self._engine, StreamingEngine):
            streams = [self._engine.stream(request, partial(notify, at)) for at, request in enumerate(requests)]
            work = [asyncio.ensure_future(stream) for stream in streams]
        else:
            work = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        done, leaving = asyncio.gather(*work), asyncio.ensure_future(gone())
        done.add_done_callback(retrieve_exception)
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


def retrieve_exception(outcome: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, so that asyncio does not warn about it if no task awaits the outcome any more."""
    if not outcome.cancelled():
        outcome.exception()


T = TypeVar("T", bound=SamplingRequest)
Encoded = TypeVar("Encoded")
Handler = Callable[[Request], Awaitable[Response]]
VERSION_HEADER: Final = "X-Policy-Version"
"""Header of answers: the policy version that is served now."""
REFUSAL_S: Final = 0.2
"""Time for an engine to refuse what is to be streamed; after that its refusal is a part of the stream."""
KEEP_ALIVE_S: Final = 10.0
"""A stream says after so long without a token that it is alive, for clients and proxies that time silence."""


class Endpoint:
    """OpenAI's completions and chats over any rollout engine. `app` is the ASGI application.

    Attributes:
        encoder: of prompts.
        sessions: requests that bring the key of one are its agent's: sampled as the session says, and recorded.
    """

    def __init__(
        self, engine: RolloutEngine, tokenizer: Tokenizer, model: ServedModel, settings: ServeSettings, token: str
    ) -> None:
        self._model, self._settings, self._token = model, settings, token
        self._tokenizer = tokenizer
        self._answerer = Answerer(tokenizer, model.name)
        self.generation = Generation(engine, settings)
        self.encoder = PromptEncoder(tokenizer, model.max_model_len, settings.max_encoding)
        self.sessions = Sessions(tokenizer, model.max_model_len)
        types = bounded_types(model, settings)
        self._completion_decoder = msgspec.json.Decoder(types.completion)
        self._chat_decoder = msgspec.json.Decoder(types.chat)
        template = tokenizer.chat_template
        reads_tools = template is not None and "tools" in template.variables
        self._description = describe(model, settings, types, reads_tools=reads_tools, needs_token=bool(token))
        self._created = int(time.time())
        self.app = self._build_app()

    def _build_app(self) -> Starlette:
        routes = [
            ("/health", self._health, "GET"),
            ("/v1/models", self._models, "GET"),
            ("/v1/completions", self._complete, "POST"),
            ("/v1/chat/completions", self._chat, "POST"),
            ("/v1/sessions", self._offer_session, "POST"),
            ("/v1/sessions/end", self._end_session, "POST"),
            ("/openapi.json", self._describe, "GET"),
        ]
        app = Starlette(
            routes=[Route(path, self._answering(handler), methods=[method]) for path, handler, method in routes],
            exception_handlers={HTTPException: self._no_route},
        )
        app.router.redirect_slashes = False
        return app

    # ── around every request ──────────────────────────────────────────────────────────────────────────────────────

    def _answering(self, handler: Handler) -> Handler:
        """Check the client's key, answer, and put every error into OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                self._let_in(request)
                return await handler(request)
            except (ClientDisconnect, ClientGoneError):
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # no client reads it
            except Exception as error:  # noqa: BLE001  the boundary: the client is sent the error
                return _refuse(refusal_of(error))

        return answer

    def _let_in(self, request: Request) -> None:
        """Let in a client that brings the key of a session or that `check_access` admits."""
        request.state.session = self.sessions.find(bearer(request))
        if request.state.session is None:
            check_access(request.headers, self._token)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Starlette's own 404 and 405, which only those may see that may send requests."""
        assert isinstance(error, HTTPException)
        try:
            self._let_in(request)
        except RefusedError as refusal:
            return _refuse(refusal)
        message = f"{request.method} {request.url.path}: {error.detail}; /openapi.json says what there is"
        headers = dict(error.headers or {})
        return _refuse(RefusedError(HTTPStatus(error.status_code), message, headers=headers))

    # ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _health(self, _: Request) -> Response:
        health = await self.generation.health()
        counters = asdict(health)
        return _json(HealthAnswer(policy_version=counters.pop("version"), **counters), health.version)

    async def _models(self, _: Request) -> Response:
        version = (await self.generation.health()).version
        card = ModelCard(
            id=self._model.name,
            created=self._created,
            policy_version=version,
            max_model_len=self._model.max_model_len,
        )
        return _json(ModelList(data=[card]), version)

    async def _describe(self, _: Request) -> Response:
        return _json(self._description, (await self.generation.health()).version)

    async def _offer_session(self, request: Request) -> Response:
        return offer_session(request, self.sessions, self._settings.public_url)

    async def _end_session(self, request: Request) -> Response:
        return await end_session(request, session_of(request), self._settings, self.encoder.run)

    async def _complete(self, request: Request) -> Response:
        body = await self._read(request, self._completion_decoder)
        asked = body.prompts(self._settings.max_prompts)
        prompts = await self._encode(request, asked, partial(completion_prompts, body, self._tokenizer, asked))
        request_id = f"cmpl-{uuid4().hex}"
        requests = self._requests(request, request_id, body, prompts, body.max_tokens, COMPLETION_TOKENS)
        return await self._answer(request, body, requests, partial(self._answerer.completion, body, request_id))

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, self._chat_decoder)
        body.check(self._tokenizer)
        session = session_of(request)
        make_prompt = session.prompt if session else partial(chat_prompt, tokenizer=self._tokenizer)
        texts = [[body.messages, body.template_options]]
        prompt = await self._encode(request, texts, lambda: make_prompt(body))
        request_id = f"chatcmpl-{uuid4().hex}"
        max_tokens = body.max_completion_tokens or body.max_tokens
        requests = self._requests(request, request_id, body, [prompt], max_tokens, self._model.max_model_len)
        return await self._answer(request, body, requests, partial(self._answerer.chat, body, request_id))

    # ── what routes share ─────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
        body = await read_json(request, decoder, self._settings, self.encoder.run)
        # Agents have the names of other models in them, and a session has the one that it has.
        if body.model not in (None, self._model.name) and session_of(request) is None:
            message = f"there is no model {body.model!r:.80}: this server has {self._model.name!r}"
            raise RefusedError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return body

    async def _encode(self, request: Request, texts: Sequence[object], encode: Callable[[], Encoded]) -> Encoded:
        """Encode the prompts of a request, unless the text of one of them is too long."""

        def check_and_encode() -> Encoded:
            for text in texts:
                self.encoder.check(text)
            return encode()

        try:
            return await self.encoder.run(check_and_encode)
        except RefusedError as refusal:
            if refusal.code == CONTEXT_EXCEEDED and (session := session_of(request)):
                session.note_refusal([np.array([], np.int32)], "max_tokens")
            raise

    def _requests(
        self,
        asked: Request,
        request_id: str,
        body: SamplingRequest,
        prompts: Sequence[Ids],
        max_tokens: int | None,
        default_max_tokens: int,
    ) -> list[GenerateRequest]:
        wanted, limit = max_tokens or self._settings.default_max_tokens or default_max_tokens, self._model.max_model_len
        session = session_of(asked)
        if session is None:
            body.check_length(limit)
        if (longest := max(map(len, prompts), default=0)) >= limit:
            if session:
                session.note_refusal(prompts, "max_tokens")
            message = f"the prompt has {longest} tokens and the model's context {limit}: one must be left"
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, code=CONTEXT_EXCEEDED)
        if session:
            session.admit(prompts, body.num_samples)

        def params(room: int) -> SamplingParams:
            return session.params(body, min(wanted, room)) if session else body.sampling(min(wanted, room))

        requests = [
            GenerateRequest(
                request_id=f"{request_id}-{number}",
                prompt_ids=prompt,
                num_samples=body.num_samples,
                params=params(limit - len(prompt)),
                adapter=self._model.adapter,
            )
            for number, prompt in enumerate(prompts)
        ]
        for one in requests:
            one.check(self._model.vocab_size, limit)
        return requests

    async def _answer(
        self, request: Request, body: SamplingRequest, requests: Sequence[GenerateRequest], make: MakeAnswer
    ) -> Response:
        """Complete every prompt n times and send the samples, at the end or as they are sampled."""
        if body.stream:
            return await self._stream(request, body, requests, make)
        sampled = await self._sample(request, body, requests)
        version = (await self.generation.health()).version
        return _json(await asyncio.to_thread(make, sampled, version), version)

    async def _sample(
        self,
        request: Request,
        body: SamplingRequest,
        requests: Sequence[GenerateRequest],
        notify: Callable[..., None] | None = None,
    ) -> list[Sampled]:
        session, gone = session_of(request), partial(_gone, request)
        with self.generation.admitted(sum(one.num_samples for one in requests)):
            try:
                left = partial(gone_or_over, gone, session) if session else gone
                completions = await self.generation.generate(requests, left, notify)
            except ClientGoneError:
                if session:
                    session.check_open()  # it may be the session that has ended, and the client waits
                raise
        if session:
            session.record(body, requests, completions)
        return [Sampled(one.prompt_ids, found) for one, found in zip(requests, completions, strict=True)]

    async def _stream(
        self, request: Request, body: SamplingRequest, requests: Sequence[GenerateRequest], make: MakeAnswer
    ) -> Response:
        """Begin to answer. What is refused at once is an answer with that status, as it is without a stream."""
        news: asyncio.Queue[tuple[int, int, int, float] | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._sample(request, body, requests, lambda *token: news.put_nowait(token)))
        work.add_done_callback(retrieve_exception)
        work.add_done_callback(lambda _: news.put_nowait(None))
        try:
            tokens = await _next(news, REFUSAL_S)
            if work.done():
                work.result()
            version = (await self.generation.health()).version
        except BaseException:
            work.cancel()
            raise
        prompts = [one.prompt_ids for one in requests]
        stream = AnswerStream(body, prompts, version, make, self._tokenizer)

        async def events() -> AsyncIterator[bytes]:
            nonlocal tokens
            try:
                yield KEEP_ALIVE
                while tokens or not work.done():
                    for event in stream.deltas(tokens):
                        yield event
                    tokens = await _next(news, KEEP_ALIVE_S)
                    if not tokens:
                        yield KEEP_ALIVE
                sampled = work.result()
                now = (await self.generation.health()).version
                for event in stream.rest(await asyncio.to_thread(make, sampled, now)):
                    yield event
            except ClientGoneError:
                pass  # no client reads it
            except Exception as error:  # noqa: BLE001  the boundary: the client is sent the error
                yield error_event(refusal_of(error))
            finally:
                work.cancel()

        headers = {VERSION_HEADER: str(version), "Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


async def _next(news: "asyncio.Queue[Any]", timeout_s: float) -> list[Any]:
    """Return the tokens that have come, once there is one, the sampling has ended, or it takes too long."""
    found: list[Any] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            found.append(await news.get())
    while not news.empty():
        found.append(news.get_nowait())
    return [token for token in found if token is not None]


async def _gone(request: Request) -> None:
    """Return when the client has left. Its body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, version: int) -> Response:
    headers = {VERSION_HEADER: str(version)}
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


def _refuse(refusal: RefusedError) -> Response:
    body = msgspec.json.encode(error_answer(refusal))
    return Response(body, refusal.status, headers=refusal.headers, media_type="application/json")
