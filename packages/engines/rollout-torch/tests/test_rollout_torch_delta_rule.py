"""Layers with the gated delta rule: the rule against its definition, and states that belong to their samples."""

import asyncio

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, GenerateRequest, SamplingParams
from offbeat_rollout_torch._cache import token_bytes
from offbeat_rollout_torch._families import read_architecture
from offbeat_rollout_torch._layers.delta_rule import DeltaRule, StateRows, apply_rule
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers with the rule, and between them one with attention."""
    return tiny_model(tmp_path_factory.mktemp("m"), "qwen3_5_text", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def model(folder):
    return reference_model(folder)


def ids_of(seed, num_tokens):
    return np.random.default_rng(seed).integers(3, 300, num_tokens).astype(np.int32)


def ask(name, prompt_ids, *, num_samples=1, max_tokens=30):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, num_samples=num_samples, params=params)


def assert_right(model, request, completions):
    for one in completions:
        assert logprob_errors(model, request.prompt_ids, one).max() < 1e-4


def token_after_token(query, key, value, decay, rate, states):
    """The rule as its paper defines it, in the format of its arguments."""
    out = []
    for t in range(query.shape[2]):
        states = states * decay[:, :, t, None, None].exp()
        found = torch.einsum("nhkv,nhk->nhv", states, key[:, :, t])
        change = rate[:, :, t, None] * (value[:, :, t] - found)
        states = states + torch.einsum("nhk,nhv->nhkv", key[:, :, t], change)
        out.append(torch.einsum("nhkv,nhk->nhv", states, query[:, :, t]))
    return torch.stack(out, 2), states


@pytest.mark.parametrize("lengths", [(1,), (5,), (64,), (65, 1, 1), (130, 63), (1, 200)])
def test_the_rule_is_that_of_its_definition_however_it_is_cut(lengths):
    """In float32, against float64, from a state that is there already."""
    draws, total = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def drawn(*shape):
        return torch.randn(2, 3, *shape, generator=draws, dtype=torch.float64)

    query, key = drawn(total, 8), torch.nn.functional.normalize(drawn(total, 8), dim=-1)
    value, decay, rate = drawn(total, 6), -drawn(total).exp(), drawn(total).sigmoid()
    states = drawn(8, 6)
    wanted, last = token_after_token(query, key, value, decay, rate, states)
    held, given = states.float(), (query, key, value, decay, rate)
    parts = zip(*(each.float().split(lengths, 2) for each in given), strict=True)
    found = [apply_rule(*part, held) for part in parts]
    torch.testing.assert_close(torch.cat(found, 2).double(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(held.double(), last, atol=2e-5, rtol=1e-4)


def test_rows_that_are_padded_to_each_other_keep_the_states_of_their_own_tokens(folder):
    """Rows of 5, 3 and 4 new tokens in one part, of which the second goes on from a state, and each in a part alone."""
    architecture = read_architecture(folder)
    rule, draws = DeltaRule(architecture, torch.empty(0)), torch.Generator().manual_seed(0)
    for tensor in (rule.filters_C1W, rule.log_decay_H, rule.step_bias_H, rule.norm_V):
        tensor.normal_(generator=draws)
    shape, counts, is_new = architecture.rule, (5, 3, 4), (True, False, True)
    width = shape.num_channels + shape.value_width + 2 * shape.num_value_heads
    inputs = torch.randn(sum(counts), width, generator=draws)
    together = torch.randn(1, 3, shape.held_size, generator=draws)
    alone = together.clone()
    found = rule(inputs, [StateRows(together, slice(0, 3), counts, is_new)], 0)
    parts = [
        rule(each, [StateRows(alone, slice(row, row + 1), (len(each),), (is_new[row],))], 0)
        for row, each in enumerate(inputs.split(counts))
    ]
    torch.testing.assert_close(found, torch.cat(parts), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"max_prefill_tokens": 32}, {"kv_cache_tokens": 800}], ids=["chunks", "set back"])
async def test_rows_of_different_lengths_join_and_leave(folder, model, open_engine, options):
    """In a place that another has left; with too little room for all, samples are set back and computed again."""
    requests = [
        ask("a", ids_of(1, 50), num_samples=3, max_tokens=40),
        ask("b", ids_of(2, 1), max_tokens=12),
        ask("c", ids_of(3, 90), max_tokens=5),
        ask("d", ids_of(4, 140), num_samples=2, max_tokens=25),
        ask("e", ids_of(5, 2), num_samples=2, max_tokens=70),
        ask("f", ids_of(6, 17), max_tokens=9),
    ]
    async with open_engine(folder, max_running=5, options=options) as engine:
        found = await asyncio.gather(*map(engine.generate, requests))
    for request, completions in zip(requests, found, strict=True):
        assert [len(one.ids) for one in completions] == [request.params.max_tokens] * request.num_samples
        assert_right(model, request, completions)


@pytest.mark.asyncio
async def test_a_group_computes_its_prompt_once(folder, model, open_engine):
    """A long one as well, and again after an update in the middle: states are copied where the samples part."""
    request = ask("a", ids_of(1, 150), num_samples=4, max_tokens=40)
    async with open_engine(folder) as engine:
        runner = engine._worker._runner
        assert_right(model, request, await engine.generate(request))
        assert runner.num_prefilled == 149
        task = asyncio.create_task(engine.generate(ask("b", ids_of(2, 150), num_samples=4, max_tokens=200)))
        while runner.num_tokens < 4 * 40 + 40:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        new = reference_model(folder)
        await engine.update_weights(FakeWeightStream(changed_weights(new, seed=1), 1), 1)
        drawn = [len(each.tokens) - 150 for each in runner.scheduler.running]
        before = runner.num_prefilled
        await engine.resume()
        found = await task
    assert len(drawn) == 4
    assert min(drawn) > 0, "the update came in the middle"
    assert runner.num_prefilled - before == 149 + sum(each + 1 for each in drawn)
    for one, old in zip(found, drawn, strict=True):
        assert logprob_errors(model, ids_of(2, 150), one)[:old].max() < 1e-4
        assert logprob_errors(new, ids_of(2, 150), one)[old:].max() < 1e-4


@pytest.mark.asyncio
async def test_kept_states_serve_what_goes_on_from_their_end_and_nothing_else(folder, model, open_engine):
    prompt = ids_of(9, 80)
    async with open_engine(folder, options={"kv_cache_tokens": 2**14}) as engine:
        runner, counts = engine._worker._runner, []

        async def generate(name, ids):
            before, request = runner.num_prefilled, ask(name, ids)
            found = await engine.generate(request)
            assert_right(model, request, found)
            counts.append(runner.num_prefilled - before)
            return found[0]

        first = await generate("first", prompt)
        await generate("next turn", np.concatenate((prompt, first.ids, ids_of(1, 20))))
        await generate("same prompt", prompt)
        await generate("part of it", np.concatenate((prompt, first.ids[:10], ids_of(2, 20))))
        assert counts == [80, 21, 80, 110]
        assert runner.scheduler.cache.kept_tokens > 0
        await engine.update_weights(FakeWeightStream(changed_weights(reference_model(folder), seed=1), 1), 1)
        assert runner.scheduler.cache.kept_tokens == 0


@pytest.mark.asyncio
async def test_states_are_counted_with_keys_and_values(folder, open_engine):
    """Blocks hold what the cache says, and no more than its budget."""
    async with open_engine(folder, max_running=8, options={"kv_cache_tokens": 2000}) as engine:
        runner, seen = engine._worker._runner, 0
        task = asyncio.create_task(engine.generate(ask("a", ids_of(1, 40), num_samples=12, max_tokens=60)))
        while not task.done():
            await asyncio.sleep(0.002)
            cache = runner.scheduler.cache
            blocks = [block for band in cache.bands for block in list(band.blocks)]
            seen = max(seen, sum(each.kv.nbytes + each.states.nbytes for each in blocks))
        await task
    assert 0 < seen <= (2000 + cache.block_tokens) * token_bytes(engine._architecture, torch.float32)
    assert cache.cost(64) == 64 + 32, "of each of two layers 4 * 16 * 24 + 160 * 3 numbers, and 128 of a token"


@pytest.mark.asyncio
async def test_static_rows_are_refused(folder, open_engine):
    with pytest.raises(ConfigError, match="static_rows compute no layers with the gated delta rule"):
        async with open_engine(folder, options={"static_rows": True}):
            pass
