"""The embedded rollout engine on the stand-in device: it asks the seam, as the trainer does."""

import asyncio

import npu_standin
import numpy as np
import pytest
import torch

from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import tiny_model
from offbeat_types import GenerateRequest, RolloutEngineConfig, SamplingParams

ALONE = pytest.mark.ranks(1, join=False, deadline_s=90)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("npu") / "model", hidden_size=32)


def config(model, device, **changes):
    return RolloutEngineConfig(model_path=str(model), device=device, max_model_len=128, **changes)


async def sampled(settings):
    """Completions of two prompts, and where their keys and values went."""
    async with asyncio.timeout(60):
        engine = await TorchRolloutEngine.create(settings)
        draw = np.random.default_rng(0)
        requests = [
            GenerateRequest(
                request_id=str(length),
                prompt_ids=draw.integers(3, 300, length).astype(np.int32),
                num_samples=2,
                params=SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
            )
            for length in (5, 70)
        ]
        found = [one for group in await asyncio.gather(*map(engine.generate, requests)) for one in group]
        await engine.sleep(2)
        await engine.close()
        return found


@ALONE
@pytest.mark.parametrize("name", ["npu:1", "auto"])
def test_completions_are_those_of_the_cpu(standin, model, name):
    npu_standin.install(standin)
    found = asyncio.run(sampled(config(model, name)))
    held = [torch.npu.max_memory_allocated(index) > 0 for index in (0, 1)]
    assert held == [name == "auto", name == "npu:1"], "it computed elsewhere"
    for one, other in zip(found, asyncio.run(sampled(config(model, "cpu"))), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@ALONE
def test_the_cache_gets_a_share_of_the_devices_memory(standin, model):
    npu_standin.install(standin)
    plenty = 1 << 20  # more samples than anything has room for
    there, here = (TorchRolloutEngine(config(model, name, max_running=plenty)) for name in ("npu", "cpu"))
    shape = there._architecture
    token_bytes = (
        2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * getattr(torch, there._config.dtype).itemsize
    )
    assert 0 < there._budget_tokens * token_bytes <= npu_standin.TOTAL_BYTES // 4
    assert here._budget_tokens > there._budget_tokens
