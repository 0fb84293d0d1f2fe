"""An engine in another process, behind `RolloutApp`: JSON in and out, and lines as they come.

Every wait has a deadline and a name. Requests are HTTP/1.0: the server ends the body by closing the connection, which
is all the framing there is to read.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from offbeat_core import ConfigError, DataError, DeadlineError, PeerFailedError, WeightSyncError
from offbeat_liveness import waiting
from offbeat_rollout_trtllm._images import PromptImages
from offbeat_rollout_trtllm._local_link import Delta, LocalLink

TOKEN_VARIABLE: Final = "OFFBEAT_TRTLLM_TOKEN"
"""Environment variable that holds the secret of server and clients; unset where the server listens on loopback."""

DATA_ERROR: Final = DataError.__name__
"""Kind of an error in the answer: the prompt is wrong, and the engine is well."""

MAX_LINE_BYTES: Final = 1 << 20
MAX_ERROR_CHARS: Final = 400


class HttpEngine:
    def __init__(self, address: str, *, deadline_s: float) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"an engine server's address is host:port, got {address!r}")
        self.address, self.deadline_s = address, deadline_s
        self._host, self._port = host.strip("[]"), int(port)

    @property
    def label(self) -> str:
        return f"the TensorRT-LLM server {self.address}"

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the JSON it is answered with; None for an empty answer."""
        async with self._named(f"{method} {path}"):
            reader, writer = await self._open(method, path, body)
            try:
                content = await reader.read()
            finally:
                writer.close()
        return json.loads(content) if content.strip() else None

    async def lines(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Send a POST, and yield the JSON of each line of the answer as it comes."""
        name = f"POST {path}"
        async with self._named(name):
            reader, writer = await self._open("POST", path, body)
        try:
            while True:
                async with self._named(name):
                    line = await reader.readline()
                if not line:
                    return
                yield json.loads(line)
        finally:
            writer.close()

    @asynccontextmanager
    async def _named(self, name: str) -> AsyncIterator[None]:
        """A wait on this server: declared, ended at its deadline, its failures typed."""
        try:
            with waiting(name, on=self.label, deadline_s=self.deadline_s):
                async with asyncio.timeout(self.deadline_s):
                    yield
        except TimeoutError as error:
            raise DeadlineError(
                name, self.label, self.deadline_s, "see the server's log, or raise call_deadline_s"
            ) from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise PeerFailedError(self.label, f"{name}: {type(error).__name__}: {error}") from error

    async def _open(self, method: str, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.0\r\nHost: {self.address}\r\nContent-Length: {len(content)}\r\n"
            if token := os.environ.get(TOKEN_VARIABLE):
                head += f"Authorization: Bearer {token}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            await writer.drain()
            await self._take_head(reader, f"{method} {path}")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _take_head(self, reader: asyncio.StreamReader, name: str) -> None:
        status = (await reader.readline()).split(maxsplit=2)
        if len(status) < 2:
            raise ConnectionResetError("the connection ended before an answer came")
        while (await reader.readline()).strip():
            pass
        if not status[1].startswith(b"2"):
            text = (await reader.read()).decode(errors="replace")[:MAX_ERROR_CHARS]
            raise PeerFailedError(self.label, f"{name} was refused with {status[1].decode()}: {text}")


class ServerLink:
    """The same as `LocalLink`, over HTTP."""

    def __init__(self, address: str, *, deadline_s: float) -> None:
        self._engine = HttpEngine(address, deadline_s=deadline_s)

    @property
    def label(self) -> str:
        return self._engine.label

    async def version_of_engine(self) -> str:
        return str((await self._get("/version"))["version"])

    async def served_version(self) -> int | None:
        version: int | None = (await self._get("/offbeat/version"))["version"]
        return version

    async def device_ids(self) -> list[str]:
        return list((await self._get("/offbeat/devices"))["device_ids"])

    async def stream(
        self, sample_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any], images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        body: dict[str, Any] = {"sample_id": sample_id, "prompt_ids": list(prompt_ids), "params": dict(params)}
        if images is not None:
            body["images"] = images.to_wire()
        async with aclosing(self._engine.lines("/offbeat/generate", body)) as lines:
            async for line in lines:
                if "error" in line:
                    kind = DataError if line.get("kind") == DATA_ERROR else WeightSyncError
                    raise kind(f"{self.label}: {line['error']}")
                delta = Delta(*line["delta"])
                yield delta
                if delta.ended:
                    return
        raise PeerFailedError(self.label, f"its answer ended before the sample {sample_id} did")

    async def abort(self, sample_id: str) -> None:
        await self._post("/offbeat/abort", {"sample_id": sample_id})

    async def supports_partial_loading(self) -> bool:
        return bool((await self._get("/offbeat/partial_loading"))["supported"])

    async def begin_weights(self) -> None:
        await self._post("/offbeat/begin_weights")

    async def update_weights(self, handles: Mapping[str, str]) -> None:
        await self._post("/update_weights", {"weights": dict(handles)})

    async def weight_arrivals(self) -> dict[str, list[str]]:
        return dict((await self._get("/offbeat/weight_arrivals"))["arrivals"])

    async def finish_weights(self, version: int) -> None:
        await self._post("/offbeat/finish_weights", {"version": version})

    async def release(self, tags: Sequence[str]) -> None:
        await self._post("/release_memory", {"tags": list(tags)})

    async def resume(self, tags: Sequence[str]) -> None:
        await self._post("/resume_memory", {"tags": list(tags)})

    async def reset_prefix_cache(self) -> None:
        await self._post("/offbeat/reset_prefix_cache")

    async def close(self) -> None:
        """Let go: the process that started the server ends it."""

    async def _get(self, path: str) -> Any:
        return await self._engine.call("GET", path)

    async def _post(self, path: str, body: Any = None) -> None:
        await self._engine.call("POST", path, body)


EngineLink = LocalLink | ServerLink


class EngineControl:
    """The control routes of one replica's server, for ranks of a trainer, which have no event loop.

    Nothing is sent before the first call, so every rank may hold one while its leader alone calls it.

    Args:
        address: host:port.
        deadline_s: for each answer.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, *, deadline_s: float = 300.0) -> None:
        self._link = ServerLink(address, deadline_s=deadline_s)
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return self._link.label

    def version(self) -> str:
        """TensorRT-LLM's version."""
        return asyncio.run(self._link.version_of_engine())

    def supports_partial_loading(self) -> bool:
        """Return whether the engine can load some of the model's tensors at a time."""
        return asyncio.run(self._link.supports_partial_loading())

    def begin_weights(self) -> None:
        """Stop serving: from here to `finish_weights` the engine holds a mixture."""
        asyncio.run(self._link.begin_weights())

    def update_weights(self, handles: Mapping[str, str]) -> None:
        """Load tensors.

        Args:
            handles: for each device of the replica what `HandleFormat.pack` made.
        """
        asyncio.run(self._link.update_weights(handles))

    def weight_arrivals(self) -> dict[str, list[str]]:
        """Return, for each device, a checksum of each flush since `begin_weights`, as its worker opened it."""
        return asyncio.run(self._link.weight_arrivals())

    def finish_weights(self, version: int) -> None:
        """Make the weights ready, forget cached keys and values, and serve `version`."""
        asyncio.run(self._link.finish_weights(version))

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back."""
        asyncio.run(self._link.release(tags))

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again."""
        asyncio.run(self._link.resume(tags))
