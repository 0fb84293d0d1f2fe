"""Attention over the keys and values of samples: one new token of every sample, or many new tokens of some.

Shapes: N tokens of a pass (packed), H query heads, K kv heads, G = H / K, D head_dim, C cached tokens of a row,
P tokens of a prefix, n rows of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_device import exact_attention
from offbeat_rollout_torch._cache import Band, Block, Row, flat_positions
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._layers.delta_rule import StateRows

FUSED_UP_TO_TOKENS: Final = 256
"""Rows times tokens of a block up to which torch's fused attention decodes faster in bfloat16 on a CPU than two
products, which cost more to call. 9 heads of 64, 30 layers, processor time: 0.9 ms against 2.5 ms for a row of 64
tokens, 1.4 against 3.3 ms for two, 2.0 against 2.6 ms for a row of 256; but 7 against 4.2 ms for 8 rows of 128."""


class Attention(Protocol):
    """Stores the pass's keys and values and attends.

    `state_rows` are the rows of its tokens in layers with the gated delta rule, one part of the pass after the other.
    """

    positions_N: Tensor

    @property
    def state_rows(self) -> Sequence[StateRows]: ...

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        """[N, H + 2 K, D], positions applied, to [N, H * D]."""


class DecodeAttention:
    """One new token for every row of every band, in the order of the bands' rows; `exact`: see `exact_attention`."""

    def __init__(self, bands: Sequence[Band], architecture: Architecture, like: Tensor, *, exact: bool = False) -> None:
        self._exact = exact
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self._scale = architecture.head_dim**-0.5
        self._parts = [self._plan(block, rows, like) for band in bands for block, rows in band.used_blocks]
        self.positions_N = torch.cat([part.positions for part in self._parts])
        self.state_rows = [
            StateRows(block.states, slice(0, len(rows)), [1] * len(rows), [not row.end for row in rows])
            for band in bands
            for block, rows in band.used_blocks
            if architecture.rule
        ]

    def _plan(self, block: Block, rows: Sequence[Row], like: Tensor) -> "_DecodePart":
        cached, prefix = [row.cached for row in rows], rows[0].band.prefix
        places = torch.tensor(cached, device=like.device)
        store = flat_positions(block, torch.arange(len(cached), device=like.device), places, self._num_kv_heads)
        # Multiples of 16 keep the number of different shapes small: some kernels are compiled per shape.
        length = min(block.capacity, -(-(max(cached) + 1) // 16) * 16)
        on_cpu = like.is_cpu and like.dtype == torch.bfloat16
        is_small = on_cpu and len(rows) * length <= FUSED_UP_TO_TOKENS and prefix is None
        if on_cpu and not is_small:
            length = block.capacity  # oneDNN copies all keys and values at each step unless they lie without gaps
        hidden = torch.arange(length, device=like.device) > places[:, None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat_interleave(self._num_kv_heads, 0)[:, None]
        positions = places + rows[0].band.prefix_tokens
        return _DecodePart(block, positions, store, mask, prefix.block if prefix else None, is_small, cached)

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        outputs, start = [], 0
        for part in self._parts:
            end = start + len(part.positions)
            outputs.append(self._attend(layer, qkv_NhD[start:end], part))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, qkv: Tensor, part: "_DecodePart") -> Tensor:
        n, H, K, D = qkv.shape[0], self._num_heads, self._num_kv_heads, qkv.shape[-1]
        # Stored before the products: the mask lets a token see itself, too.
        part.block.flat[layer].index_copy_(0, part.store, qkv[:, H:].reshape(-1, D))
        if self._exact:
            keys, values = part.block.kv[layer][:, :n]
            return exact_attention(qkv[:, :H, None], keys, values, part.cached, self._scale).view(n, H * D)
        # The G query heads of a kv head are the rows of one small product: keys are read once and never repeated.
        queries = qkv[:, :H].reshape(n * K, H // K, D)
        length = part.mask.shape[-1]
        keys, values = part.block.keys[layer][: n * K, :length], part.block.values[layer][: n * K, :length]
        if part.is_small:
            q, k, v = (x.view(n, K, -1, D) for x in (queries, keys, values))
            mask = part.mask.view(n, K, 1, length)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale).reshape(n, H * D)
        scores = torch.baddbmm(part.mask, queries, keys.transpose(1, 2), alpha=self._scale)
        if part.prefix is None:
            return torch.bmm(torch.softmax(scores, -1), values).view(n, H * D)
        prefix_keys, prefix_values = part.prefix.keys[layer], part.prefix.values[layer]
        return self._attend_with_prefix(queries, scores, values, prefix_keys, prefix_values)

    def _attend_with_prefix(
        self, queries: Tensor, scores: Tensor, values: Tensor, prefix_keys: Tensor, prefix_values: Tensor
    ) -> Tensor:
        """Attend to a prefix, too, which is read once for all rows: their queries are the rows of one product.

        Args:
            queries: [n * K, G, D].
            scores: [n * K, G, C] of the rows' own tokens.
            values: [n * K, C, D] of these.
            prefix_keys: [K, P, D].
            prefix_values: [K, P, D].

        Returns:
            [n, H * D]
        """
        (K, P, D), G = prefix_keys.shape, queries.shape[1]
        n = len(queries) // K
        by_head = queries.view(n, K, G, D).transpose(0, 1).reshape(K, n * G, D)
        # beta = 0: of baddbmm only `alpha` is wanted, which scales within the product.
        of_prefix = torch.baddbmm(by_head.new_zeros(1), by_head, prefix_keys.transpose(1, 2), beta=0, alpha=self._scale)
        own = scores.view(n, K, G, -1).transpose(0, 1)
        # One softmax over both, as if prefix and own tokens lay in one row.
        weights = torch.softmax(torch.cat((of_prefix.view(K, n, G, P), own), -1), -1)
        seen = torch.bmm(weights[..., :P].reshape(K, n * G, P), prefix_values).view(K, n, G, D).transpose(0, 1)
        own_weights = weights[..., P:].transpose(0, 1).reshape(n * K, G, -1)
        return torch.baddbmm(seen.reshape(n * K, G, D), own_weights, values).view(n, -1)


@dataclass(frozen=True)
class _DecodePart:
    """One block's share of a decoding step.

    Args:
        block: holds n rows.
        positions: [n] of the new tokens in their sequences.
        store: where their keys and values go, see `flat_positions`.
        mask: [n * K, 1, C], added to the scores.
        prefix: the block that holds what comes before these rows.
        is_small: one fused operator takes less time than two products, see `FUSED_UP_TO_TOKENS`.
        cached: tokens of each row before the new one.
    """

    block: Block
    positions: Tensor
    store: Tensor
    mask: Tensor
    prefix: Block | None
    is_small: bool
    cached: list[int]


@dataclass(frozen=True)
class Chunk:
    """A run of `num_tokens` new tokens of one row, after those cached."""

    row: Row
    num_tokens: int


class PrefillAttention:
    """Several new tokens for some rows. `chunks` must come sorted by `prefill_group`."""

    def __init__(
        self, chunks: Sequence[Chunk], architecture: Architecture, like: Tensor, *, exact: bool = False
    ) -> None:
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        positions = [torch.arange(c.row.end, c.row.end + c.num_tokens) for c in chunks]
        self.positions_N = torch.cat(positions).to(like.device)
        groups: dict[PrefillKey, list[Chunk]] = {}
        for chunk in chunks:
            groups.setdefault(prefill_group(chunk), []).append(chunk)
        self._groups, start = [], 0
        for members in groups.values():
            num_tokens = sum(chunk.num_tokens for chunk in members)
            group = _PrefillGroup(
                members, self.positions_N[start : start + num_tokens], self._num_kv_heads, like, exact
            )
            self._groups.append((slice(start, start + num_tokens), group))
            start += num_tokens
        self.state_rows = [group.state_rows() for _, group in self._groups] if architecture.rule else []

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        outputs = [group.attend(layer, qkv_NhD[part], self._num_heads) for part, group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


PrefillKey = tuple[int, int, int]


def prefill_group(chunk: Chunk) -> PrefillKey:
    """Chunks of one block and of similar length are padded to each other: by less than a factor of 2."""
    row = chunk.row
    return row.band.number, row.index // row.band.block_rows, chunk.num_tokens.bit_length()


class _PrefillGroup:
    def __init__(
        self, chunks: Sequence[Chunk], positions: Tensor, num_kv_heads: int, like: Tensor, exact: bool
    ) -> None:
        self._block, self._num_kv_heads, self._exact = chunks[0].row.block, num_kv_heads, exact
        counts = [chunk.num_tokens for chunk in chunks]
        # Numbers that shapes depend on are made here and sent: read from the device, they would wait for all its work.
        slots = torch.tensor([chunk.row.slot for chunk in chunks])
        self._num, self._width = len(chunks), max(counts)
        token_slots = slots.repeat_interleave(torch.tensor(counts)).to(like.device)
        band = chunks[0].row.band
        self._prefix = band.prefix.block if band.prefix else None
        places = positions - band.prefix_tokens
        self._store = flat_positions(self._block, token_slots, places, num_kv_heads)
        self._length = max(chunk.row.cached + chunk.num_tokens for chunk in chunks)
        first, last = chunks[0].row.slot, chunks[-1].row.slot
        in_order = all(chunk.row.slot == first + i for i, chunk in enumerate(chunks))
        # A slice is a view, where an index copies all keys.
        self._slots = slice(first, last + 1) if in_order else slots.to(like.device)
        self._padding = None
        if min(counts) < self._width:
            is_token = torch.arange(self._width) < torch.tensor(counts)[:, None]
            self._padding = is_token.view(-1).nonzero()[:, 0].to(like.device)
        starts = [chunk.row.end for chunk in chunks]
        self._counts, self._starts = counts, starts
        self._mask = None
        # Else all rows begin at 0 and are equally long, and `is_causal` alone says what is seen.
        if self._padding is not None or any(starts):
            self._mask = self._causal_mask(torch.tensor(starts, device=like.device), like)

    def state_rows(self) -> StateRows:
        return StateRows(self._block.states, self._slots, self._counts, [not start for start in self._starts])

    def _causal_mask(self, starts: Tensor, like: Tensor) -> Tensor:
        """[n, 1, width, length]: new token t of a row sees what is cached and the new ones up to itself."""
        seen = starts[:, None] + torch.arange(self._width, device=like.device)
        length = self._length + (self._prefix.capacity if self._prefix else 0)
        hidden = torch.arange(length, device=like.device) > seen[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None]

    def attend(self, layer: int, qkv: Tensor, num_heads: int) -> Tensor:
        """[tokens of the group, H + 2 K, D] to [tokens of the group, H * D]."""
        D = qkv.shape[-1]
        self._block.flat[layer].index_copy_(0, self._store, qkv[:, num_heads:].reshape(-1, D))
        queries = qkv[:, :num_heads]
        if self._padding is not None:
            padded = qkv.new_zeros(self._num * self._width, num_heads, D)
            queries = padded.index_copy_(0, self._padding, queries)
        queries = queries.view(self._num, self._width, num_heads, D).transpose(1, 2)
        kv = self._block.kv[layer][:, self._slots, :, : self._length]
        if self._prefix is not None:
            kv = torch.cat((self._prefix.kv[layer].expand(-1, self._num, -1, -1, -1), kv), -2)
        if self._exact:
            out = exact_attention(queries, kv[0], kv[1], self._starts, D**-0.5)
        else:
            out = F.scaled_dot_product_attention(
                queries, kv[0], kv[1], attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=True
            )
        out = out.transpose(1, 2).reshape(self._num * self._width, num_heads * D)
        return out if self._padding is None else out.index_select(0, self._padding)
