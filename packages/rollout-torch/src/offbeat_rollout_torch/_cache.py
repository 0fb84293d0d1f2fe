"""Keys and values of the samples being decoded.

Samples of similar length share a *band*, whose rows have room for 64, 128, 256 ... tokens. A sample that outgrows its
band moves to the next. So attention reads rows in place, with no gathering of pages, and pads to less than twice the
length. Rows stay dense: when a sample leaves, the last row takes its place. A band's memory is cut into *blocks*, dense
tensors [L, 2, rows, kv heads, capacity, head_dim] and one product per layer each, all of them full but the last. That
one alone is ever made anew in another size, so that no more than a block is held twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
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
        """The memory it lies in."""
        return self.band.blocks[self.index // self.band.block_rows]

    @property
    def slot(self) -> int:
        """Its number in the block."""
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
    """All rows of one capacity.

    Args:
        capacity: tokens of a row.
        block_rows: rows of a full block.
        architecture: of the model.
        like: a tensor of the dtype and device wanted.
    """

    def __init__(self, capacity: int, block_rows: int, architecture: Architecture, like: Tensor) -> None:
        self.capacity, self.block_rows = capacity, block_rows
        self.rows, self.blocks = list[Row](), list[Block]()
        self._architecture, self._like = architecture, like

    @property
    def num_allocated(self) -> int:
        """Rows there is memory for."""
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

    Args:
        architecture: of the model.
        budget_tokens: sum of the capacities of all rows in use, at most.
        max_length: longest sequence.
        like: a tensor of the dtype and device wanted.
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
        """Tokens there is memory for."""
        return sum(band.capacity * band.num_allocated for band in self.bands)

    @property
    def held_tokens(self) -> int:
        """Sum of the capacities of all rows in use."""
        return sum(band.capacity * len(band.rows) for band in self.bands)

    def band_for(self, length: int) -> Band:
        """Return the smallest band that holds `length` tokens."""
        return next(band for band in self.bands if band.capacity >= length)

    def fits(self, length: int, freed_tokens: int = 0) -> bool:
        """Whether a row for `length` tokens is within the budget once `freed_tokens` have been given back."""
        return self.held_tokens - freed_tokens + self.band_for(length).capacity <= self.budget_tokens

    def add(self, length: int) -> Row:
        """Take a row for `length` tokens."""
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
        """Forget all keys and values and give their memory back."""
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
