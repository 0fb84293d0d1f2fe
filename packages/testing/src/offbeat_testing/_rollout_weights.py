"""What every suite of rollout engines stands on: the model, an engine for each test, the yardstick."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_testing._reference import logprob_errors, reference_model
from offbeat_testing._tiny_models import TinyFamily, tiny_model
from offbeat_types import Completion, GenerateRequest, RolloutEngine, RolloutEngineConfig, SamplingParams

PROMPT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)
LONG = 480


def suite_request(request_id: str = "r", *, num_samples: int = 1, **params: Any) -> GenerateRequest:
    """A request of `PROMPT`."""
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 5, **params}
    return GenerateRequest(
        request_id=request_id, prompt_ids=PROMPT, num_samples=num_samples, params=SamplingParams(**params)
    )


def needs(engine: RolloutEngine, mode: Any) -> None:
    """Skip the test where the engine does not declare a pause mode."""
    if mode not in engine.capabilities.pause_modes:
        pytest.skip(f"the engine declares no pause mode {mode!r}")


class EngineSuite:
    """One engine for each test, under a deadline; see `RolloutConformance`."""

    family: TinyFamily = "qwen3"
    tolerance: float = 1e-4
    deadline_s: float = 60.0

    async def make_engine(self, config: RolloutEngineConfig) -> RolloutEngine:
        """Return the engine under test."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of the model to serve."""
        return tiny_model(tmp_path_factory.mktemp("conformance") / cls.family, cls.family)

    @pytest.fixture
    def reference(self, model_folder: Path) -> Any:
        """Return the same model under transformers, fresh for each test."""
        return reference_model(model_folder)

    def run(self, folder: Path, check: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        """Make an engine, run `check` on it, close it; all under the deadline."""

        async def bounded() -> None:
            async with asyncio.timeout(self.deadline_s), self.open_engine(folder) as engine:
                await check(engine)

        asyncio.run(bounded())

    @asynccontextmanager
    async def open_engine(self, folder: Path) -> AsyncIterator[RolloutEngine]:
        """Give out an engine that serves the folder's weights as version 0, with its counters at zero; then end it."""
        engine = await self.make_engine(
            RolloutEngineConfig(model_path=str(folder), device="cpu", max_model_len=512, max_running=16)
        )
        try:
            yield engine
        finally:
            await engine.close()

    def assert_logprobs(self, model: Any, completion: Completion, temperature: float = 1.0, start: int = 0) -> None:
        """Compare tokens from `start` on with what transformers computes in one pass over the whole sequence."""
        errors = logprob_errors(model, PROMPT, completion, temperature=temperature)[start:]
        assert (errors <= self.tolerance).all(), f"off by {errors.max()} nats, token {start + errors.argmax()}"

    async def tokens(self, engine: RolloutEngine, num_tokens: int) -> None:
        """Wait until this many further tokens have been sampled."""
        start = (await engine.health()).num_tokens
        while (await engine.health()).num_tokens < start + num_tokens:
            await asyncio.sleep(0.001)
