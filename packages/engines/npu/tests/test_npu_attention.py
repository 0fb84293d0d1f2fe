"""Attention of a micro-batch by the fused operator: that of each sequence alone, however ranks share its queries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import ShapeError
from offbeat_device import AttendedTokens, open_device
from offbeat_npu import REFERENCE
from offbeat_npu._attention import PackAttention, RowAttention, shape_attention

IMAGE = 90
HEADS, KEYS, SIZE = 4, 2, 8
CPU = torch.device("cpu")


def tokens_of(lengths, rank=0, num_ranks=1, image_ids=frozenset()):
    """Sequences whose queries a rank holds in two chunks each, as context parallel ranks do."""

    def ranges(length):
        if num_ranks == 1:
            return ((0, length),)
        chunk = length // (2 * num_ranks)
        return tuple((number * chunk, (number + 1) * chunk) for number in (rank, 2 * num_ranks - 1 - rank))

    ids = torch.arange(sum(lengths)) % IMAGE
    ids[::5] = IMAGE
    return AttendedTokens(
        ids_T=ids, lengths=tuple(lengths), queries=tuple(map(ranges, lengths)), image_ids=frozenset(image_ids)
    )


def alone(query, key, value, lengths):
    parts = [torch.split(each.transpose(0, 1), lengths, 1) for each in (query, key, value)]
    how = {"is_causal": True, "enable_gqa": True, "scale": SIZE**-0.5}
    found = [torch.nn.functional.scaled_dot_product_attention(*each, **how) for each in zip(*parts, strict=True)]
    return torch.cat(found, 1).transpose(0, 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([1, 2]), st.booleans())
@settings(deadline=None)
def test_each_rank_finds_for_its_queries_what_a_sequence_alone_finds(counts, num_ranks, vision):
    lengths = [4 * count if num_ranks > 1 else count for count in counts]
    draw = torch.Generator().manual_seed(sum(lengths))
    query, key, value = (
        torch.randn(sum(lengths), count, SIZE, generator=draw, dtype=torch.float64) for count in (HEADS, KEYS, KEYS)
    )
    wanted = alone(query, key, value, lengths)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    for rank in range(num_ranks):
        tokens = tokens_of(lengths, rank, num_ranks, {IMAGE} if vision else ())
        held = [start + place for start, ranges in zip(starts, tokens.queries, strict=True)
                for first, last in ranges for place in range(first, last)]  # fmt: skip
        attention = shape_attention(tokens, REFERENCE, CPU)
        found = attention.attend(query[held], key, value, attention.mask, scale=SIZE**-0.5)
        torch.testing.assert_close(found, wanted[held], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("image_ids", "kind", "shape"), [((), PackAttention, [2048, 2048]), ((IMAGE,), RowAttention, [2, 1, 7, 7])]
)
def test_text_is_packed_and_a_model_with_vision_gets_padded_ids_and_their_mask(image_ids, kind, shape):
    attention = shape_attention(tokens_of([7, 3], image_ids=image_ids), REFERENCE, CPU)
    assert type(attention) is kind
    assert list(attention.mask.shape) == shape
    if image_ids:
        assert attention.batch.ids_BS.shape == (2, 7)
        assert torch.equal(attention.mask, attention.batch.hidden_B1SS)
        assert torch.equal(attention.batch.vision_BS, attention.batch.ids_BS == IMAGE)


@pytest.mark.parametrize("image_ids", [(), (IMAGE,)])
def test_a_mask_that_is_missing_or_of_other_ids_is_refused(image_ids):
    attention = shape_attention(tokens_of([7, 3], image_ids=image_ids), REFERENCE, CPU)
    query, key = torch.zeros(10, HEADS, SIZE), torch.zeros(10, KEYS, SIZE)
    for wrong in (None, torch.zeros(2, 1, 8, 8, dtype=torch.bool)):
        with pytest.raises(ShapeError, match="made with the ids of this micro-batch"):
            attention.attend(query, key, key, wrong, scale=1.0)


def test_a_cpu_shapes_nothing():
    device = open_device("cpu")
    assert not device.shapes_masks
    assert device.masked_attention(tokens_of([3])) is None
