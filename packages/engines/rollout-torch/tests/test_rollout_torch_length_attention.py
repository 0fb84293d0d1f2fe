"""Attention by length sees the keys up to each row's place, and reads no block of keys behind it."""

import shutil
from itertools import chain

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_device import prepare_compiler
from offbeat_rollout_torch._cache import Block
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._static_rows import compiled
from offbeat_rollout_torch._static_rows.compiled import LengthAttention, SegmentLengthAttention
from offbeat_rollout_torch._static_rows.decoder import places_mask
from offbeat_rollout_torch._static_rows.length_attention import (
    BLOCKS_TO_FILL,
    KEY_BLOCK,
    SPLITS,
    choose_splits,
    count_listed,
    segment_blocks,
    split_blocks,
)
from offbeat_rollout_torch._static_rows.prefill import EMPTY, SEGMENT_TOKENS, Layout, Segment, SegmentAttention

NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_PLACES = 576
"""Places of a row: four blocks of keys and a half."""
EDGES = [0, KEY_BLOCK - 1, KEY_BLOCK, 2 * KEY_BLOCK - 1, 2 * KEY_BLOCK, NUM_PLACES - 1]


def architecture(num_kv_heads, num_queries, head_dim):
    """One layer with so many queries for each kv head; nothing else of it matters here."""
    return Architecture(
        family="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=num_kv_heads * num_queries,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        tied=True,
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_positions=NUM_PLACES,
    )


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    prepare_compiler()
    torch._dynamo.reset()
    compiled._fast.cache_clear()
    yield
    compiled._fast.cache_clear()


@pytest.fixture
def traced(fresh, monkeypatch):
    """Trace with torch's tracer, and run what it has traced without generating code."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile_(f, backend="aot_eager", **how))


def attend_both_ways(places, num_splits, sizes, dtype, spoiled=False):
    """Attend with a mask and by length; blocks of keys and values that should not be read are NaN, if they are so."""
    (num_kv_heads, num_queries, head_dim), num_rows = sizes, len(places)
    numbers, like = torch.Generator().manual_seed(num_rows), torch.empty(0, dtype=dtype)
    block = Block(num_rows + 2, NUM_PLACES, architecture(num_kv_heads, num_queries, head_dim), like)
    block.kv.normal_(generator=numbers)
    queries = torch.randn(num_rows, num_kv_heads * num_queries, head_dim, generator=numbers).to(dtype)
    at = torch.tensor(places)
    keys, values = block.kv[0, :, :num_rows]
    grouped, mask = queries.view(num_rows, num_kv_heads, -1, head_dim), places_mask(at, NUM_PLACES, dtype)
    wanted = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    for row, place in enumerate(places) if spoiled else ():
        block.kv[:, :, row, :, (place // KEY_BLOCK + 1) * KEY_BLOCK :] = torch.nan
    attention = LengthAttention(block, *split_blocks(at, num_kv_heads, num_splits, NUM_PLACES))
    found = attention.attend(0, queries)
    torch.testing.assert_close(found, wanted.flatten(1), atol=ROUNDING[dtype], rtol=0)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_values_are_those_of_masked_attention(num_splits, dtype, traced):
    """For query heads of any number, rows of any number and any length, among them those at the edges of blocks."""
    with torch.inference_mode():
        for sizes in ((3, 1, 16), (2, 7, 32)):
            for places in (EDGES, [130], [3, 300]):
                attend_both_ways(places, num_splits, sizes, dtype)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, (2, 3, 64)),
        pytest.param(torch.bfloat16, (2, 8, 128), marks=pytest.mark.nightly),
        # torch 2.13's code for processors does not compile for one head of keys and one of queries.
        pytest.param(torch.bfloat16, (2, 1, 32), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_generated_code_reads_no_block_behind_a_row(dtype, sizes, fresh):
    """In code for a processor, which has no splits."""
    draws = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        attend_both_ways(EDGES, 1, sizes, dtype, spoiled=True)
        for num_rows in (2, 9, 31):
            places = torch.randint(0, NUM_PLACES, (num_rows,), generator=draws).tolist()
            attend_both_ways(places, 1, sizes, dtype, spoiled=True)


@NEEDS_COMPILER
def test_generated_code_reads_no_block_of_another_row_or_behind_a_segment(fresh):
    """Rows begin within blocks, as they are four and a half long."""
    sizes = num_kv_heads, num_queries, head_dim = 2, 2, 32
    segments = [Segment(0, 0, [1] * 64), Segment(0, 64, [1] * 9), Segment(3, 100, [1] * 64), Segment(2, 511, [1] * 5)]
    block = Block(5, NUM_PLACES, architecture(*sizes), torch.empty(0))
    numbers = torch.Generator().manual_seed(0)
    block.kv.normal_(generator=numbers)
    layout = Layout.of(torch.tensor([each.numbers() for each in (*segments, EMPTY)]), NUM_PLACES - 1)
    lists = layout.slots_Z, layout.ends_Z, num_kv_heads * num_queries, num_kv_heads, NUM_PLACES, count_listed(block)
    queries = torch.randn(layout.ids_B.numel(), num_kv_heads * num_queries, head_dim, generator=numbers)
    wanted = SegmentAttention(block, layout, NUM_PLACES, architecture(*sizes), torch.float32).attend(0, queries)
    flat, held = block.kv.view(2, -1, head_dim), torch.zeros(block.kv[0, 0].numel() // head_dim, dtype=torch.bool)
    for segment in (*segments, EMPTY):
        for head in range(num_kv_heads):
            first = (segment.slot * num_kv_heads + head) * NUM_PLACES
            last = first + max(segment.end - 1, 0)
            held[first // KEY_BLOCK * KEY_BLOCK : (last // KEY_BLOCK + 1) * KEY_BLOCK] = True
    assert not held.all()
    flat[:, ~held] = torch.nan
    with torch.inference_mode():
        found = SegmentLengthAttention(block, layout.places_ZT, *segment_blocks(*lists)).attend(0, queries)
    for index, segment in enumerate(segments):
        tokens = slice(index * SEGMENT_TOKENS, index * SEGMENT_TOKENS + len(segment.ids))
        torch.testing.assert_close(found[tokens], wanted[tokens], atol=2e-5, rtol=0)
    assert found.isfinite().all()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 1100), min_size=1, max_size=6), st.integers(1, 4), st.sampled_from(SPLITS))
def test_splits_share_the_blocks_up_to_a_row_s_place(places, num_kv_heads, num_splits):
    """Each of them once, and no other."""
    at, counts, blocks = split_blocks(torch.tensor(places), num_kv_heads, num_splits, 1101)
    assert all(each.is_contiguous() for each in (at, counts, blocks))
    assert at.tolist() == [place for place in places for _ in range(num_kv_heads)]
    for row in range(len(counts)):
        read = [blocks[row, split, : counts[row, split]].tolist() for split in range(num_splits)]
        assert sorted(chain.from_iterable(read)) == list(range(places[row // num_kv_heads] // KEY_BLOCK + 1))
        lengths = [len(each) for each in read]
        assert max(lengths) - min(lengths) <= 1, "splits are unequal"


@given(st.integers(1, 500), st.integers(1, 16))
def test_rows_are_split_only_where_they_leave_a_device_idle(num_rows, num_kv_heads):
    chosen = choose_splits(num_rows, num_kv_heads)
    fewer = [n for n in SPLITS if n < chosen]
    assert all(n * num_rows * num_kv_heads < BLOCKS_TO_FILL for n in fewer)
    assert chosen == SPLITS[-1] or chosen * num_rows * num_kv_heads >= BLOCKS_TO_FILL
    assert choose_splits(num_rows, num_kv_heads, (1,)) == 1
