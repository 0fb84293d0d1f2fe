"""Five updates, each compared with transformers on the new weights; and what a failed worker leaves behind."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from lora_adapters import draw_adapter, merged

from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_types import GenerateRequest, LoraAdapter, PeerFailedError, RolloutEngineConfig, SamplingParams

DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(DEADLINE_S)  # a first start on a cold machine takes a minute
SMALL_BUCKET_BYTES = 20_000  # several buckets, each half of the arena used again, and one tensor larger than a half
POET = LoraAdapter(name="poet", scale=0.7)
PROMPT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)


def request(request_id, **params):
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 5, **params}
    return GenerateRequest(request_id=request_id, prompt_ids=PROMPT, num_samples=2, params=SamplingParams(**params))


async def start(folder, tensor_parallel=1, **options):
    config = RolloutEngineConfig(
        model_path=str(folder),
        device="cpu",
        tensor_parallel=tensor_parallel,
        max_model_len=512,
        max_running=8,
        options=options,
    )
    engine = await VllmRolloutEngine.create(config)
    engine._loader._bucket_bytes = SMALL_BUCKET_BYTES
    return engine


async def check_five_updates(engine, model):
    for version in range(1, 6):
        stream = FakeWeightStream(changed_weights(model, seed=version), version)
        assert await engine.update_weights(stream, version) == stream.expected()
        for completion in await engine.generate(request(f"v{version}")):
            assert [segment.version for segment in completion.segments] == [version]
            assert logprob_errors(model, PROMPT, completion).max() < 1e-3


def run(folder, options, *checks):
    """Start one engine and run checks on it, one after the other."""

    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            engine = await start(folder, **options)
            try:
                for check in checks:
                    await check(engine, reference_model(folder))
            finally:
                await engine.close()

    asyncio.run(bounded())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logprobs_after_five_updates_are_those_of_transformers(tmp_path, tied):
    run(tiny_model(tmp_path / "model", "qwen3", tied=tied), {}, check_five_updates)


async def check_three_adapters(engine, model):
    """Each in place of the one before; over parts of every layer at two ranks."""
    await engine.update_weights(FakeWeightStream(changed_weights(model, seed=6), 6), 6)
    for version, rank in ((7, 8), (8, 3), (9, 4)):
        adapter = draw_adapter(model, rank=rank, seed=version)
        stream = FakeWeightStream(list(adapter.items()), version)
        assert await engine.update_weights(stream, version, adapter=POET) == stream.expected()
        with merged(model, adapter, POET.scale):
            for completion in await engine.generate(replace(request(f"a{version}"), adapter="poet")):
                assert [segment.version for segment in completion.segments] == [version]
                assert logprob_errors(model, PROMPT, completion).max() < 1e-3


async def check_stale_replies(engine, model):
    """After an exception at both ranks vLLM has a reply too many; nothing may take it for an answer."""
    with pytest.raises(Exception, match="no_such_method"):
        await asyncio.wrap_future(engine._form.run(lambda: engine._form._engine.collective_rpc("no_such_method")))
    weights = changed_weights(model, seed=9)
    for attempt in range(3):
        with pytest.raises(PeerFailedError):
            await engine.update_weights(FakeWeightStream(weights, 9), 9)
        with pytest.raises(PeerFailedError, match="make a new one"):
            await engine.generate(request(f"after{attempt}"))
    assert (await engine.health()).version == 5


def test_two_ranks_with_a_tied_head_and_an_engine_whose_workers_raised_is_thrown_away(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=True)
    run(folder, {"tensor_parallel": 2}, check_five_updates, check_stale_replies)


async def check_killed_worker(engine, model):
    """A worker that dies ends what is in flight with an error that says so, and closing does not wait for it."""
    task = asyncio.create_task(engine.generate(request("long", max_tokens=480)))
    while (await engine.health()).num_running == 0:
        await asyncio.sleep(0.01)
    os.kill(engine.workers[1]["pid"], signal.SIGKILL)
    with pytest.raises(PeerFailedError):
        await task
    with pytest.raises(PeerFailedError):
        await engine.generate(request("after"))


def test_two_ranks_with_an_untied_head_and_an_engine_whose_worker_died_says_so(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=False)
    options = {"tensor_parallel": 2, "enable_lora": True, "max_lora_rank": 8}
    run(folder, options, check_five_updates, check_three_adapters, check_killed_worker)
