"""A tiny model, and the real server over the real embedded engine, in this process, on a free port."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from offbeat_core import RolloutEngine, RolloutEngineConfig
from offbeat_data import load_tokenizer
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_serve import RolloutServer, ServedModel, ServeSettings
from offbeat_testing import FakeWeightStream, changed_weights, reference_model, tiny_model

DEADLINE_S = 60.0


@dataclass
class Served:
    """A server and its clients."""

    server: RolloutServer
    engine: RolloutEngine
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def complete(self, **ask: Any) -> Any:
        """By OpenAI's client."""
        return await self.openai.completions.create(**{"model": "tiny", **ask})

    async def chat(self, **ask: Any) -> Any:
        return await self.openai.chat.completions.create(**{"model": "tiny", **ask})

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def new_weights(model: Path) -> list[tuple[str, Any]]:
    """Those of another policy: log-probabilities under them differ."""
    return changed_weights(reference_model(model), scale=0.2)


@pytest.fixture
def update(new_weights: list[tuple[str, Any]]) -> Callable[[int], FakeWeightStream]:
    """A weight stream of a version."""
    return lambda version: FakeWeightStream(new_weights, version)


@pytest.fixture
def serving(model: Path) -> Serving:
    """Serve a model folder with the embedded engine, or with the engine that is given."""

    @asynccontextmanager
    async def serve(
        folder: Path = model, *, engine: RolloutEngine | None = None, token: str = "", **settings: Any
    ) -> AsyncIterator[Served]:
        config = RolloutEngineConfig(model_path=str(folder), device="cpu", max_model_len=512, num_threads=1)
        served = ServedModel.read(config, "tiny")
        own = None if engine else await TorchRolloutEngine.create(config)
        used = engine or own
        assert used is not None
        settings = {"port": 0, "close_deadline_s": 20.0, **settings}
        async with RolloutServer(used, load_tokenizer(folder), served, ServeSettings(**settings)) as server:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # Reading the machine's certificates takes longer than a test.
            http = httpx.AsyncClient(base_url=server.url, headers=headers, timeout=DEADLINE_S, verify=False)
            client = openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key=token or "none", max_retries=0, http_client=http
            )
            async with client:
                yield Served(server, used, client, http)
        if own:
            await own.close()

    return serve


@pytest_asyncio.fixture
async def served(serving: Serving) -> AsyncIterator[Served]:
    """The tiny model, served by the embedded engine."""
    async with serving() as served:
        yield served
