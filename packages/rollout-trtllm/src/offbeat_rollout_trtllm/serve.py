"""The server form: TensorRT-LLM's own HTTP application, with the routes that a rollout needs and it lacks.

TensorRT-LLM 1.2 takes log-probabilities in /v1/completions and gives none back, cannot say whether a model loads in
parts, and goes on serving while an update is half done. This ASGI application stands in front of it: routes under
/offbeat are answered here, /update_weights is noted on its way, everything else passes through.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from offbeat_rollout_trtllm._http import TOKEN_VARIABLE
from offbeat_rollout_trtllm._local_link import LocalLink
from offbeat_types import OffbeatError

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Inner = Callable[[Message, Receive, Send], Awaitable[None]]


class RolloutApp:
    """An ASGI application over an engine of this process.

    Args:
        link: the engine.
        inner: TensorRT-LLM's application, `OpenAIServer.app`.
        token: every request must bring it (`Authorization: Bearer ...`); empty: nobody is asked.
    """

    def __init__(self, link: LocalLink, inner: Inner, *, token: str = "") -> None:
        self._link, self._inner = link, inner
        self._expected = f"Bearer {token}".encode() if token else b""
        self._answers: dict[tuple[str, str], Callable[[Any], Awaitable[Any]]] = {
            ("GET", "/offbeat/version"): self._version,
            ("GET", "/offbeat/devices"): self._devices,
            ("GET", "/offbeat/partial_loading"): self._partial_loading,
            ("GET", "/offbeat/weight_arrivals"): self._weight_arrivals,
            ("POST", "/offbeat/abort"): self._abort,
            ("POST", "/offbeat/begin_weights"): self._begin_weights,
            ("POST", "/offbeat/finish_weights"): self._finish_weights,
            ("POST", "/offbeat/reset_prefix_cache"): self._reset_prefix_cache,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self._expected and scope["type"] != "lifespan":
            given = dict(scope.get("headers", ())).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _send_head(send, 401, b"application/json")
                await send(
                    _part(json.dumps({"error": f"the token of {TOKEN_VARIABLE} is missing or wrong"}), more=False)
                )
                return
        await self._respond(scope, receive, send)

    async def _respond(self, scope: Message, receive: Receive, send: Send) -> None:
        route = (scope.get("method", ""), scope.get("path", ""))
        if route == ("POST", "/offbeat/generate"):
            body = json.loads(await _body(receive))
            await self._stream(body, receive, send)
        elif route in self._answers:
            content = await _body(receive)
            status, answer = await self._answer(route, json.loads(content) if content else {})
            await _send_head(send, status, b"application/json")
            await send(_part(json.dumps(answer), more=False))
        else:
            if route == ("POST", "/update_weights"):
                self._link.loading = True
            await self._inner(scope, receive, send)

    async def _stream(self, body: Any, receive: Receive, send: Send) -> None:
        """Send a line for each delta; a client that goes away ends its sample."""
        leaving = asyncio.create_task(self._abort_when_gone(body["sample_id"], receive))
        try:
            await _send_head(send, 200, b"application/x-ndjson")
            async with aclosing(self._generate(body)) as lines:
                async for line in lines:
                    await send(_part(json.dumps(line) + "\n", more=True))
            await send(_part("", more=False))
        finally:
            leaving.cancel()

    async def _abort_when_gone(self, sample_id: str, receive: Receive) -> None:
        while (await receive()).get("type") != "http.disconnect":
            pass
        await self._link.abort(sample_id)

    async def _answer(self, route: tuple[str, str], body: Any) -> tuple[int, Any]:
        try:
            return 200, await self._answers[route](body)
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the caller hears what happened
            return 500, {"error": f"{type(error).__name__}: {error}"}

    async def _generate(self, body: Any) -> AsyncGenerator[Any, None]:
        """A line for each delta, or one that says why there is none."""
        try:
            stream = self._link.stream(body["sample_id"], body["prompt_ids"], body["params"])
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield {"delta": list(delta)}
        except OffbeatError as error:
            yield {"error": str(error)}

    async def _version(self, _: Any) -> Any:
        return {"version": await self._link.served_version()}

    async def _devices(self, _: Any) -> Any:
        return {"device_ids": await self._link.device_ids()}

    async def _partial_loading(self, _: Any) -> Any:
        return {"supported": await self._link.supports_partial_loading()}

    async def _abort(self, body: Any) -> Any:
        await self._link.abort(body["sample_id"])

    async def _begin_weights(self, _: Any) -> Any:
        await self._link.begin_weights()

    async def _weight_arrivals(self, _: Any) -> Any:
        return {"arrivals": await self._link.weight_arrivals()}

    async def _finish_weights(self, body: Any) -> Any:
        await self._link.finish_weights(int(body["version"]))

    async def _reset_prefix_cache(self, _: Any) -> Any:
        await self._link.reset_prefix_cache()


async def _body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return content


async def _send_head(send: Send, status: int, content_type: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


def _part(text: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}
