"""What the tests of the embedded engine share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat_core import RolloutEngineConfig
from offbeat_rollout_torch import TorchRolloutEngine

OpenEngine = Callable[..., AbstractAsyncContextManager[TorchRolloutEngine]]


@pytest.fixture
def open_engine() -> OpenEngine:
    """An engine of the model in a folder, for a block of at most 90 s."""

    @asynccontextmanager
    async def opened(folder: Path, **settings: Any) -> AsyncIterator[TorchRolloutEngine]:
        settings = {"max_model_len": 512, **settings}
        config = RolloutEngineConfig(model_path=str(folder), device="cpu", **settings)
        async with asyncio.timeout(90):
            engine = await TorchRolloutEngine.create(config)
            try:
                yield engine
            finally:
                await engine.close()

    return opened


@pytest.fixture
def run(open_engine: OpenEngine) -> Callable[..., Awaitable[Any]]:
    """What `use(engine)` gives on an engine of its own."""

    async def run(folder: Path, use: Callable[[TorchRolloutEngine], Awaitable[Any]], **settings: Any) -> Any:
        async with open_engine(folder, **settings) as engine:
            return await use(engine)

    return run
