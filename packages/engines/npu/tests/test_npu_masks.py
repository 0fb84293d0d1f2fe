"""Ids and masks: one shape, causal, nothing of another sequence seen, and no row of scores empty."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import ConfigError, ShapeError
from offbeat_npu import REFERENCE, PackedBatch, PaddedBatch, VisionBatch, dense_batch, packed_batch, vision_batch

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def sequences(lengths):
    return [list(range(1, length + 1)) for length in lengths]


@given(LENGTHS, st.sampled_from([1, 2, 8]))
def test_a_padded_batch_shows_each_token_what_comes_before_it(lengths, multiple_of):
    batch = dense_batch(sequences(lengths), pad_id=0, multiple_of=multiple_of)
    rows, size = batch.ids_BS.shape
    assert (rows, size % multiple_of) == (len(lengths), 0)
    assert size < max(lengths) + multiple_of
    for row, length in enumerate(lengths):
        for query in range(size):
            seen = (~batch.hidden_B1SS[row, 0, query]).nonzero().flatten().tolist()
            assert seen == (list(range(query + 1)) if query < length else [query])


@given(LENGTHS, st.sampled_from([1, 4]))
def test_a_pack_ends_where_its_sequences_do(lengths, multiple_of):
    pack = packed_batch(sequences(lengths), pad_id=0, multiple_of=multiple_of)
    assert len(pack.ids_T) % multiple_of == 0
    starts = [0, *pack.ends][: pack.num_sequences]
    cut = [pack.ids_T[start:end].tolist() for start, end in zip(starts, pack.ends, strict=False)]
    assert cut == sequences(lengths)
    assert pack.ends[-1] == len(pack.ids_T)


def test_the_mask_of_a_pack_hides_what_comes_later_and_no_token_from_itself():
    """The operator that stands in here looks at its size alone."""
    place = torch.arange(2048)
    assert torch.equal(packed_batch([[1, 2]], pad_id=0).hidden, place[:, None] < place)


@given(LENGTHS)
def test_both_forms_attend_alike(lengths):
    """The operator on a pack, and on a padded batch with its mask, give each sequence the same."""
    heads, keys, size = 4, 2, 8
    pack, batch = packed_batch(sequences(lengths), pad_id=0), dense_batch(sequences(lengths), pad_id=0)
    draw = torch.Generator().manual_seed(sum(lengths))
    query_THD, key_TKD, value_TKD = (
        torch.randn(len(pack.ids_T), count, size, generator=draw) for count in (heads, keys, keys)
    )
    packed = REFERENCE.npu_fusion_attention(
        *(query_THD, key_TKD, value_TKD, heads, "TND"),
        atten_mask=pack.hidden,
        scale=size**-0.5,
        actual_seq_qlen=pack.ends,
        actual_seq_kvlen=pack.ends,
        sparse_mode=pack.sparse_mode,
    )[0]
    padded = [
        torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)
        for x in (query_THD, key_TKD, value_TKD)
    ]
    dense = REFERENCE.npu_fusion_attention(
        *padded, heads, "BNSD", atten_mask=batch.hidden_B1SS, scale=size**-0.5, sparse_mode=batch.sparse_mode
    )[0]
    assert not dense.isnan().any()
    for row, (part, length) in enumerate(zip(packed.split(lengths), lengths, strict=True)):
        torch.testing.assert_close(dense[row].transpose(0, 1)[:length], part)
        rows = [x[row : row + 1, :, :length] for x in padded]
        expected = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(part, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_images_are_marked_and_padding_is_none_of_them():
    batch = vision_batch([[5, 90, 90, 6], [91]], vision_ids={90, 91}, pad_id=0, multiple_of=3)
    assert batch.ids_BS.shape == batch.vision_BS.shape == (2, 6)
    assert batch.vision_BS.nonzero().tolist() == [[0, 1], [0, 2], [1, 0]]
    with pytest.raises(ConfigError, match="pad_id 90 is a placeholder"):
        vision_batch([[5]], vision_ids={90}, pad_id=90)


@pytest.mark.parametrize("make", [dense_batch, packed_batch])
@pytest.mark.parametrize("wrong", [[], [[1], []]])
def test_nothing_to_pad_is_refused(make, wrong):
    with pytest.raises(ConfigError, match="at least one token"):
        make(wrong, pad_id=0)


def test_shapes_that_do_not_belong_together_are_refused():
    ids, mask = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"need a mask \[2, 1, 4, 4\].*pad both together"):
        PaddedBatch(ids, mask[..., :3], (4, 4))  # padded ids, and a mask that was not
    with pytest.raises(ShapeError, match="like the ids"):
        VisionBatch(ids, mask, (4, 4), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="increasing ends"):
        PackedBatch(torch.zeros(4, dtype=torch.int64), (2, 5), packed_batch([[1]], pad_id=0).hidden, 2)
