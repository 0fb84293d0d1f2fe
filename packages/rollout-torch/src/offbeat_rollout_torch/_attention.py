"""Keys and values of the samples being decoded, and attention over them.

Samples of similar length share a *band*, whose rows have room for 64, 128, 256 ... tokens. A sample that outgrows its
band moves to the next. So attention reads rows in place, with no gathering of pages, and pads to less than twice the
length. Rows stay dense: when a sample leaves, the last row takes its place. A band's memory is cut into *blocks*, dense
tensors [L, 2, rows, kv heads, capacity, head_dim] and one product per layer each, all of them full but the last. That
one alone is ever made anew in another size, so that no more than a block is held twice.

Shapes: N tokens of a pass (packed), H query heads, K kv heads, G = H / K, D head_dim, C cached tokens read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._families import Architecture

SMALLEST_CAPACITY: Final = 64
BLOCKS_IN_BUDGET: Final = 8


@dataclass(eq=False)
class Row:
    """The place of one sample. `cached` counts the tokens whose keys and values lie there."""

    band: "Band"
    index: int
    cached: int = 0

    @property
    def block(self) -> "Block":
        return self.band.blocks[self.index // self.band.block_rows]

    @property
    def slot(self) -> int:
        return self.index % self.band.block_rows

    @property
    def kv(self) -> Tensor:
        """[L, 2, kv heads, capacity, head_dim]; keys, then values."""
        return self.block.kv[:, :, self.slot]


class Block:
    """Memory of some rows. It is zero at first: masked values must be finite."""

    def __init__(self, num_rows: int, capacity: int, architecture: Architecture, like: Tensor) -> None:
        a = architecture
        self.num_rows, self.capacity = num_rows, capacity
        self.kv = like.new_zeros(a.num_layers, 2, num_rows, a.num_kv_heads, capacity, a.head_dim)
        self.flat = list(self.kv.view(a.num_layers, -1, a.head_dim).unbind())
        self.keys, self.values = (
            list(self.kv[:, which].view(a.num_layers, -1, capacity, a.head_dim).unbind()) for which in (0, 1)
        )


class Band:
    def __init__(self, capacity: int, block_rows: int, architecture: Architecture, like: Tensor) -> None:
        self.capacity, self.block_rows = capacity, block_rows
        self.rows, self.blocks = list[Row](), list[Block]()
        self._architecture, self._like = architecture, like

    @property
    def num_allocated(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    @property
    def used_blocks(self) -> list[tuple[Block, list[Row]]]:
        """Each block that holds rows, and these."""
        starts = range(0, len(self.rows), self.block_rows)
        return [(self.rows[at].block, self.rows[at : at + self.block_rows]) for at in starts]

    def resize(self, num_rows: int) -> None:
        """Have memory for just so many rows, no fewer than are in use; they keep what they hold."""
        num_full, rest = divmod(num_rows, self.block_rows)
        wanted = [self.block_rows] * num_full + [rest] * (rest > 0)
        del self.blocks[len(wanted) :]
        for at, size in enumerate(wanted):
            if at == len(self.blocks):
                self.blocks.append(self._block(size))
            elif self.blocks[at].num_rows != size:
                new, kept = self._block(size), min(size, self.blocks[at].num_rows)
                new.kv[:, :, :kept] = self.blocks[at].kv[:, :, :kept]
                self.blocks[at] = new

    def _block(self, num_rows: int) -> Block:
        return Block(num_rows, self.capacity, self._architecture, self._like)

    def drop(self) -> None:
        """Give the memory back; the rows keep their places and hold nothing."""
        self.blocks = []
        for row in self.rows:
            row.cached = 0


class KVCache:
    """Hands out rows under a budget.

    What is allocated is never more than the budget and one block: while rows move, a row of half the capacity and half
    a block at most are held twice.
    """

    def __init__(self, architecture: Architecture, budget_tokens: int, max_length: int, like: Tensor) -> None:
        self.budget_tokens = budget_tokens
        capacities = [SMALLEST_CAPACITY]
        while capacities[-1] < max_length:
            capacities.append(2 * capacities[-1])
        self.block_tokens = max(budget_tokens // BLOCKS_IN_BUDGET, capacities[-1])
        self.bands = [
            Band(capacity, max(self.block_tokens // 2 // capacity, 1), architecture, like) for capacity in capacities
        ]

    @property
    def allocated_tokens(self) -> int:
        return sum(band.capacity * band.num_allocated for band in self.bands)

    @property
    def held_tokens(self) -> int:
        return sum(band.capacity * len(band.rows) for band in self.bands)

    def band_for(self, length: int) -> Band:
        return next(band for band in self.bands if band.capacity >= length)

    def fits(self, length: int, freed_tokens: int = 0) -> bool:
        """Whether a row for `length` tokens is within the budget once `freed_tokens` have been given back."""
        return self.held_tokens - freed_tokens + self.band_for(length).capacity <= self.budget_tokens

    def add(self, length: int) -> Row:
        band = self.band_for(length)
        row = Row(band, len(band.rows))
        band.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        """Give a row back; the last row of its band moves into its place."""
        band = row.band
        last = band.rows.pop()
        if last is not row:
            if n := last.cached:
                row.kv[:, :, :, :n] = last.kv[:, :, :, :n]
            last.index = row.index
            band.rows[row.index] = last

    def grow(self, row: Row, length: int) -> Row:
        """Move a row to the band for `length` tokens and return its new place."""
        new = self.add(length)
        if row.cached:
            self.allocate()
            n = row.cached
            new.kv[:, :, :, :n] = row.kv[:, :, :, :n]
            new.cached = n
        self.remove(row)
        return new

    def share(self, source: Row, targets: Sequence[Row], num_tokens: int) -> None:
        """Copy the first keys and values of one row to others: a prompt computed once for all its samples."""
        self.allocate()
        prefix = source.kv[:, :, :, :num_tokens]
        for block in {id(row.block): row.block for row in targets}.values():
            slots = sorted(row.slot for row in targets if row.block is block)
            if slots[-1] - slots[0] + 1 == len(slots):
                block.kv[:, :, slots[0] : slots[-1] + 1, :, :num_tokens] = prefix.unsqueeze(2)
            else:
                for slot in slots:
                    block.kv[:, :, slot, :, :num_tokens] = prefix
        for row in targets:
            row.cached = num_tokens

    def allocate(self) -> None:
        """Have memory for every row in use; where the budget ends, bands give back what no row of theirs uses."""
        short = [band for band in self.bands if len(band.rows) > band.num_allocated]
        if not short:
            return
        missing = sum(band.capacity * (len(band.rows) - band.num_allocated) for band in short)
        is_tight = self.allocated_tokens + missing > self.budget_tokens
        for band in self.bands:
            if band not in short and (is_tight or not band.rows):
                band.resize(len(band.rows))
        spare = max(self.budget_tokens - self.allocated_tokens - missing, 0)
        for band in short:  # twice as many as there were, where there is room: few blocks are then made anew
            more = min(max(2 * band.num_allocated - len(band.rows), 0), spare // band.capacity)
            spare -= more * band.capacity
            band.resize(len(band.rows) + more)

    def drop(self) -> None:
        for band in self.bands:
            band.drop()


def flat_positions(block: Block, slots: Tensor, positions: Tensor, num_kv_heads: int) -> Tensor:
    """Index, in the flat view of a layer, of each token's keys then values.

    Args:
        block: whose memory is addressed.
        slots: [N] int64 slot of each token's row.
        positions: [N] int64 place of each token in its row.
        num_kv_heads: key and value heads.

    Returns:
        [N * 2 * kv heads] int64, token by token, keys before values.
    """
    half = block.num_rows * num_kv_heads * block.capacity
    heads = torch.arange(num_kv_heads, device=slots.device) * block.capacity
    offsets = torch.cat((heads, heads + half))
    first = slots * (num_kv_heads * block.capacity) + positions
    return (first[:, None] + offsets).view(-1)


class Attention(Protocol):
    """Stores the pass's keys and values and attends."""

    positions_N: Tensor

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        """[N, H + 2 K, D], positions applied, to [N, H * D]."""


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
