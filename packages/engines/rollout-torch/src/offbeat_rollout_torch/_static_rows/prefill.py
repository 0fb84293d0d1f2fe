"""Chunks of prompts laid out for passes of few shapes, which can be compiled and recorded as decoding steps are.

A pass is a number of segments, each of `SEGMENT_TOKENS` tokens of one row. A chunk takes as many as it needs; its last
segment is filled up with tokens that nothing reads, and so is the pass, with empty segments, to one of a few sizes.
What is filled up is computed like the rest, and stored at the last place of a row, which no sample reads before it has
written it. A segment's keys, those before it and its own, are stored before it attends, so it may be the first of a
prompt, continue one, or follow another segment of its own chunk.

Shapes: Z segments of a pass, T tokens of a segment, B = Z T tokens of the pass, H query heads, K kv heads, G = H / K,
D head_dim, C places.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._attention import Chunk
from offbeat_rollout_torch._cache import Block, flat_positions
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._scheduler import Sample

SEGMENT_TOKENS: Final = 64
"""Queries of one row that matrix units multiply by its keys together. Fewer would read keys more often; more would
leave more of a short prompt's segment empty, and at 512 tokens a pass some of a device's processors without work."""
PASS_SEGMENTS: Final = (2, 4, 8, 16, 32)
"""Segments that passes have: 128 to 2,048 tokens, for each of which there is one recording. The next larger one costs
less than twice the tokens; beyond the largest, whose products fill any device, tokens take several passes. One segment
would be no shape of its own: torch makes another graph for a size of 1."""
MASKED_SEGMENTS: Final = 8
"""Segments of a pass at most where attention is masked: it copies the keys and values of a row for each of them."""
SEGMENT_NUMBERS: Final = 3
"""Integers of a segment before its tokens: the slot of its row, the place of its first token, how many it holds."""


class Segment(NamedTuple):
    """Tokens of one row, at most `SEGMENT_TOKENS`.

    Args:
        slot: of the row.
        start: place of the first token.
        ids: tokens.
    """

    slot: int
    start: int
    ids: Sequence[int]

    @property
    def end(self) -> int:
        """Place behind the last token."""
        return self.start + len(self.ids)

    def numbers(self) -> list[int]:
        """[3 + T], see `SEGMENT_NUMBERS`."""
        return [self.slot, self.start, len(self.ids), *self.ids, *[0] * (SEGMENT_TOKENS - len(self.ids))]


EMPTY: Final = Segment(0, 0, ())


def cut_segments(chosen: Iterable[tuple[Sample, Chunk]]) -> list[Segment]:
    """Return the segments of chunks, in their order."""
    segments = list[Segment]()
    for sample, chunk in chosen:
        start, end = chunk.row.cached, chunk.row.cached + chunk.num_tokens
        for at in range(start, end, SEGMENT_TOKENS):
            segments.append(Segment(chunk.row.slot, at, sample.tokens[at : min(at + SEGMENT_TOKENS, end)]))
    return segments


def passes(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Yield passes of at most so many segments, each filled up to one of the sizes of `PASS_SEGMENTS`."""
    for at in range(0, len(segments), most):
        some = list(segments[at : at + most])
        size = next(size for size in PASS_SEGMENTS if size >= len(some))
        yield some + [EMPTY] * (size - len(some))


class PassShape(NamedTuple):
    """Shape by which recorded passes differ.

    Args:
        num_segments: computed, empty ones among them.
        num_places: of each row that are attended to at most.
    """

    num_segments: int
    num_places: int


class Layout(NamedTuple):
    """Places of the tokens of a pass, on the device.

    Args:
        ids_B: int64 tokens; 0 where a segment is filled up.
        slots_Z: int64, of the row of each segment.
        places_ZT: int64 place of each token in its row; the last place where a segment is filled up.
        ends_Z: int64 place of the last token of each segment; 0 where it is empty.
    """

    ids_B: Tensor
    slots_Z: Tensor
    places_ZT: Tensor
    ends_Z: Tensor

    @classmethod
    def of(cls, numbers_ZF: Tensor, last_place: int) -> Self:
        """Read what `Segment.numbers` gives, one segment below the other.

        Args:
            numbers_ZF: [Z, 3 + T] int64.
            last_place: of a row, which no sample reads.
        """
        slots_Z, starts_Z, counts_Z = numbers_ZF[:, :SEGMENT_NUMBERS].unbind(1)
        token_T = torch.arange(SEGMENT_TOKENS, device=numbers_ZF.device)
        is_token_ZT = token_T < counts_Z[:, None]
        places_ZT = torch.where(is_token_ZT, starts_Z[:, None] + token_T, last_place)
        ends_Z = starts_Z + (counts_Z - 1).clamp(min=0)
        return cls(numbers_ZF[:, SEGMENT_NUMBERS:].flatten(), slots_Z, places_ZT, ends_Z)

    def token_slots(self) -> Tensor:
        """[B] int64, of each token's row."""
        return self.slots_Z[:, None].expand_as(self.places_ZT).flatten()


class SegmentAttention:
    """Tokens of a pass, attended with a mask over a copy of each segment's row, see `Attention`.

    Args:
        block: of the rows.
        layout: of the pass.
        num_places: attended to; no token that is read lies behind.
        architecture: of the model.
        dtype: of the model.
    """

    state_rows: Final = ()  # static rows are refused for the gated delta rule

    def __init__(
        self, block: Block, layout: Layout, num_places: int, architecture: Architecture, dtype: torch.dtype
    ) -> None:
        self._block, self._slots, self._num_places = block, layout.slots_Z, num_places
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self.positions_N = layout.places_ZT.flatten()
        self._store = flat_positions(block, layout.token_slots(), self.positions_N, self._num_kv_heads)
        hidden_ZTC = torch.arange(num_places, device=self._slots.device) > layout.places_ZT[..., None]
        mask = torch.zeros(hidden_ZTC.shape, dtype=dtype, device=self._slots.device)
        mask.masked_fill_(hidden_ZTC, -torch.inf)
        self._mask = mask.repeat(1, self._num_heads // self._num_kv_heads, 1)[:, None]

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        H, D = self._num_heads, qkv_NhD.shape[-1]
        self._block.flat[layer].index_copy_(0, self._store, qkv_NhD[:, H:].reshape(-1, D))
        return self.attend(layer, qkv_NhD[:, :H])

    def attend(self, layer: int, queries_BHD: Tensor) -> Tensor:
        """[B, H, D] to [B, H * D], where keys and values of these tokens are stored."""
        Z, K, (_, H, D) = len(self._slots), self._num_kv_heads, queries_BHD.shape
        keys, values = self._block.kv[layer, ..., : self._num_places, :].index_select(1, self._slots)
        # The query heads of a kv head are rows of its attention, which no kernel with a mask would otherwise group.
        queries = queries_BHD.view(Z, -1, K, H // K, D).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=self._mask)
        return out.view(queries.shape).permute(0, 3, 1, 2, 4).reshape(-1, H * D)
