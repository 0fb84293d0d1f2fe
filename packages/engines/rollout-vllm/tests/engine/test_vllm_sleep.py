"""Memory that sleep gives back, measured as the resident memory of the processes that hold it."""

import asyncio
from pathlib import Path

import pytest
from engine_checks import DEADLINE_S, LONG, config_of, request, started

from offbeat_core import (
    ConfigError,
    OffbeatError,
    WeightSyncError,
)
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_rollout_vllm._in_workers.extension import WorkerSide
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]  # a first start on a cold machine takes a minute
MIB = 1 << 20
CACHE_BYTES = 160 * MIB
OPTIONS = {"kv_cache_memory_bytes": CACHE_BYTES}
REQUEST = request(prompt=LONG, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With 160 MiB of weights, so that they can be seen in a process."""
    path = tmp_path_factory.mktemp("sleep") / "model"
    return tiny_model(path, "qwen3", hidden_size=1024, num_layers=5, spread=0.03, config={"head_dim": 128})


def resident_bytes(engine):
    """Of the workers."""
    pids = {worker["pid"] for worker in engine.workers}
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def fill_cache(self):
    for held in self._worker.model_runner.kv_caches:
        held.fill_(1)


@pytest.mark.nightly
async def test_both_levels_give_memory_back_and_leave_no_trace(folder, monkeypatch):
    monkeypatch.setattr(WorkerSide, "fill_cache", fill_cache, raising=False)
    model = reference_model(folder)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    async with started(config_of(folder, options=OPTIONS)) as engine:
        assert engine.capabilities.sleep_levels == (1, 2)
        (before,) = await engine.generate(REQUEST)
        engine._workers.call("fill_cache")
        awake = resident_bytes(engine)
        await engine.pause("wait")
        await engine.sleep(1)
        assert awake - resident_bytes(engine) > 0.9 * CACHE_BYTES
        with pytest.raises(OffbeatError, match="sleeps already"):
            await engine.sleep(2)
        await engine.wake()
        await engine.resume()
        (after,) = await engine.generate(REQUEST)
        assert after.ids.tolist() == before.ids.tolist(), "its keys and values are computed anew"
        assert logprob_errors(model, REQUEST.prompt_ids, after).max() < 1e-3

        engine._workers.call("fill_cache")
        awake = resident_bytes(engine)
        await engine.pause("wait")
        await engine.sleep(2)
        asleep = resident_bytes(engine)
        assert awake - asleep > 0.9 * (CACHE_BYTES + weight_bytes)
        with pytest.raises(OffbeatError, match="sleeps without weights"):
            await engine.update_weights(FakeWeightStream([], 1), 1)
        await engine.wake(("weights",))
        stream = FakeWeightStream(changed_weights(model), 1)
        assert await engine.update_weights(stream, 1) == stream.expected()
        assert resident_bytes(engine) - asleep > 0.9 * weight_bytes
        waiting = asyncio.create_task(engine.generate(REQUEST))
        await engine.wake(("weights", "kv_cache"))
        await engine.resume()
        (completion,) = await waiting
        assert completion.oldest_version == 1
        assert logprob_errors(model, LONG, completion).max() < 1e-3
        await engine.sleep(2)
        await engine.wake()
        with pytest.raises(WeightSyncError, match="given back by sleep"):
            await engine.generate(REQUEST)


@pytest.mark.nightly
async def test_vllm_s_own_sleep_gives_nothing_back(folder, monkeypatch):
    """What this package's is there for: when this fails, vLLM's own will do."""
    monkeypatch.setattr("offbeat_rollout_vllm._in_workers.extension.CpuSleep", lambda worker: None)
    monkeypatch.setattr(WorkerSide, "fill_cache", fill_cache, raising=False)
    async with started(config_of(folder, options=OPTIONS)) as engine:
        engine._workers.call("fill_cache")
        awake = resident_bytes(engine)
        await engine.sleep(2)
        assert awake - resident_bytes(engine) < 0.1 * CACHE_BYTES


async def test_it_is_refused_where_it_was_switched_off(folder):
    engine = VllmRolloutEngine(config_of(folder, options={"enable_sleep_mode": False}))
    assert engine.capabilities.sleep_levels == ()
    with pytest.raises(ConfigError, match=r"none: set options\.enable_sleep_mode"):
        await engine.sleep(1)
