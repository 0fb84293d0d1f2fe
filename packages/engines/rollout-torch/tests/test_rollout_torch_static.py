"""Static rows sample what growing rows do; a step waits for nothing it computes, and can be recorded and repeated."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import (
    ConfigError,
    GenerateRequest,
    LoraAdapter,
    ModelError,
    OffbeatError,
    SamplingParams,
    ScoreRequest,
)
from offbeat_device import open_device
from offbeat_rollout_torch._decoder import DecoderWeights
from offbeat_rollout_torch._families import read_architecture
from offbeat_rollout_torch._sampling import (
    RowParams,
    device_uniforms,
    draw,
    draw_rows,
    row_numbers,
    seed_states,
    uniforms,
)
from offbeat_testing import (
    FakeWeightStream,
    changed_weights,
    logprob_errors,
    reference_logprobs,
    reference_model,
    tiny_model,
)
from offbeat_weightsync import InProcessStream

STATIC = {"static_rows": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("m"))


def request(name="r", prompt=12, num_samples=1, adapter="", **params):
    ids = np.random.default_rng(prompt).integers(3, 300, prompt).astype(np.int32)
    params = SamplingParams(**{"seed": 1, "max_tokens": 30, "ignore_eos": True, **params})
    return GenerateRequest(request_id=name, prompt_ids=ids, num_samples=num_samples, params=params, adapter=adapter)


KINDS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "whole_logprobs": True},
    {"top_k": 20, "min_p": 0.01},
    {"temperature": 2.0, "stop_token_ids": tuple(range(3, 20)), "max_tokens": 90},
    {"temperature": 3.0, "ignore_eos": False, "max_tokens": 200},
    {"stop": ("<|im_end|>", "e"), "temperature": 3.0},
    {"top_k": 1, "max_tokens": 1},
)


def requests():
    """Ends far apart, groups and single samples, prompts of one token and of many."""
    return [
        request(str(i), prompt=(1, 5, 30, 150)[i % 4], num_samples=1 + i % 3, **{"seed": 7 * i, **KINDS[i % 8]})
        for i in range(16)
    ]


async def together(engine, asked):
    return [one for group in await asyncio.gather(*map(engine.generate, asked)) for one in group]


async def wait_for(engine, num_tokens):
    start = (await engine.health()).num_tokens
    while (await engine.health()).num_tokens < start + num_tokens:
        await asyncio.sleep(0.001)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.stop_reason == other.stop_reason
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5), st.integers(0, 2**40))
def test_uniforms_made_on_the_device_are_those_of_the_host(seeds, count):
    states, counts = torch.tensor(seed_states(seeds)), torch.full((len(seeds),), count)
    assert torch.equal(device_uniforms(states, counts), uniforms(seeds, counts.tolist()))


@pytest.mark.parametrize("vocabulary", [50, 300, 5000])
def test_rows_draw_what_the_host_path_draws(vocabulary):
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, whole_logprobs=top_k == 7)
        for temperature in (0.0, 0.6, 1.0)
        for top_k in (0, 1, 7, vocabulary)
        for top_p, min_p in ((1.0, 0.0), (0.7, 0.0), (1.0, 0.05), (0.9, 0.01))
    ]
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    numbers = uniforms(range(len(params)), [3] * len(params))
    expected = draw(logits.clone(), params, numbers)
    columns = RowParams.of(torch.tensor([row_numbers(each, vocabulary) for each in params]).t())
    ids, logprobs = draw_rows(logits, columns, numbers, is_cut=True)
    assert ids.tolist() == expected.ids
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.asyncio
@pytest.mark.parametrize("max_running", [3, 40])
async def test_samples_are_those_of_growing_rows(folder, run, device, max_running):
    """Through admissions, ends of every kind, and all kinds of draws, recorded and not."""

    async def use(engine):
        return await together(engine, requests())

    growing = await run(folder, use, max_running=max_running, options={"static_rows": False})
    assert not device.events
    plain = await run(folder, use, max_running=max_running, options={"graphs": False})
    assert device.events
    assert not device.recordings
    recorded = await run(folder, use, max_running=max_running)
    assert device.events.count("recorded step") > 30
    assert_same(plain, growing)
    assert_same(recorded, growing)


@pytest.mark.asyncio
async def test_the_host_reads_a_step_after_the_next_has_begun(folder, device, open_engine):
    async with open_engine(folder, options={"graphs": False}) as engine:
        await engine.generate(request(max_tokens=5))
    # The prompt's last token is decoded. Each step copies tokens, and then log-probabilities.
    first, *between, last = ((f"copy {n}", f"copy {n + 1}", f"read {n - 2}", f"read {n - 1}") for n in range(1, 12, 2))
    assert device.events == [*first[:2], *(each for step in between for each in step), *last[2:]]


@pytest.mark.asyncio
async def test_recorded_steps_read_the_weights_that_came_later(folder, device, open_engine):
    """Written in place, also those that are laid out anew; each segment is its own version's."""
    asked = [request(str(i), num_samples=3, max_tokens=300, seed=9 * i) for i in range(2)]
    async with open_engine(folder, options={"pack_weights": False}) as engine:
        models = [reference_model(folder)]
        sampling = asyncio.create_task(together(engine, asked))
        for version in (1, 2, 3):
            await wait_for(engine, 60)
            models.append(reference_model(folder))
            stream = FakeWeightStream(changed_weights(models[-1], seed=version), version)
            assert await engine.update_weights(stream, version) == stream.expected()
        completions = await sampling
        await engine.generate(request(max_tokens=60))
        num_recorded = len(device.recordings)
        assert 0 < num_recorded < 12
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder), seed=3), 4), 4)
        (after,) = await engine.generate(request(max_tokens=60))
        assert len(device.recordings) == num_recorded, "an update has steps recorded again"
    for one in completions:
        end = 0
        for segment in one.segments:
            start, end = end, end + segment.num_tokens
            ids = np.concatenate([asked[0].prompt_ids, one.ids[:end]])
            expected = reference_logprobs(models[segment.version], ids)[len(ids) - end + start :]
            np.testing.assert_allclose(one.logprobs[start:end], expected, atol=1e-4)
        assert end == 300
    assert any(len(one.segments) == 4 for one in completions)
    assert logprob_errors(models[3], request().prompt_ids, after).max() < 1e-4


@pytest.mark.asyncio
async def test_pauses_scores_aborts_and_sleep_between_steps_change_nothing(folder, run, device):
    asked = [request(str(i), num_samples=2, max_tokens=200, seed=5 * i) for i in range(3)]
    scored = ScoreRequest(request_id="s", prompt_ids=asked[0].prompt_ids, continuations=(np.arange(5, 60),) * 3)

    async def quiet(engine):
        return await together(engine, asked), await engine.score(scored)

    async def disturbed(engine):
        sampling = asyncio.create_task(together(engine, asked))
        other = asyncio.create_task(engine.generate(request("other", max_tokens=400)))
        await wait_for(engine, 40)
        await engine.pause("keep")
        num_tokens = (await engine.health()).num_tokens
        await asyncio.sleep(0.02)
        assert (await engine.health()).num_tokens == num_tokens
        await engine.resume()
        await wait_for(engine, 40)
        scores = await engine.score(scored)
        await wait_for(engine, 40)
        await engine.abort("other")
        (aborted,) = await other
        assert aborted.stop_reason == "aborted"
        await engine.pause("keep")
        await engine.sleep(1)
        assert engine._worker._runner.scheduler.cache.allocated_tokens == 0
        await engine.wake()
        await engine.resume()
        return await sampling, scores

    expected, expected_scores = await run(folder, quiet, options={"static_rows": False})
    found, scores = await run(folder, disturbed)
    assert_same(found, expected)
    for one, another in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(one, another, atol=1e-5)


async def sleep_and_wake(engine, level, version, weights):
    """A turn of the trainer, as a colocated run has it."""
    await engine.pause("wait")
    await engine.sleep(level)
    assert engine._worker._runner.scheduler.cache.allocated_tokens == 0
    await engine.wake(("weights",))
    await engine.update_weights(FakeWeightStream(weights, version), version)
    await engine.wake(("kv_cache",))
    await engine.resume()


@pytest.mark.asyncio
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("keeps_addresses", [True, False])
async def test_recorded_steps_outlive_a_sleep_that_keeps_their_addresses(
    folder, device, open_engine, level, keeps_addresses
):
    """Else they are forgotten; samples are those of an engine that has not slept."""
    if not keeps_addresses:
        device.reserve = lambda num_bytes: None
    weights = [(name, tensor.detach()) for name, tensor in reference_model(folder).named_parameters()]
    asked = request(num_samples=3, max_tokens=100)
    async with open_engine(folder, options={"pack_weights": False}) as engine:
        for _ in range(2):  # a shape is recorded when it comes for the second time
            expected = await engine.generate(asked)
        num_recorded, runner = len(device.recordings), engine._worker._runner
        block = runner.scheduler.cache.block.kv.data_ptr()
        matrix = runner.weights.layers[0].qkv.weight().data_ptr()
        for version in (1, 2):
            await sleep_and_wake(engine, level, version, weights)
            device.events.clear()
            for _ in range(2):
                assert_same(await engine.generate(asked), expected)
            assert device.events.count("recorded step") > 190
        if keeps_addresses:
            assert len(device.recordings) == num_recorded
            assert runner.scheduler.cache.block.kv.data_ptr() == block
            assert runner.weights.layers[0].qkv.weight().data_ptr() == matrix
        else:
            assert len(device.recordings) == 3 * num_recorded


@pytest.mark.asyncio
async def test_an_engine_without_room_for_its_rows_stays_asleep(folder, device, open_engine, monkeypatch):
    async with open_engine(folder, options={"pack_weights": False}) as engine:
        expected = await engine.generate(request())
        await engine.sleep(1)
        memory = engine._worker._runner.scheduler.cache._memory

        def fail():
            raise OffbeatError("cuMemCreate of 9 GiB failed")

        monkeypatch.setattr(memory, "restore", fail)
        with pytest.raises(OffbeatError, match="cuMemCreate of 9 GiB failed"):
            await engine.wake()
        with pytest.raises(OffbeatError, match="sleeps without kv_cache"):
            await engine.score(
                ScoreRequest(request_id="s", prompt_ids=request().prompt_ids, continuations=(np.arange(3),))
            )
        monkeypatch.undo()
        await engine.wake()
        assert_same(await engine.generate(request()), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_one_piece_of_memory_lie_apart(tmp_path, tied):
    architecture = read_architecture(tiny_model(tmp_path / "model", config={"tie_word_embeddings": tied}))
    weights = DecoderWeights(
        architecture, torch.bfloat16, torch.device("cpu"), pack=False, reserve=open_device("cpu").reserve
    )
    names = [*weights.parameters]
    for number, name in enumerate(names):
        weights.parameters[name].view().fill_(number % 256)
    weights.freeze()
    for number, name in enumerate(names):
        assert (weights.read(name) == number % 256).all(), name
    address = weights.final_norm.data_ptr()
    weights.release()
    assert weights.restored() is weights
    assert weights.final_norm.data_ptr() == address
    assert not weights.read(names[0]).any()


@pytest.mark.asyncio
async def test_a_turn_that_follows_computes_only_what_is_new(folder, open_engine):
    async with open_engine(folder, max_running=2, options={"kv_cache_tokens": 4096, **STATIC}) as engine:
        (first,) = await engine.generate(request(prompt=100, max_tokens=40))
        runner = engine._worker._runner
        before = runner.num_prefilled
        ids = np.concatenate([request(prompt=100).prompt_ids, first.ids, np.arange(5, 15, dtype=np.int32)])
        turn = replace(request("turn"), prompt_ids=ids.astype(np.int32))
        (one,) = await engine.generate(turn)
        assert runner.num_prefilled - before <= 12
        assert logprob_errors(reference_model(folder), turn.prompt_ids, one).max() < 1e-4


@pytest.mark.asyncio
async def test_samples_with_an_adapter_are_decoded_beside_others(folder, run, device):
    """By steps that are read before the next, in the same rows."""
    model = reference_model(folder)
    draws = torch.Generator().manual_seed(1)
    adapter = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            for side, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
                drawn = torch.randn(shape, generator=draws) * 0.15
                adapter[f"base_model.model.{name}.lora_{side}.weight"] = drawn

    async def use(engine):
        await engine.update_weights(InProcessStream(adapter.items(), 1), 1, adapter=LoraAdapter(name="poet", scale=1.5))
        plain = asyncio.create_task(engine.generate(request("plain", num_samples=2, max_tokens=150)))
        await wait_for(engine, 60)
        adapted = await engine.generate(request("adapted", num_samples=2, max_tokens=25, adapter="poet"))
        return [*adapted, *await plain]

    found = await run(folder, use)
    assert device.events
    assert_same(found, await run(folder, use, options={"static_rows": False}))


@pytest.mark.asyncio
async def test_weights_that_are_not_finite_spoil_no_later_sample(folder, device, open_engine):
    async with open_engine(folder) as engine:
        expected = await engine.generate(request(max_tokens=60))
        good = [(name, tensor.detach()) for name, tensor in reference_model(folder).named_parameters()]
        bad = [(name, tensor * float("nan") if "norm" in name else tensor) for name, tensor in good]
        sampling = asyncio.create_task(engine.generate(request("other", max_tokens=400)))
        await wait_for(engine, 20)
        await engine.update_weights(FakeWeightStream(bad, 3), 3)
        with pytest.raises(ModelError, match="version 3"):
            await sampling
        await engine.update_weights(FakeWeightStream(good, 4), 4)
        assert_same(await engine.generate(request(max_tokens=60)), expected)


@pytest.mark.asyncio
async def test_rows_are_as_many_as_the_budget_holds_and_stay_where_they_are(folder, run):
    """Room for three rows of 512: the other samples wait for them."""

    async def use(engine):
        cache = engine._worker._runner.scheduler.cache
        assert cache.allocated_tokens == 0, "an engine that only scores needs no rows"
        sampling = asyncio.create_task(together(engine, [request(str(i), seed=i, max_tokens=60) for i in range(8)]))
        await wait_for(engine, 20)
        first, health = cache.block.kv.data_ptr(), await engine.health()
        found = await sampling
        assert health.num_running <= 3
        assert cache.block.kv.data_ptr() == first
        assert cache.allocated_tokens <= 1600
        return found

    async def growing(engine):
        return await together(engine, [request(str(i), seed=i, max_tokens=60) for i in range(8)])

    assert_same(await run(folder, use, options={"kv_cache_tokens": 1600, **STATIC}), await run(folder, growing))


@pytest.mark.asyncio
async def test_a_budget_without_room_for_a_row_is_refused(folder, run):
    with pytest.raises(
        ConfigError, match=r"kv_cache_tokens must be at least 512, got 256, .* set static_rows to false"
    ):
        await run(folder, together, options={"kv_cache_tokens": 256, **STATIC})


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", [16, 48])
@pytest.mark.parametrize(("num_short", "graphs"), [(2, False), (3, True)])
async def test_long_prompts_are_computed_beside_the_decoding_of_others(
    folder, device, open_engine, limit, num_short, graphs
):
    """Others draw a token in each step; each step is read only when the next has begun; samples are those of alone.

    Steps of three samples compute four rows, of which the last may be that of a prompt.
    """
    options = {"static_rows": True, "graphs": graphs, "prefill_beside_decoding": limit}
    asked = [
        request("short", prompt=6, num_samples=num_short, max_tokens=60),
        request("long", prompt=150, num_samples=2, max_tokens=12),
        request("other", prompt=90, max_tokens=12),
    ]
    alone = []
    for one in asked:
        async with open_engine(folder, options=options) as engine:
            alone.append(await engine.generate(one))
    async with open_engine(folder, options=options) as engine:
        runner, beside = engine._worker._runner, []
        prefill = runner._prefill_ahead

        def noted(static, chosen):
            decoding = [one for one in runner.scheduler.running if one.num_pending < 2]
            beside.append((sum(chunk.num_tokens for _, chunk in chosen), len(decoding), runner.num_tokens))
            prefill(static, chosen)

        runner._prefill_ahead = noted
        first = asyncio.ensure_future(engine.generate(asked[0]))
        await wait_for(engine, 4)
        device.events.clear()
        together = [*await asyncio.gather(*map(engine.generate, asked[1:]))]
        together.insert(0, await first)
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)
    chunks = [each for each in beside if each[1]]
    assert sum(num_tokens for num_tokens, *_ in chunks) == 149 + 89
    assert max(num_tokens for num_tokens, *_ in chunks) <= limit
    drawn = [num_drawn for *_, num_drawn in chunks]
    assert all(after - before >= 2 for before, after in pairwise(drawn)), "decoding has stood still"
    events = device.events
    read = [int(event.split()[1]) for event in events if event.startswith("read")]
    for number in read[2:-4]:
        begun = events.index(f"copy {number + 2}") < events.index(f"read {number}")
        assert begun, "a step was read before the next had begun"
