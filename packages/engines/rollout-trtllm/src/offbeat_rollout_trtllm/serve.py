"""Serves one replica over HTTP, in TensorRT-LLM's environment: `python -m offbeat_rollout_trtllm.serve MODEL`.

It listens on loopback by default, and elsewhere only with a token: TensorRT-LLM 1.2 authenticates no client before it
loads weights, which come as a pickle.

TensorRT-LLM's own HTTP application is served, with the routes that a rollout needs and it lacks. TensorRT-LLM 1.2 takes
log-probabilities in /v1/completions and gives none back, cannot say whether a model loads in parts, and keeps serving
while an update is half done.
"""

import argparse
import asyncio
import hmac
import ipaddress
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from offbeat_core import ConfigError, OffbeatError, RolloutEngineConfig
from offbeat_rollout_trtllm._images import PromptImages
from offbeat_rollout_trtllm._local_link import LocalLink
from offbeat_rollout_trtllm._options import TrtllmOptions
from offbeat_rollout_trtllm._server_link import TOKEN_VARIABLE
from offbeat_rollout_trtllm._versions import import_engine

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Inner = Callable[[Message, Receive, Send], Awaitable[None]]


class RolloutApp:
    """An ASGI application over an engine of this process.

    Args:
        link: the engine.
        inner: TensorRT-LLM's application, `OpenAIServer.app`.
        token: every request must bring it (`Authorization: Bearer ...`); empty: no client is asked.
    """

    def __init__(self, link: LocalLink, inner: Inner, *, token: str = "") -> None:
        self._link, self._inner = link, inner
        self._expected = f"Bearer {token}".encode() if token else b""
        self._answers: dict[tuple[str, str], Callable[[Any], Awaitable[Any]]] = {
            ("GET", "/offbeat/version"): lambda _: _named("version", link.served_version()),
            ("GET", "/offbeat/devices"): lambda _: _named("device_ids", link.device_ids()),
            ("GET", "/offbeat/partial_loading"): lambda _: _named("supported", link.supports_partial_loading()),
            ("GET", "/offbeat/weight_arrivals"): lambda _: _named("arrivals", link.weight_arrivals()),
            ("POST", "/offbeat/abort"): lambda body: link.abort(body["sample_id"]),
            ("POST", "/offbeat/begin_weights"): lambda _: link.begin_weights(),
            ("POST", "/offbeat/finish_weights"): lambda body: link.finish_weights(int(body["version"])),
            ("POST", "/offbeat/reset_prefix_cache"): lambda _: link.reset_prefix_cache(),
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
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the caller is sent the error
            return 500, {"error": f"{type(error).__name__}: {error}"}

    async def _generate(self, body: Any) -> AsyncGenerator[Any, None]:
        """Return a line for each delta, or one that says why there is none."""
        try:
            images = PromptImages.from_wire(body["images"]) if "images" in body else None
            stream = self._link.stream(body["sample_id"], body["prompt_ids"], body["params"], images)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield {"delta": list(delta)}
        except OffbeatError as error:
            yield {"error": str(error), "kind": type(error).__name__}


async def _named(name: str, value: Awaitable[Any]) -> Any:
    return {name: await value}


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


async def serve(config: RolloutEngineConfig, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Start the engine and serve it until the process is asked to end."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from elsewhere, and any client that reaches it can load weights: set "
            f"{TOKEN_VARIABLE} to a secret, for the server and its clients, or listen on 127.0.0.1"
        )
    link = await LocalLink.start(config, TrtllmOptions.parse(config.options))
    openai_server: Any = import_engine("tensorrt_llm.serve").OpenAIServer
    # The first parameter is called llm in some releases and generator in others.
    inner = openai_server(
        link.llm, model=config.model_path, tool_parser=None, server_role=None, metadata_server_cfg=None
    )
    uvicorn: Any = import_engine("uvicorn")  # TensorRT-LLM's own server runs on it
    settings = uvicorn.Config(
        RolloutApp(link, inner.app, token=token), host=host, port=port, log_level="info", timeout_keep_alive=10
    )
    await uvicorn.Server(settings).serve()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve one replica of a model with TensorRT-LLM for rollouts.")
    parser.add_argument("model", help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the replica")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the engine, as JSON")
    words = parser.parse_args()
    config = RolloutEngineConfig(
        model_path=words.model, dtype=words.dtype, tensor_parallel=words.tensor_parallel, options=words.options
    )
    asyncio.run(serve(config, host=words.host, port=words.port))


if __name__ == "__main__":
    main()
