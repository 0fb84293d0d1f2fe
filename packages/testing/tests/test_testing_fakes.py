import asyncio
import subprocess
import sys

import numpy as np
import pytest
import torch

from offbeat_core import GenerateRequest, OffbeatError, SamplingParams, VersionSegment, WeightSyncError
from offbeat_testing import FakeRolloutEngine, FakeWeightStream


def count_up(request, index):
    return list(range(request.params.seed or 0, (request.params.seed or 0) + 6 + index))


def request(request_id="r", **kwargs):
    params = SamplingParams(seed=100, max_tokens=kwargs.pop("max_tokens", 50))
    return GenerateRequest(request_id=request_id, prompt_ids=np.asarray([1], np.int32), params=params, **kwargs)


def test_the_script_becomes_the_completions():
    async def main():
        engine = FakeRolloutEngine(count_up)
        first, second = await engine.generate(request(num_samples=2))
        assert first.ids.tolist() == [100, 101, 102, 103, 104, 105]
        assert len(second.ids) == 7
        assert (first.stop_reason, first.segments) == ("eos", (VersionSegment(version=0, num_tokens=6),))
        (cut,) = await engine.generate(request(max_tokens=3))
        assert (len(cut.ids), cut.stop_reason) == (3, "length")
        assert (await engine.health()).num_tokens == 16

    asyncio.run(main())


def test_keep_splits_versions():
    async def main():
        engine = FakeRolloutEngine(count_up, token_delay_s=0.002)
        task = asyncio.create_task(engine.generate(request()))
        while (await engine.health()).num_tokens < 2:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        sampled = (await engine.health()).num_tokens
        await asyncio.sleep(0.05)  # long enough for the whole script
        assert (await engine.health()).num_tokens == sampled
        stream = FakeWeightStream([("w", np.ones(3))], version=4)
        assert await engine.update_weights(stream, 4) == stream.expected()
        await engine.resume()
        (completion,) = await task
        assert [segment.version for segment in completion.segments] == [0, 4]
        assert completion.oldest_version == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["abort", "pause", "close"])
def test_what_is_cut_short_is_marked(how):
    async def main():
        engine = FakeRolloutEngine(count_up, token_delay_s=0.01)
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.025)
        await {"abort": lambda: engine.abort("r"), "pause": lambda: engine.pause("abort"), "close": engine.close}[how]()
        (completion,) = await task
        assert completion.stop_reason == "aborted"
        assert len(completion.ids) < 6
        if how == "close":
            with pytest.raises(OffbeatError, match="closed"):
                await engine.generate(request("late"))

    asyncio.run(main())


def test_wait_drains_and_holds_what_comes_later():
    async def main():
        engine = FakeRolloutEngine(count_up, token_delay_s=0.001)
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.pause("wait")
        assert (await task)[0].stop_reason == "eos"
        later = asyncio.create_task(engine.generate(request("later")))
        await asyncio.sleep(0.02)
        assert not later.done()
        assert (await engine.health()).num_waiting == 1
        await engine.resume()
        assert len((await later)[0].ids) == 6

    asyncio.run(main())


def test_a_stream_fails_on_purpose_and_the_fake_keeps_its_version():
    async def main():
        engine = FakeRolloutEngine(count_up)
        with pytest.raises(WeightSyncError, match="died after 1 of 2"):
            await engine.update_weights(FakeWeightStream([("a", 1), ("b", 2)], 1, fail_after=1), 1)
        with pytest.raises(WeightSyncError, match="version"):
            await engine.update_weights(FakeWeightStream([("a", 1)], 1), 2)
        assert (await engine.health()).version == 0

    asyncio.run(main())


def test_the_proof_changes_with_a_single_value():
    stream = FakeWeightStream([("a", np.zeros(4)), ("b", np.ones(2))], version=1)
    held = {"a": np.zeros(4), "b": np.asarray([1.0, 1.0000001])}
    assert stream.prove(held.__getitem__) != stream.expected()
    held["b"] = np.ones(2)
    assert stream.prove(held.__getitem__) == stream.expected()


@pytest.mark.parametrize("make", [np.ones, lambda size: torch.nn.Parameter(torch.ones(size))])
def test_a_tensor_of_a_stream_is_lost_when_the_next_one_is_asked_for(make):
    """What the contract allows a stream, and one between processes does."""
    tensors = [("a", make(4)), ("b", make(2))]
    stream = FakeWeightStream(tensors, version=1)
    kept, copied = {}, {}
    for name, tensor in stream:
        kept[name], copied[name] = tensor, tensor + 0
    assert stream.prove(kept.__getitem__) != stream.expected()
    assert stream.prove(copied.__getitem__) == stream.expected()


def test_importing_brings_no_torch():
    code = "import sys, offbeat_testing; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
