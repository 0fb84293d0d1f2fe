"""LoRA adapters: what is sampled with one is what the merged weights sample; an update of one replaces it whole."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat_core import (
    ConfigError,
    GenerateRequest,
    LoraAdapter,
    OffbeatError,
    SamplingParams,
    TensorSpec,
    WeightSyncError,
)
from offbeat_testing import FakeWeightStream, logprob_errors, reference_model, tiny_model
from offbeat_weightsync import InProcessStream, dequantize_blocks, is_fp8_weight, merge_adapter, quantize_blocks

pytestmark = pytest.mark.asyncio
SCALE, RANK = 1.5, 3
POET = LoraAdapter(name="poet", scale=SCALE)
REQUEST = GenerateRequest(
    request_id="r",
    prompt_ids=np.arange(5, 25, dtype=np.int32),
    num_samples=2,
    params=SamplingParams(max_tokens=40, ignore_eos=True, seed=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("m"))


def adapter_of(model, seed, dtype=torch.float32):
    """An adapter of every linear layer of the blocks, by PEFT's names."""
    draws = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            stem = f"base_model.model.{name}"
            for side, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                drawn = torch.randn(shape, generator=draws) * 0.15
                found[f"{stem}.lora_{side}.weight"] = drawn.to(dtype)
    return found


def merged(folder, adapter, change=lambda name, tensor: tensor):
    """A reference model with the adapter in its weights; `change` is done to the base first."""
    model = reference_model(folder)
    base = {name: change(name, tensor.detach().clone()) for name, tensor in model.named_parameters()}
    model.load_state_dict(base | dict(merge_adapter(base.__getitem__, adapter.items(), SCALE)), strict=False)
    return model


def errors(model, completions):
    return max(logprob_errors(model, REQUEST.prompt_ids, each).max() for each in completions)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "qwen2", "llama"])
async def test_samples_are_those_of_the_merged_weights(family, tmp_path, open_engine):
    folder = tiny_model(tmp_path / "model", family)
    adapter = adapter_of(reference_model(folder), 1)
    model = merged(folder, adapter)
    async with open_engine(folder) as engine:
        stream = FakeWeightStream(list(adapter.items()), 4)
        proof = await engine.update_weights(stream, 4, adapter=POET)
        adapted = await engine.generate(replace(REQUEST, adapter="poet"))
        plain = await engine.generate(REQUEST)
        weights = InProcessStream(model.named_parameters(), 5)
        await engine.update_weights(weights, 5)
        expected = await engine.generate(REQUEST)
    assert proof == stream.expected()
    assert errors(model, adapted) < 1e-4
    assert errors(reference_model(folder), adapted) > 1e-2
    assert errors(reference_model(folder), plain) < 1e-4
    for one, other in zip(adapted, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert (adapted[0].oldest_version, plain[0].oldest_version) == (4, 0)


async def test_each_sample_of_a_batch_has_its_own_adapter(folder, open_engine):
    model = reference_model(folder)
    adapters = {name: adapter_of(model, seed) for seed, name in enumerate(("poet", "clerk"))}
    async with open_engine(folder) as engine:
        for name, tensors in adapters.items():
            await engine.update_weights(InProcessStream(tensors.items(), 1), 1, adapter=replace(POET, name=name))
        names = ("poet", "", "clerk", "poet")
        wanted = [replace(REQUEST, request_id=f"r{number}", adapter=name) for number, name in enumerate(names)]
        found = await asyncio.gather(*map(engine.generate, wanted))
    for name, completions in zip(names, found, strict=True):
        assert errors(merged(folder, adapters[name]) if name else model, completions) < 1e-4


async def test_an_adapter_lies_on_rounded_weights_too(tmp_path, open_engine):
    folder = tiny_model(tmp_path / "wide", hidden_size=192)

    def rounded(name, tensor):
        is_rounded = is_fp8_weight(TensorSpec(name, "float32", tuple(tensor.shape)))
        return dequantize_blocks(*quantize_blocks(tensor)) if is_rounded else tensor

    adapter = adapter_of(reference_model(folder), 1)
    async with open_engine(folder, weight_format="fp8") as engine:
        await engine.update_weights(InProcessStream(adapter.items(), 1), 1, adapter=POET)
        adapted = await engine.generate(replace(REQUEST, adapter="poet"))
    assert errors(merged(folder, adapter, rounded), adapted) < 1e-3
    assert errors(merged(folder, adapter), adapted) > 3e-3


async def test_an_adapter_in_bfloat16_is_held_as_it_was_sent(folder, open_engine):
    adapter = adapter_of(reference_model(folder), 1, torch.bfloat16)
    async with open_engine(folder, dtype="bfloat16") as engine:
        proof = await engine.update_weights(InProcessStream(adapter.items(), 1), 1, adapter=POET)
        adapted = await engine.generate(replace(REQUEST, adapter="poet"))
    assert proof.num_tensors == len(adapter)
    model = merged(folder, adapter, lambda _, tensor: tensor.bfloat16().float())
    assert errors(model, adapted) < 0.3


class Liar(InProcessStream):
    """Sends an element that it does not prove."""

    def __iter__(self):
        for number, (name, tensor) in enumerate(super().__iter__()):
            yield name, tensor + 1.0 if number == 2 else tensor


async def test_an_update_that_fails_leaves_the_old_adapter(folder, open_engine):
    model = reference_model(folder)
    good, other = adapter_of(model, 1), adapter_of(model, 2)
    first, *rest = other.items()
    broken = {
        "needs": InProcessStream(rest, 2),
        "no matrix": InProcessStream([*other.items(), *_unknown_matrices()], 2),
        "must have shape": InProcessStream([(first[0], first[1][:, :-1]), *rest], 2),
        "other bytes": Liar(other.items(), 2),
        "version": InProcessStream(other.items(), 3),
        "died": FakeWeightStream(list(other.items()), 2, fail_after=4),
    }
    async with open_engine(folder) as engine:
        await engine.update_weights(InProcessStream(good.items(), 1), 1, adapter=POET)
        for words, stream in broken.items():
            with pytest.raises(WeightSyncError, match=words):
                await engine.update_weights(stream, 2, adapter=POET)
        adapted = await engine.generate(replace(REQUEST, adapter="poet"))
    assert adapted[0].oldest_version == 1
    assert errors(merged(folder, good), adapted) < 1e-4


async def test_no_adapter_is_taken_on_weights_of_two_versions(folder, open_engine):
    model = reference_model(folder)
    adapter = adapter_of(model, 1)
    async with open_engine(folder) as engine:
        with pytest.raises(WeightSyncError, match="the sender died after 3"):
            await engine.update_weights(FakeWeightStream(list(model.named_parameters()), 1, fail_after=3), 1)
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.update_weights(InProcessStream(adapter.items(), 2), 2, adapter=POET)
        await engine.update_weights(InProcessStream(model.named_parameters(), 3), 3)
        with pytest.raises(ConfigError, match="no adapter 'poet'"):
            await engine.generate(replace(REQUEST, adapter="poet"))


def _unknown_matrices():
    stem = "base_model.model.model.layers.99.self_attn.q_proj"
    return [(f"{stem}.lora_A.weight", torch.zeros(RANK, 4)), (f"{stem}.lora_B.weight", torch.zeros(4, RANK))]


async def test_a_held_sample_goes_on_with_the_new_adapter(folder, open_engine):
    model = reference_model(folder)
    old, new = adapter_of(model, 1), adapter_of(model, 2)
    long = replace(REQUEST, adapter="poet", params=replace(REQUEST.params, max_tokens=300))
    async with open_engine(folder) as engine:
        await engine.update_weights(InProcessStream(old.items(), 1), 1, adapter=POET)
        sampling = asyncio.create_task(engine.generate(long))
        while (await engine.health()).num_tokens < 10:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        with pytest.raises(OffbeatError, match="uses the adapter 'poet'"):
            await engine.drop_adapter("poet")
        await engine.update_weights(InProcessStream(new.items(), 2), 2, adapter=POET)
        await engine.resume()
        completions = await sampling
        await engine.drop_adapter("poet")
        with pytest.raises(ConfigError, match="no adapter 'poet'"):
            await engine.generate(long)
        assert (await engine.health()).version == 2
    for completion in completions:
        first, last = completion.segments
        assert (first.version, last.version) == (1, 2)
        differences = [logprob_errors(merged(folder, each), REQUEST.prompt_ids, completion) for each in (old, new)]
        assert differences[0][: first.num_tokens].max() < 1e-4
        assert differences[1][first.num_tokens :].max() < 1e-4


async def test_an_adapter_that_a_held_request_will_use_is_not_dropped(folder, open_engine):
    """One that came while the engine was paused, and has not begun."""
    adapter = adapter_of(reference_model(folder), 1)
    async with open_engine(folder) as engine:
        await engine.update_weights(InProcessStream(adapter.items(), 1), 1, adapter=POET)
        await engine.pause("wait")
        sampling = asyncio.create_task(engine.generate(replace(REQUEST, adapter="poet")))
        while not (await engine.health()).num_waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(OffbeatError, match="request 'r' uses the adapter 'poet'"):
            await engine.drop_adapter("poet")
        await engine.resume()
        assert errors(merged(folder, adapter), await sampling) < 1e-4


async def test_an_adapter_stays_when_the_model_is_updated_or_sleeps(folder, open_engine):
    """One that comes meanwhile is refused and changes nothing."""
    model = reference_model(folder)
    adapter, other = adapter_of(model, 1), adapter_of(model, 2)
    async with open_engine(folder) as engine:
        await engine.update_weights(InProcessStream(adapter.items(), 1), 1, adapter=POET)
        await engine.sleep(2)
        with pytest.raises(OffbeatError, match="sleeps without weights; call wake"):
            await engine.update_weights(InProcessStream(other.items(), 2), 2, adapter=POET)
        await engine.wake()
        await engine.update_weights(InProcessStream(model.named_parameters(), 7), 7)
        adapted = await engine.generate(replace(REQUEST, adapter="poet"))
    assert adapted[0].oldest_version == 7
    assert errors(merged(folder, adapter), adapted) < 1e-4


async def test_what_was_computed_with_an_adapter_serves_no_prompt_without_it(folder, open_engine):
    prompt = np.random.default_rng(9).integers(3, 300, 100).astype(np.int32)
    tensors = adapter_of(reference_model(folder), seed=1)
    async with open_engine(folder) as engine:
        await engine.update_weights(FakeWeightStream(tensors.items(), 1), 1, adapter=POET)
        runner = engine._worker._runner

        async def prefilled(name, adapter):
            before = runner.num_prefilled
            await engine.generate(replace(REQUEST, request_id=name, prompt_ids=prompt, num_samples=1, adapter=adapter))
            return runner.num_prefilled - before

        assert await prefilled("a", "poet") == 100
        assert await prefilled("b", "") == 100
        assert await prefilled("c", "poet") < 10
        assert await prefilled("d", "") < 10
