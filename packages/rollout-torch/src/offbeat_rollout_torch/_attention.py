"""Attention of one forward pass, planned once and run in every layer.

Shapes: N tokens of the pass (packed), H query heads, K kv heads, G = H / K, D head_dim, C cached tokens read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._cache import Band, Block, Row, flat_positions
from offbeat_rollout_torch._families import Architecture


class Attention(Protocol):
    """Stores the pass's keys and values and attends."""

    positions_N: Tensor

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        """[N, H + 2 K, D], positions applied, to [N, H * D]."""
        ...


class DecodeAttention:
    """One new token for every row of every band, in the order of the bands' rows."""

    def __init__(self, bands: Sequence[Band], architecture: Architecture, like: Tensor) -> None:
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self._scale = architecture.head_dim**-0.5
        self._parts = [self._plan(block, rows, like) for band in bands for block, rows in band.used_blocks]
        self.positions_N = torch.cat([part.positions for part in self._parts])

    def _plan(self, block: Block, rows: Sequence[Row], like: Tensor) -> "_DecodePart":
        cached = [row.cached for row in rows]
        positions = torch.tensor(cached, device=like.device)
        store = flat_positions(block, torch.arange(len(cached), device=like.device), positions, self._num_kv_heads)
        # Multiples of 16 keep the number of different shapes small: some kernels are compiled per shape.
        length = min(block.capacity, -(-(max(cached) + 1) // 16) * 16)
        hidden = torch.arange(length, device=like.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
        return _DecodePart(block, positions, store, mask.repeat_interleave(self._num_kv_heads, 0)[:, None])

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        outputs, start = [], 0
        for part in self._parts:
            end = start + len(part.positions)
            outputs.append(self._attend(layer, qkv_NhD[start:end], part))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, qkv: Tensor, part: "_DecodePart") -> Tensor:
        n, H, K, D = qkv.shape[0], self._num_heads, self._num_kv_heads, qkv.shape[-1]
        part.block.flat[layer].index_copy_(0, part.store, qkv[:, H:].reshape(-1, D))
        # The G query heads of a kv head are the rows of one small product: keys are read once and never repeated.
        queries = qkv[:, :H].reshape(n * K, H // K, D)
        length = part.mask.shape[-1]
        keys, values = part.block.keys[layer][: n * K, :length], part.block.values[layer][: n * K, :length]
        scores = torch.baddbmm(part.mask, queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values).view(n, H * D)


@dataclass(frozen=True)
class _DecodePart:
    """One block's share of a decoding step: n rows, [n] positions, where to store, [n * K, 1, C] additive mask."""

    block: Block
    positions: Tensor
    store: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Chunk:
    """A run of `num_tokens` new tokens of one row, after those cached."""

    row: Row
    num_tokens: int


class PrefillAttention:
    """Several new tokens for some rows. `chunks` must come sorted by `prefill_group`."""

    def __init__(self, chunks: Sequence[Chunk], architecture: Architecture, like: Tensor) -> None:
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        positions = [torch.arange(c.row.cached, c.row.cached + c.num_tokens) for c in chunks]
        self.positions_N = torch.cat(positions).to(like.device)
        groups: dict[tuple[int, int, int], list[Chunk]] = {}
        for chunk in chunks:
            groups.setdefault(prefill_group(chunk), []).append(chunk)
        self._groups, start = [], 0
        for members in groups.values():
            num_tokens = sum(chunk.num_tokens for chunk in members)
            group = _PrefillGroup(members, self.positions_N[start : start + num_tokens], self._num_kv_heads, like)
            self._groups.append((slice(start, start + num_tokens), group))
            start += num_tokens

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        outputs = [group.attend(layer, qkv_NhD[part], self._num_heads) for part, group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def prefill_group(chunk: Chunk) -> tuple[int, int, int]:
    """Chunks of one block and of similar length are padded to each other: by less than a factor of 2."""
    row = chunk.row
    return row.band.capacity, row.index // row.band.block_rows, chunk.num_tokens.bit_length()


class _PrefillGroup:
    """Chunks that attend in one call."""

    def __init__(self, chunks: Sequence[Chunk], positions: Tensor, num_kv_heads: int, like: Tensor) -> None:
        self._block, self._num_kv_heads = chunks[0].row.block, num_kv_heads
        counts = [chunk.num_tokens for chunk in chunks]
        slots = torch.tensor([chunk.row.slot for chunk in chunks], device=like.device)
        self._num, self._width = len(chunks), max(counts)
        token_slots = slots.repeat_interleave(torch.tensor(counts, device=like.device))
        self._store = flat_positions(self._block, token_slots, positions, num_kv_heads)
        self._length = max(chunk.row.cached + chunk.num_tokens for chunk in chunks)
        first, last = chunks[0].row.slot, chunks[-1].row.slot
        in_order = all(chunk.row.slot == first + i for i, chunk in enumerate(chunks))
        self._slots = slice(first, last + 1) if in_order else slots
        self._padding = None
        if min(counts) < self._width:
            offsets = torch.arange(self._width, device=like.device).expand(self._num, -1)
            self._padding = (offsets < torch.tensor(counts, device=like.device)[:, None]).view(-1).nonzero()[:, 0]
        starts = [chunk.row.cached for chunk in chunks]
        self._mask = None
        if self._padding is not None or any(starts):
            self._mask = self._causal_mask(torch.tensor(starts, device=like.device), like)

    def _causal_mask(self, starts: Tensor, like: Tensor) -> Tensor:
        """[n, 1, width, length]: new token t of a row sees what is cached and the new ones up to itself."""
        seen = starts[:, None] + torch.arange(self._width, device=like.device)
        hidden = torch.arange(self._length, device=like.device) > seen[:, :, None]
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
        out = F.scaled_dot_product_attention(
            queries, kv[0], kv[1], attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=True
        )
        out = out.transpose(1, 2).reshape(self._num * self._width, num_heads * D)
        return out if self._padding is None else out.index_select(0, self._padding)
