"""What only a GPU can show: memory that sleep gives back, and the whole contract on vLLM's CUDA build.

The nox session `hardware(rollout-vllm-cuda)` runs these, in an environment with the extra `engine`.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from offbeat_core import GenerateRequest, OffbeatError, RolloutEngineConfig, SamplingParams
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import FakeWeightStream, RolloutConformance, changed_weights, reference_model, tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
DEADLINE_S = 600.0
pytestmark = [
    pytest.mark.timeout(DEADLINE_S),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
OPTIONS = {"gpu_memory_utilization": 0.2, "enforce_eager": True}
REQUEST = GenerateRequest(
    request_id="r",
    prompt_ids=np.asarray([10, 44, 81, 7, 200, 31], np.int32),
    params=SamplingParams(max_tokens=24, ignore_eos=True, seed=5),
)


class TestContract(RolloutConformance):
    """TF32 and other kernels: looser than on a CPU."""

    tolerance = 1e-2
    deadline_s = DEADLINE_S

    async def make_engine(self, config):
        return await VllmRolloutEngine.create(replace(config, device="auto", options=OPTIONS, shares_device=True))


def free_mib():
    return torch.cuda.mem_get_info()[0] // MIB


def run(folder, check):
    async def bounded():
        config = RolloutEngineConfig(
            model_path=str(folder),
            device="cuda:0",
            max_model_len=512,
            max_running=8,
            options=OPTIONS,
            shares_device=True,
        )
        async with asyncio.timeout(DEADLINE_S):
            engine = await VllmRolloutEngine.create(config)
            try:
                await check(engine, reference_model(folder))
            finally:
                await engine.close()

    asyncio.run(bounded())


def test_both_levels_are_declared_and_give_memory_back(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", hidden_size=1024, num_layers=8)

    async def check(engine, model):
        assert engine.capabilities.sleep_levels == (1, 2)
        (before,) = await engine.generate(REQUEST)
        for level in (1, 2):
            awake = free_mib()
            await engine.pause("wait")
            await engine.sleep(level)
            assert free_mib() > awake + 1000, "the cache alone is a fifth of the device"
            await engine.wake()
            assert free_mib() < awake + 500
            await engine.resume()
            if level == 1:
                (after,) = await engine.generate(REQUEST)
                np.testing.assert_array_equal(before.ids, after.ids)
        with pytest.raises(OffbeatError, match="no usable weights"):
            await engine.generate(REQUEST)
        stream = FakeWeightStream(changed_weights(model), 3)
        assert await engine.update_weights(stream, 3) == stream.expected()
        assert (await engine.generate(REQUEST))[0].oldest_version == 3

    run(folder, check)


def test_weights_wake_alone_take_an_update_and_the_cache_follows(tmp_path):
    """As a colocated trainer does it: the cache's memory is still the trainer's while the weights arrive."""
    folder = tiny_model(tmp_path / "model", "qwen3")

    async def check(engine, model):
        await engine.pause("wait")
        await engine.sleep(2)
        await engine.wake(("weights",))
        await engine.update_weights(FakeWeightStream(changed_weights(model), 1), 1)
        await engine.wake(("kv_cache",))
        await engine.resume()
        assert (await engine.generate(REQUEST))[0].oldest_version == 1

    run(folder, check)


def test_batch_invariance_is_proved(tmp_path):
    """At the start, which fails otherwise."""
    config = RolloutEngineConfig(
        model_path=str(tiny_model(tmp_path / "model", hidden_size=256)),
        device="cuda:0",
        max_model_len=512,
        max_running=8,
        options={**OPTIONS, "batch_invariant": True, "form": "async"},
    )

    async def start():
        engine = await VllmRolloutEngine.create(config)
        await engine.close()

    asyncio.run(start())
