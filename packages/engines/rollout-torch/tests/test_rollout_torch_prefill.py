"""Prompts of recorded static rows are computed in passes of few shapes, which store what eager prefill stores."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from offbeat_core import GenerateRequest, SamplingParams
from offbeat_device import open_device
from offbeat_rollout_torch._attention import Chunk, PrefillAttention
from offbeat_rollout_torch._decoder import DecoderWeights, decode_hidden
from offbeat_rollout_torch._families import read_architecture, rotations
from offbeat_rollout_torch._loading import load_weights
from offbeat_rollout_torch._static_rows import compiled
from offbeat_rollout_torch._static_rows.cache import StaticCache
from offbeat_rollout_torch._static_rows.compiled import CompiledStep
from offbeat_rollout_torch._static_rows.decoder import PlainStep, StaticDecoder
from offbeat_rollout_torch._static_rows.length_attention import KEY_BLOCK, SPLITS, segment_blocks
from offbeat_rollout_torch._static_rows.prefill import (
    MASKED_SEGMENTS,
    PASS_SEGMENTS,
    SEGMENT_TOKENS,
    PassShape,
    Segment,
    cut_segments,
    passes,
)
from offbeat_testing import tiny_model

MODEL_LEN = 448
"""Seven segments, which are three blocks of keys and a half: every second row begins within a block."""
CHUNKS = {0: (0, 70), 1: (130, 64), 3: (60, 5), 4: (127, 190), 6: (0, 1)}
"""By row: tokens before a chunk, and in it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("m"))


def request(name, prompt, num_samples=1, first=3, **params):
    ids = np.random.default_rng(first).integers(3, 300, 400).astype(np.int32)[:prompt]
    params = SamplingParams(**{"seed": 7 * prompt, "max_tokens": 6, "ignore_eos": True, **params})
    return GenerateRequest(request_id=name, prompt_ids=ids, num_samples=num_samples, params=params)


def mixes():
    """Prompts of one token and of several chunks, alone and in groups; others begin as one that has ended."""
    lengths = [(1, 2, 64, 65), (66, 129, 200, 400), (3, 300), (30,), (350, 250, 90), (5, 6, 7, 8, 9, 10, 11, 12)]
    kinds = ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8})
    return [
        [
            request(f"{i}-{j}", length, num_samples=1 + (i + j) % 3, first=j, **kinds[j % 3])
            for j, length in enumerate(each)
        ]
        for i, each in enumerate(lengths)
    ]


async def use(engine):
    """Return the completions of all mixes, one mix after the other, beside a sample that decodes on."""
    beside = asyncio.ensure_future(engine.generate(request("beside", 9, max_tokens=150)))
    found = []
    for mix in mixes():
        found += [one for group in await asyncio.gather(*map(engine.generate, mix)) for one in group]
    return found + await beside


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", [100, 600])
async def test_samples_are_those_of_eager_prefill_in_few_recorded_shapes(folder, run, device, limit, monkeypatch):
    """And a step computes no more tokens than it may, those that fill segments up among them."""
    prefill, planned = StaticDecoder.prefill, []

    def noted(self, weights, table, chosen):
        planned.append(len(cut_segments(chosen)))
        prefill(self, weights, table, chosen)

    monkeypatch.setattr(StaticDecoder, "prefill", noted)
    options = {"prefill_beside_decoding": limit, "max_prefill_tokens": limit, "kv_cache_tokens": 8 * MODEL_LEN}
    settings = {"max_model_len": MODEL_LEN, "max_running": 6}
    eager = await run(folder, use, options={**options, "graphs": False}, **settings)
    assert not device.recordings
    found = await run(folder, use, options=options, **settings)
    for one, other in zip(found, eager, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    shapes = Counter(each.work.args[0] for each in device.recordings)
    recorded = {shape for shape in shapes if isinstance(shape, PassShape)}
    assert max(shapes.values()) == 1, "a shape was recorded twice"
    assert recorded <= {
        PassShape(num_segments, num_places)
        for num_segments in PASS_SEGMENTS
        for num_places in (64, 128, 256, MODEL_LEN)
        if num_segments <= MASKED_SEGMENTS
    }
    assert len(recorded) > 2
    assert 1 < max(planned) <= -(-limit // SEGMENT_TOKENS)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12),
    st.sampled_from([MASKED_SEGMENTS, PASS_SEGMENTS[-1]]),
)
def test_passes_hold_each_token_once_and_in_order(chunks, most):
    chosen = [
        (SimpleNamespace(tokens=range(1000)), Chunk(SimpleNamespace(slot=slot, cached=cached), num_tokens))
        for slot, (cached, num_tokens) in enumerate(chunks)
    ]
    planned = list(passes(cut_segments(chosen), most))
    held = [(each.slot, token) for segments in planned for each in segments for token in each.ids]
    assert held == [(slot, at) for slot, (start, n) in enumerate(chunks) for at in range(start, start + n)]
    assert all(each.start == each.ids[0] for segments in planned for each in segments if each.ids)
    assert all(len(segments) in PASS_SEGMENTS and len(segments) <= most for segments in planned)
    assert all(any(each.ids for each in segments[len(segments) // 2 :]) or len(segments) == 2 for segments in planned)


def eager_prefill(weights, table, cache, chunks, samples):
    attention = PrefillAttention(chunks, weights.architecture, weights.final_norm)
    ids = [
        token
        for chunk, sample in zip(chunks, samples, strict=True)
        for token in sample.tokens[chunk.row.cached : chunk.row.cached + chunk.num_tokens]
    ]
    decode_hidden(weights, torch.tensor(ids), table, attention)


@pytest.mark.parametrize("step", [PlainStep(), CompiledStep(SPLITS, prefills=True)], ids=["plain", "compiled"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_pass_stores_what_eager_prefill_stores_and_nothing_else(step, family, tmp_path, monkeypatch):
    """Rows begin and continue; other rows, and places before and behind, keep what they hold."""
    monkeypatch.setattr(compiled, "_fast", lambda function: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    folder, device = tiny_model(tmp_path / "m", family), open_device("cpu")
    weights = DecoderWeights(read_architecture(folder), torch.float32, device.torch_device, pack=False)
    load_weights(weights, folder)
    table, draws = rotations(weights.architecture, MODEL_LEN), torch.Generator().manual_seed(0)
    with torch.inference_mode():
        cache = StaticCache(weights.architecture, 8, MODEL_LEN, 8 * MODEL_LEN, weights.final_norm)
        rows = [cache.add(10) for _ in range(7)]
        cache.allocate()
        cache.block.kv.normal_(generator=draws)
        for index, (cached, _) in CHUNKS.items():
            rows[index].cached = cached
        before, chunks = cache.block.kv.clone(), [Chunk(rows[index], num) for index, (_, num) in CHUNKS.items()]
        tokens = torch.randint(3, 300, (8, MODEL_LEN), generator=draws).tolist()
        samples = [SimpleNamespace(tokens=tokens[index]) for index in CHUNKS]
        for chunk, sample in zip(chunks, samples, strict=True):  # one by one: groups of chunks lie in order
            eager_prefill(weights, table, cache, [chunk], [sample])
        wanted = cache.block.kv.clone()
        cache.block.kv.copy_(before)
        decoder = StaticDecoder(cache, device, MODEL_LEN, step, records=False)
        decoder.prefill(weights, table, list(zip(samples, chunks, strict=True)))
    found = cache.block.kv.clone()
    for index, (cached, num_tokens) in CHUNKS.items():
        new = found[:, :, index, :, cached : cached + num_tokens]
        torch.testing.assert_close(new, wanted[:, :, index, :, cached : cached + num_tokens], atol=1e-4, rtol=0)
        found[:, :, index, :, cached : cached + num_tokens] = before[:, :, index, :, cached : cached + num_tokens]
    changed = (found != before).any(0).any(0).any(1).any(-1).nonzero().tolist()
    assert {place for _, place in changed} <= {MODEL_LEN - 1}, f"places of rows that were overwritten: {changed}"
    assert found.isfinite().all()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, MODEL_LEN - 1)), min_size=1, max_size=6),
    st.sampled_from([(4, 2), (6, 6), (8, 1), (3, 3)]),
)
def test_segments_read_the_blocks_that_hold_keys_of_their_row(segments, sizes):
    """Blocks up to the place of the last token, and none behind."""
    num_heads, num_kv_heads = sizes
    slots, ends = torch.tensor(segments).t()
    listed = -(-MODEL_LEN // KEY_BLOCK) + 1
    first, counts, blocks = segment_blocks(slots, ends, num_heads, num_kv_heads, MODEL_LEN, listed)
    assert blocks.is_contiguous()
    for index, (slot, end) in enumerate(segments):
        for head in range(num_heads):
            start = (slot * num_kv_heads + head * num_kv_heads // num_heads) * MODEL_LEN
            assert first[index, head] == start
            num_read = int(counts[index, head, 0])
            assert num_read <= listed
            read = blocks[index, head, 0, :num_read].tolist()
            assert read == list(range(start // KEY_BLOCK, (start + end) // KEY_BLOCK + 1))


def test_numbers_of_a_segment_are_as_many_whatever_it_holds():
    assert {len(Segment(3, 5, [1] * num).numbers()) for num in (0, 1, SEGMENT_TOKENS)} == {3 + SEGMENT_TOKENS}
