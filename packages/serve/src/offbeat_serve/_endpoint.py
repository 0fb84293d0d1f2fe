"""The ASGI application: who may ask, what is asked, the answer, and the error where there is none."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from offbeat_data import Tokenizer
from offbeat_serve._access import Access
from offbeat_serve._answering import Answerer, Sampled
from offbeat_serve._answers import HealthAnswer, ModelCard, ModelList
from offbeat_serve._body import read_json
from offbeat_serve._generation import ClientGoneError, Generation, heard
from offbeat_serve._openapi import describe
from offbeat_serve._prompts import Prompter
from offbeat_serve._refusals import RefusedError, error_answer, refusal_of
from offbeat_serve._requests import (
    COMPLETION_TOKENS,
    SamplingRequest,
    bounded_types,
)
from offbeat_serve._settings import ServedModel, ServeSettings
from offbeat_serve._stream import KEEP_ALIVE, AnswerStream, MakeAnswer, error_event
from offbeat_types import GenerateRequest, Ids, RolloutEngine

T = TypeVar("T", bound=SamplingRequest)
Handler = Callable[[Request], Awaitable[Response]]
VERSION_HEADER: Final = "X-Policy-Version"
"""Header of answers: the policy version that is served now."""
REFUSAL_S: Final = 0.2
"""So long an engine may take to refuse what is to be streamed; after that its refusal is a part of the stream."""
KEEP_ALIVE_S: Final = 10.0
"""A stream says after so long without a token that it is alive, for clients and proxies that time silence."""


class Endpoint:
    """OpenAI's completions and chats over any rollout engine. `app` is the ASGI application.

    Args:
        engine: started; used by others too, if they like. Closed by whoever made it.
        tokenizer: of the model.
        model: what is served.
        settings: limits and deadlines.
        access: who may ask.
    """

    def __init__(
        self, engine: RolloutEngine, tokenizer: Tokenizer, model: ServedModel, settings: ServeSettings, access: Access
    ) -> None:
        self._model, self._settings, self._access = model, settings, access
        self._tokenizer = tokenizer
        self._prompter, self._answerer = Prompter(tokenizer, settings.max_prompts), Answerer(tokenizer, model.name)
        self.generation = Generation(engine, settings)
        types = bounded_types(model, settings)
        self._completion_decoder = msgspec.json.Decoder(types.completion)
        self._chat_decoder = msgspec.json.Decoder(types.chat)
        self._description = describe(model, settings, types, needs_token=access.needs_token)
        self._created = int(time.time())
        self.app = self._build_app()

    def _build_app(self) -> Starlette:
        routes = [
            ("/health", self._health, "GET"),
            ("/v1/models", self._models, "GET"),
            ("/v1/completions", self._complete, "POST"),
            ("/v1/chat/completions", self._chat, "POST"),
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
        """Ask who it is, answer, and put every error into OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                self._access.check(request.headers)
                return await handler(request)
            except (ClientDisconnect, ClientGoneError):
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
            except Exception as error:  # noqa: BLE001  the boundary: whoever asked hears what went wrong
                return _refuse(refusal_of(error))

        return answer

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Starlette's own 404 and 405, which only those may see that may ask."""
        assert isinstance(error, HTTPException)
        try:
            self._access.check(request.headers)
        except RefusedError as refusal:
            return _refuse(refusal)
        message = f"{request.method} {request.url.path}: {error.detail}; /openapi.json says what there is"
        headers = dict(error.headers or {})
        return _refuse(RefusedError(HTTPStatus(error.status_code), message, headers=headers))

    # ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _health(self, _: Request) -> Response:
        health = await self.generation.health()
        answer = HealthAnswer(
            policy_version=health.version,
            num_running=health.num_running,
            num_waiting=health.num_waiting,
            num_tokens=health.num_tokens,
            busy_s=health.busy_s,
            uptime_s=health.uptime_s,
        )
        return _json(answer, health.version)

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

    async def _complete(self, request: Request) -> Response:
        body = await self._read(request, self._completion_decoder)
        prompts = await asyncio.to_thread(self._prompter.of_completion, body)
        request_id = f"cmpl-{uuid4().hex}"
        requests = self._requests(request_id, body, prompts, body.max_tokens, COMPLETION_TOKENS)
        return await self._answer(request, body, requests, partial(self._answerer.completion, body, request_id))

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, self._chat_decoder)
        body.check()
        prompt = await asyncio.to_thread(self._prompter.of_chat, body)
        request_id = f"chatcmpl-{uuid4().hex}"
        max_tokens = body.max_completion_tokens or body.max_tokens
        requests = self._requests(request_id, body, [prompt], max_tokens, self._model.max_model_len)
        return await self._answer(request, body, requests, partial(self._answerer.chat, body, request_id))

    # ── what routes share ─────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
        body = await read_json(request, decoder, self._settings)
        if body.model not in (None, self._model.name):
            message = f"there is no model {body.model!r:.80}: this server has {self._model.name!r}"
            raise RefusedError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return body

    def _requests(
        self,
        request_id: str,
        body: SamplingRequest,
        prompts: Sequence[Ids],
        max_tokens: int | None,
        default_max_tokens: int,
    ) -> list[GenerateRequest]:
        """What the engine is asked, a request for each prompt."""
        wanted = max_tokens or self._settings.default_max_tokens or default_max_tokens
        requests = [
            GenerateRequest(
                request_id=f"{request_id}-{number}",
                prompt_ids=prompt,
                num_samples=body.num_samples,
                params=body.sampling(max(min(wanted, self._model.max_model_len - len(prompt)), 1)),
            )
            for number, prompt in enumerate(prompts)
        ]
        for one in requests:
            one.check(self._model.vocab_size, self._model.max_model_len)
        return requests

    async def _answer(
        self, request: Request, body: SamplingRequest, requests: Sequence[GenerateRequest], make: MakeAnswer
    ) -> Response:
        """Complete every prompt n times and tell of it, at the end or all the while."""
        if body.stream:
            return await self._stream(request, body, requests, make)
        sampled = await self._sample(request, requests)
        version = (await self.generation.health()).version
        return _json(await asyncio.to_thread(make, sampled, version), version)

    async def _sample(
        self, request: Request, requests: Sequence[GenerateRequest], tell: Callable[..., None] | None = None
    ) -> list[Sampled]:
        with self.generation.admitted(sum(one.num_samples for one in requests)):
            completions = await self.generation.generate(requests, lambda: _gone(request), tell)
        return [Sampled(one.prompt_ids, found) for one, found in zip(requests, completions, strict=True)]

    async def _stream(
        self, request: Request, body: SamplingRequest, requests: Sequence[GenerateRequest], make: MakeAnswer
    ) -> Response:
        """Begin to answer. What is refused at once is an answer with that status, as it is without a stream."""
        news: asyncio.Queue[tuple[int, int, int, float] | None] = asyncio.Queue()
        work = asyncio.ensure_future(self._sample(request, requests, lambda *token: news.put_nowait(token)))
        work.add_done_callback(heard)
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
                pass  # nobody reads it
            except Exception as error:  # noqa: BLE001  the boundary: whoever asked hears what went wrong
                yield error_event(refusal_of(error))
            finally:
                work.cancel()

        headers = {VERSION_HEADER: str(version), "Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


async def _next(news: "asyncio.Queue[Any]", timeout_s: float) -> list[Any]:
    """The tokens that have come, once there is one, the sampling has ended, or it takes too long."""
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
