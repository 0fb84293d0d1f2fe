from contextlib import asynccontextmanager

import pytest

from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import RolloutConformance
from offbeat_types import RolloutEngineConfig, load_backend

DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(DEADLINE_S)  # a first start on a cold machine takes a minute


class Vllm(RolloutConformance):
    """The suite of every engine, on one real engine for the whole class; the last test closes it."""

    form = "in_process"
    deadline_s = DEADLINE_S

    @pytest.fixture(autouse=True)
    def take(self, shared_engine):
        self._shared = shared_engine

    async def make_engine(self, config):
        return await load_backend("offbeat.rollout", "vllm").create(config)

    @asynccontextmanager
    async def _engine(self, folder):
        config = RolloutEngineConfig(
            model_path=str(folder), device="cpu", max_model_len=512, max_running=16, options={"form": self.form}
        )
        async with self._shared.lend(config) as engine:
            yield engine


class TestInProcess(Vllm):
    form = "in_process"


class TestAsync(Vllm):
    form = "async"


def test_the_entry_point_is_the_engine():
    assert load_backend("offbeat.rollout", "vllm") is VllmRolloutEngine
