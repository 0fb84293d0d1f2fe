"""Attention of tokens that see each other, such as those of an image: a softmax under a mask, by each kernel."""

import numpy as np
import pytest
import torch
import varlen_on_cpu  # noqa: F401  adds the kernels

from offbeat_engine_torch._layers.attention import packed_attention
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_training import Segment

SEGMENTS = (
    *(Segment(start=0, length=12), Segment(start=12, length=7, parent=0), Segment(start=19, length=4, parent=0)),
    *(Segment(start=23, length=6), Segment(start=29, length=9)),
)
BLOCKS = ((2, 8), (9, 11), (14, 17), (23, 29), (30, 34))
"""Two in a shared prompt, one in a completion, one that is a segment of its own, and one after the first token."""
WHOLE = ((Segment(start=0, length=6),), ((0, 6),))
"""A pack with nothing but one image."""


def attend_by_mask(tensors, segments, blocks, sinks, window):
    """[1, T, H, D], in float64."""
    query, key, value = (each.double() for each in tensors)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    num_tokens = query.shape[2]
    block, seen = np.full(num_tokens, -1), np.zeros((num_tokens, num_tokens), bool)
    for number, (start, stop) in enumerate(blocks):
        block[start:stop] = number
    for segment in segments:
        own = list(range(segment.start, segment.start + segment.length))
        parent = segments[segment.parent] if segment.parent >= 0 else None
        before = list(range(parent.start, parent.start + parent.length)) if parent else []
        for place, token in enumerate([*before, *own]):
            for other_place, other in enumerate([*before, *own]):
                sees = other_place <= place or (block[token] == block[other] >= 0)
                seen[token, other] |= token in own and sees and (window is None or other_place > place - window)
    scores = (query[0] @ key[0].mT) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, num_tokens, 1)], -1)
    return (scores.softmax(-1)[..., :num_tokens] @ value[0]).transpose(0, 1)[None]


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("in_windows_alone", [False, True], ids=["everywhere", "in windows"])
@pytest.mark.parametrize(("segments", "blocks"), [(SEGMENTS, BLOCKS), WHOLE], ids=["pack", "image"])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [("split", torch.float64, 1e-9), ("rows", torch.float64, 1e-9), ("varlen", torch.bfloat16, 0.03)],
    ids=str,
)
def test_blocks_are_seen_whole(kernel, dtype, tolerance, window, segments, blocks, in_windows_alone, has_sinks):
    """Its output, and the gradients of queries, keys, values and sinks."""
    plan = AttentionPlan(segments, torch.device("cpu"), blocks=blocks, in_windows_alone=in_windows_alone)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, plan.num_tokens, 16) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    sinks = sinks if has_sinks else None
    weight = torch.randn(1, plan.num_tokens, 4, 16, generator=draw, dtype=torch.float64)

    def compared(out):
        return [out, *torch.autograd.grad((out.double() * weight).sum(), [*tensors, *([sinks] if has_sinks else [])])]

    more = {"sliding_window": window, "s_aux": sinks, **plan.arguments(kernel)}
    found = compared(packed_attention(None, *tensors, **more)[0])
    hidden = in_windows_alone and window is None
    wanted = compared(attend_by_mask(tensors, segments, () if hidden else blocks, sinks, window))
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other.double()).abs().max() <= tolerance * other.double().abs().max()


def test_padded_rows_of_blocks_have_finite_gradients():
    """Rows of one call are padded to the longest; under a window padding must still see a key."""
    blocks = ((0, 8), (8, 10), (12, 20))
    segments = (Segment(start=0, length=8), Segment(start=8, length=4), Segment(start=12, length=8))
    plan = AttentionPlan(segments, torch.device("cpu"), blocks=blocks)
    tensors = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    out = packed_attention(None, *tensors, sliding_window=2, **plan.arguments("rows"))[0]
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))
