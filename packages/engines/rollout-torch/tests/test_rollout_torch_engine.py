"""The engine's own promises, beyond the contract's."""

import asyncio
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from offbeat_core import (
    ConfigError,
    DataError,
    GenerateRequest,
    ModelError,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    SamplingParams,
    ScoreRequest,
    WeightSyncError,
)
from offbeat_rollout_torch import TorchRolloutEngine, _worker
from offbeat_rollout_torch._families import read_architecture
from offbeat_rollout_torch._scheduler import StopStrings
from offbeat_testing import FakeWeightStream, changed_weights, reference_logprobs, reference_model, tiny_model

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m"))


def request(name="r", prompt=12, num_samples=1, **params):
    ids = np.random.default_rng(prompt).integers(3, 300, prompt).astype(np.int32)
    params = SamplingParams(**{"seed": 1, "max_tokens": 30, "ignore_eos": True, **params})
    return GenerateRequest(request_id=name, prompt_ids=ids, num_samples=num_samples, params=params)


async def together(engine, requests):
    return [one for group in await asyncio.gather(*map(engine.generate, requests)) for one in group]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 12, 70, 128, 129, 300])
async def test_a_shared_prompt_gives_what_separate_prompts_give(folder, prompt, open_engine):
    async with open_engine(folder) as engine:
        shared = await engine.generate(request(num_samples=6, prompt=prompt))
        separate = [(await engine.generate(request(f"{i}", prompt=prompt, seed=1 + i)))[0] for i in range(6)]
        assert_same(shared, separate)


async def test_who_is_beside_a_sample_changes_nothing(folder, run):
    requests = [
        request(str(i), prompt=3 + 11 * i, seed=i, max_tokens=20 + 13 * i, num_samples=1 + i % 3) for i in range(8)
    ]

    async def alone(engine):
        return [one for single in requests for one in await engine.generate(single)]

    async def crowd(engine):
        return await together(engine, requests)

    assert_same(await run(folder, crowd), await run(folder, alone))
    assert_same(await run(folder, crowd, max_running=3), await run(folder, alone))


async def test_running_out_of_cache_sets_samples_back_and_changes_nothing(folder, run):
    """Room for two rows of 256 only, while six samples grow from 64 to 256."""
    requests = [request(str(i), seed=i, max_tokens=200) for i in range(6)]

    async def check(engine):
        completions = await together(engine, requests)
        assert (await engine.health()).num_running == 0
        return completions

    roomy = await run(folder, check)
    tight = await run(folder, check, options={"kv_cache_tokens": 512})
    assert_same(tight, roomy)
    assert all(len(one.ids) == 200 for one in tight)


async def test_a_sample_that_was_set_back_waits_for_room_before_those_that_came_later(folder, open_engine):
    """And is computed once more only."""
    names, ended = [str(number) for number in range(6)], []
    async with open_engine(folder, options={"kv_cache_tokens": 512}) as engine:
        await engine.pause("wait")  # so that all begin in one step

        async def sample(name):
            await engine.generate(request(name, seed=int(name), max_tokens=200))
            ended.append(name)

        tasks = [asyncio.create_task(sample(name)) for name in names]
        while (await engine.health()).num_waiting < len(names):
            await asyncio.sleep(0.001)
        await engine.resume()
        await asyncio.gather(*tasks)
        assert ended == names
        # Two give way when rows of 128 tokens no longer fit, and two when those of 256 do not.
        assert engine._worker._runner.num_prefilled == 6 * 12 + 2 * 65 + 2 * 129


async def test_groups_of_long_prompts_set_back_and_cut_into_chunks_sample_as_in_a_roomy_engine(folder, run):
    """Three groups, and room for one prompt and few of its samples, whose ends are far apart."""
    requests = [request(str(i), prompt=140 + 3 * i, seed=10 * i, num_samples=4, max_tokens=90) for i in range(3)]

    async def check(engine):
        return await together(engine, requests)

    tight = await run(folder, check, options={"kv_cache_tokens": 512, "max_prefill_tokens": 64})
    roomy = await run(folder, check)
    assert_same(tight, roomy)
    assert_same(await run(folder, check, max_running=3), roomy)
    # Too little for a prompt held beside a row of its sample: each sample computes its own.
    assert_same(await run(folder, check, options={"kv_cache_tokens": 256}), roomy)


async def test_a_sample_that_ends_early_leaves_its_group_as_it_is(folder, open_engine):
    """Samples of one group stop at different tokens, and another group is aborted beside them."""
    stop = tuple(range(3, 40))
    group = request(num_samples=6, prompt=200, stop_token_ids=stop, temperature=2.0, max_tokens=80)
    async with open_engine(folder) as engine:
        other = asyncio.create_task(engine.generate(request("other", num_samples=3, prompt=150, max_tokens=300)))
        while not (await engine.health()).num_tokens:
            await asyncio.sleep(0.001)
        beside = asyncio.create_task(engine.generate(group))
        while (await engine.health()).num_tokens < 12:
            await asyncio.sleep(0.001)
        await engine.abort("other")
        together = await beside
        await other
        assert len({len(one.ids) for one in together}) > 2
        separate = [
            (
                await engine.generate(
                    replace(group, request_id=f"{i}", num_samples=1, params=replace(group.params, seed=1 + i))
                )
            )[0]
            for i in range(6)
        ]
        assert_same(together, separate)


async def test_a_long_prompt_of_a_group_is_held_once(folder, open_engine):
    async with open_engine(folder) as engine:
        cache = engine._worker._runner.scheduler.cache
        task = asyncio.create_task(engine.generate(request(num_samples=8, prompt=300, max_tokens=60)))
        while (await engine.health()).num_tokens < 20:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        assert cache.held_tokens == cache.allocated_tokens == 299 + 8 * 64
        await engine.resume()
        await task
        assert cache.held_tokens == 0
        assert cache.allocated_tokens == cache.kept_tokens == 299 + 8 * 60


async def test_allocated_keys_and_values_stay_within_the_budget_and_one_block(folder, monkeypatch, run):
    """Rows grow, leave one behind in each band, move on, and a request is scored beside them."""
    held, most = [0], [0]
    new_zeros = torch.Tensor.new_zeros

    def count(change):
        held[0] += change
        most[0] = max(most[0], held[0])

    def counted(self, *shape, **named):
        made = new_zeros(self, *shape, **named)
        if len(shape) == 6:  # of the cache
            count(made.nbytes)
            weakref.finalize(made, count, -made.nbytes)
        return made

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)
    requests = [
        request(str(i), prompt=5 + 9 * i, seed=i, max_tokens=20 + 29 * (i % 9), num_samples=3) for i in range(16)
    ]
    ids = np.full(200, 7, np.int32)
    scored = ScoreRequest(request_id="s", prompt_ids=requests[0].prompt_ids, continuations=(ids,) * 12)

    async def check(engine):
        sampling = asyncio.ensure_future(together(engine, requests))
        while (await engine.health()).num_tokens < 1500:
            await asyncio.sleep(0.001)
        await engine.score(scored)
        assert not sampling.done()
        return await sampling

    tight = await run(folder, check, options={"kv_cache_tokens": 4096})
    architecture = read_architecture(folder)
    token_bytes = 2 * 4 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    assert 2048 * token_bytes < most[0] <= (4096 + 512) * token_bytes
    assert_same(tight, await run(folder, check))


async def test_long_prompts_are_prefilled_in_chunks(folder, run):
    async def check(engine):
        return await together(engine, [request("long", prompt=300), request("short", prompt=20, num_samples=2)])

    assert_same(await run(folder, check, options={"max_prefill_tokens": 64}), await run(folder, check))


async def test_packed_and_plain_weights_sample_alike(tmp_path, run):
    wide = tiny_model(tmp_path / "m", hidden_size=192)

    async def check(engine):
        return await engine.generate(request(num_samples=4))

    assert_same(await run(wide, check), await run(wide, check, options={"pack_weights": False}))


async def test_a_group_larger_than_the_batch_is_finished_in_turns(folder, run):
    async def check(engine):
        group = await engine.generate(request(num_samples=9, max_tokens=10))
        assert [len(one.ids) for one in group] == [10] * 9
        return group

    assert_same(await run(folder, check, max_running=2), await run(folder, check))


@pytest.mark.parametrize(("prompt", "budget"), [(12, 1536), (160, 2048)])
async def test_updates_between_every_few_tokens_keep_every_segment_exact(folder, run, prompt, budget):
    """Three versions over a group and a tight cache; each segment's log-probabilities are its own policy's."""

    async def check(engine):
        models = [reference_model(folder)]
        tasks = [
            asyncio.create_task(engine.generate(request(str(i), prompt, num_samples=3, max_tokens=340, seed=9 * i)))
            for i in range(2)
        ]
        for version in (1, 2):
            start = (await engine.health()).num_tokens
            while (await engine.health()).num_tokens < start + 40:
                await asyncio.sleep(0.001)
            model = reference_model(folder)
            stream = FakeWeightStream(changed_weights(model, seed=version), version)
            models.append(model)
            assert await engine.update_weights(stream, version) == stream.expected()
        for group in await asyncio.gather(*tasks):
            for one in group:
                end = 0
                for segment in one.segments:
                    start, end = end, end + segment.num_tokens
                    ids = np.concatenate([request(prompt=prompt).prompt_ids, one.ids[:end]])
                    expected = reference_logprobs(models[segment.version], ids)[prompt + start :]
                    np.testing.assert_allclose(one.logprobs[start:end], expected, atol=1e-4)
                assert end == 340
        return [one for task in tasks for one in task.result()]

    completions = await run(folder, check, options={"kv_cache_tokens": budget})
    assert any(len(one.segments) == 3 for one in completions)


async def test_eos_ends_a_sample_unless_ignored(folder, open_engine):
    """The tiny tokenizer's end of sequence is token 2; a peaked draw over few tokens reaches it soon."""

    async with open_engine(folder) as engine:
        ended = await together(
            engine, [request(str(i), seed=i, temperature=3.0, ignore_eos=False, max_tokens=480) for i in range(8)]
        )
        stopped = [one for one in ended if one.stop_reason == "eos"]
        assert stopped
        for one in stopped:
            assert one.ids[-1] == 2
            assert 2 not in one.ids[:-1].tolist()
            assert "<|im_end|>" not in one.text


async def test_max_model_len_ends_a_sample(folder, open_engine):
    async with open_engine(folder, max_model_len=128) as engine:
        (one,) = await engine.generate(request(prompt=100, max_tokens=1000))
        assert (one.stop_reason, len(one.ids)) == ("length", 28)


async def test_special_tokens_can_be_stop_strings(folder, open_engine):
    async with open_engine(folder) as engine:
        (one,) = await engine.generate(request(temperature=3.0, stop=("<|im_end|>",), max_tokens=480, seed=3))
        assert one.stop_reason == "stop"
        assert one.ids[-1] == 2


@pytest.mark.parametrize("stops", [("!", "never this"), ("never this", "!")])
async def test_a_stop_string_over_several_tokens_is_found_beside_a_shorter_one(folder, stops):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("well, never this time", add_special_tokens=False).ids
    assert len(tokenizer.encode("never this", add_special_tokens=False).ids) > 2
    criteria = StopStrings(tokenizer, stops)
    found = next(number for number, token in enumerate(ids) if criteria.push(token))
    assert tokenizer.decode(ids[: found + 1]).endswith("never this")


async def test_a_cancelled_caller_frees_its_place(folder, open_engine):
    async with open_engine(folder) as engine:
        task = asyncio.create_task(engine.generate(request("slow", max_tokens=490)))
        while not (await engine.health()).num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort("unknown")  # goes through the same queue, after the abort
        assert (await engine.health()).num_running == 0


async def test_a_step_that_raises_says_that_the_engine_is_lost(folder, monkeypatch, open_engine):
    """Such as torch's error for a device without memory: only a new process mends that."""

    def step(runner):
        raise MemoryError("cannot allocate 1 GiB")

    async with open_engine(folder) as engine:
        monkeypatch.setattr(_worker.ModelRunner, "step", step)
        with pytest.raises(PeerFailedError, match="raised MemoryError: cannot allocate 1 GiB"):
            await engine.generate(request())


async def test_weights_that_are_not_finite_are_named(folder, open_engine):
    async with open_engine(folder) as engine:
        good = [(name, tensor.detach()) for name, tensor in reference_model(folder).named_parameters()]
        bad = [(name, tensor * float("nan")) for name, tensor in good]
        await engine.update_weights(FakeWeightStream(bad, 3), 3)
        with pytest.raises(ModelError, match="version 3"):
            await engine.generate(request())
        await engine.update_weights(FakeWeightStream(good, 4), 4)
        assert len((await engine.generate(request()))[0].ids) == 30


@pytest.mark.parametrize("paused", [False, True], ids=["at once", "at the end of the pause"])
async def test_a_sample_in_flight_is_ended_when_an_update_has_failed_half_way(folder, open_engine, paused):
    """There are no weights to continue with, and its caller must get the error."""
    broken = FakeWeightStream(changed_weights(reference_model(folder)), 1, fail_after=3)
    async with open_engine(folder) as engine:
        task = asyncio.create_task(engine.generate(request(max_tokens=480)))
        while not (await engine.health()).num_tokens:
            await asyncio.sleep(0.001)
        if paused:
            await engine.pause("keep")
        with pytest.raises(WeightSyncError, match="the sender died after 3"):
            await engine.update_weights(broken, 1)
        if paused:
            await asyncio.sleep(0.01)
            assert not task.done(), "it is held"
            await engine.resume()
        (one,) = await asyncio.wait_for(task, 10)
        assert one.stop_reason == "aborted"
        assert 0 < len(one.ids) < 480
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.generate(request("next"))


async def test_an_id_that_is_held_is_not_taken_twice(folder, open_engine):
    async with open_engine(folder) as engine:
        await engine.pause("wait")
        held = asyncio.create_task(engine.generate(request("same", max_tokens=5)))
        while not (await engine.health()).num_waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(OffbeatError, match="'same' is in flight already"):
            await engine.generate(request("same"))
        await engine.resume()
        assert [len(one.ids) for one in await held] == [5]


async def test_tied_alias_in_a_stream_must_agree(folder, open_engine):
    async with open_engine(folder) as engine:
        weights = [(name, tensor.detach()) for name, tensor in reference_model(folder).named_parameters()]
        embedding = dict(weights)["model.embed_tokens.weight"]
        await engine.update_weights(FakeWeightStream([*weights, ("lm_head.weight", embedding)], 1), 1)
        with pytest.raises(WeightSyncError, match="tied"):
            await engine.update_weights(FakeWeightStream([*weights, ("lm_head.weight", embedding + 1)], 2), 2)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"prompt": 512}, DataError, "max_model_len is 512"),
        ({"prompt": 60, "max_tokens": 200}, DataError, "kv_cache_tokens is 128"),
        ({"max_tokens": 0}, ConfigError, "max_tokens"),
    ],
)
async def test_a_request_that_cannot_be_is_refused(folder, kwargs, error, text, open_engine):
    async with open_engine(folder, options={"kv_cache_tokens": 128}) as engine:
        with pytest.raises(error, match=text):
            await engine.generate(request(**kwargs))


async def test_more_than_one_device_is_refused(folder):
    config = RolloutEngineConfig(model_path=str(folder), device="cpu", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel is 2; set it to 1"):
        await TorchRolloutEngine.create(config)


async def test_prompts_of_another_vocabulary_and_double_ids_are_refused(folder, open_engine):
    async with open_engine(folder) as engine:
        for ids in ([], [5, 320], [-1], [[1, 2]]):
            with pytest.raises(DataError):
                await engine.generate(GenerateRequest(request_id="x", prompt_ids=np.asarray(ids, np.int32)))
        task = asyncio.create_task(engine.generate(request("same", max_tokens=300)))
        await asyncio.sleep(0)
        with pytest.raises(OffbeatError, match="in flight"):
            await engine.generate(request("same"))
        await engine.abort("same")
        await task
