"""Keys and values of the samples being decoded.

Samples of similar length share a *band*, whose rows have room for 64, 128, 256 ... tokens. A sample that outgrows its
band moves to the next. So attention reads rows in place, with no gathering of pages, and pads to less than twice the
length. Rows stay dense: when a sample leaves, the last row takes its place. A band's memory is cut into *blocks*, dense
tensors [L, 2, rows, kv heads, capacity, head_dim] and one product per layer each, all of them full but the last. That
one alone is ever made anew in another size, so that no more than a block is held twice.

What a group's samples have in common is computed once. If it is long it is a *prefix*: a row that is a band of its own,
and has bands of its own, whose rows hold what comes after it. If it is short it is copied from row to row.

A sequence that ends may be *kept*, in a band of its exact length, for prompts that begin with its tokens: the next
turn of an episode begins with prompt and completion of the one before. What a group shared is then kept once.

Shapes: N tokens, K kv heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_rollout_torch._families import Architecture

SMALLEST_CAPACITY: Final = 64
BLOCKS_IN_BUDGET: Final = 8
SMALL_BLOCK_BYTES: Final = 256 * 2**20
"""Blocks are not made smaller than this, or than a quarter of the budget, to have more of them: each is a call of its
own in every layer. A step of 32 samples of 80 to 112 tokens takes 59 ms with four blocks and 50 ms with one (bfloat16,
on a CPU). One block alone would hold half the budget twice while it grows."""
SHARE_FROM_TOKENS: Final = 128
"""A shorter prefix is copied to each row: a product of its own for it would take longer than reading the copies."""

REUSE_FROM_TOKENS: Final = 64
"""Fewer tokens are neither kept nor looked for: they are computed in little more time than it takes to copy them."""


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
    def end(self) -> int:
        """Tokens of the sequence whose keys and values are held, here and in the prefix before it."""
        prefix = self.band.prefix
        return self.cached if prefix is None else prefix.cached + self.cached

    @property
    def kv(self) -> Tensor:
        """[L, 2, kv heads, capacity, head_dim]; keys, then values."""
        return self.block.kv[:, :, self.slot]

    @property
    def states(self) -> Tensor:
        """[layers with the gated delta rule, numbers] float32: those after the tokens that are cached."""
        return self.block.states[:, self.slot]


class Block:
    """Memory of some rows. It is zero at first: masked values must be finite.

    Args:
        num_rows: of the block.
        capacity: tokens of a row.
        architecture: of the model.
        like: dtype and device.
        within: [bytes] uint8 memory for it, zero once it is used; None: memory of its own.
    """

    def __init__(
        self, num_rows: int, capacity: int, architecture: Architecture, like: Tensor, within: Tensor | None = None
    ) -> None:
        a = architecture
        self.num_rows, self.capacity = num_rows, capacity
        shape = a.num_attention_layers, 2, num_rows, a.num_kv_heads, capacity, a.head_dim
        self.kv = like.new_zeros(*shape) if within is None else within.view(like.dtype).view(shape)
        self.flat = list(self.kv.view(a.num_attention_layers, -1, a.head_dim).unbind())
        self.keys, self.values = (
            list(self.kv[:, which].view(a.num_attention_layers, -1, capacity, a.head_dim).unbind()) for which in (0, 1)
        )
        held_size = a.rule.held_size if a.rule else 0
        self.states = like.new_zeros(a.num_rule_layers, num_rows, held_size, dtype=torch.float32)


class Band:
    """Rows of one capacity.

    Args:
        capacity: tokens of a row.
        block_rows: rows of a full block.
        architecture: of the model.
        like: of the keys and values: their dtype and device.
        prefix: the row that holds what comes before each of these rows; None: they begin their sequences.

    Attributes:
        row_tokens: what a row takes of the budget.
    """

    _numbers = count()

    def __init__(
        self, capacity: int, block_rows: int, architecture: Architecture, like: Tensor, prefix: Row | None = None
    ) -> None:
        self.capacity, self.block_rows, self.prefix = capacity, block_rows, prefix
        self.number = next(self._numbers)
        self.rows, self.blocks = list[Row](), list[Block]()
        self._architecture, self._like = architecture, like
        self.row_tokens = capacity + state_tokens(architecture, like)

    @property
    def prefix_tokens(self) -> int:
        return self.prefix.band.capacity if self.prefix else 0

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
                new.states[:, :kept] = self.blocks[at].states[:, :kept]
                self.blocks[at] = new

    def _block(self, num_rows: int) -> Block:
        return Block(num_rows, self.capacity, self._architecture, self._like)

    def drop(self) -> None:
        """Give the memory back; the rows keep their places and hold nothing."""
        self.blocks = []
        for row in self.rows:
            row.cached = 0


@dataclass(eq=False)
class Prefix:
    """The tokens that a group's sequences begin with, held once.

    Args:
        row: holds them; the only one of its band.
        bands: of rows that continue from there.
    """

    row: Row
    bands: list[Band]

    @property
    def num_tokens(self) -> int:
        return self.row.band.capacity

    @property
    def is_computed(self) -> bool:
        return self.row.cached == self.num_tokens


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A sequence that has ended: tokens [N] int64, the row that holds them behind its group's prefix, its adapter."""

    ids: npt.NDArray[np.int64]
    row: Row
    adapter: str = ""


class KVCache:
    """Hands out rows under a budget, and keeps ended ones in what these leave of it.

    Args:
        architecture: of the model.
        budget_tokens: see below.
        max_length: of a sequence.
        like: dtype and device.
        keep_tokens: kept at most.
        shares: rows may continue from a long prefix without a copy of it.

    What is allocated is never more than the budget and one block: while rows move, a row of half the capacity and half
    a block at most are held twice.
    """

    def __init__(
        self,
        architecture: Architecture,
        budget_tokens: int,
        max_length: int,
        like: Tensor,
        keep_tokens: int = 0,
        *,
        shares: bool = True,
    ) -> None:
        self.budget_tokens, self._keep_tokens = budget_tokens, keep_tokens
        self.holds_states = architecture.rule is not None
        self._shares = shares and not self.holds_states
        capacities = [SMALLEST_CAPACITY]
        while capacities[-1] < max_length:
            capacities.append(2 * capacities[-1])
        small = SMALL_BLOCK_BYTES // token_bytes(architecture, like)
        self.block_tokens = max(budget_tokens // BLOCKS_IN_BUDGET, min(budget_tokens // 4, small), capacities[-1])
        self._capacities, self._architecture, self._like = capacities, architecture, like
        self.bands = self._new_bands(None)
        self.prefixes: list[Prefix] = []
        self._kept: list[KeptRow] = []  # the least recently used first

    def _new_bands(self, prefix: Row | None) -> list[Band]:
        return [
            Band(
                capacity, max(self.block_tokens // 2 // self.cost(capacity), 1), self._architecture, self._like, prefix
            )
            for capacity in self._capacities
        ]

    @property
    def sample_bands(self) -> list[Band]:
        """The bands whose rows are samples."""
        return self.bands + [band for prefix in self.prefixes for band in prefix.bands]

    @property
    def _all_bands(self) -> list[Band]:
        return self.sample_bands + [prefix.row.band for prefix in self.prefixes]

    @property
    def allocated_tokens(self) -> int:
        return sum(band.row_tokens * band.num_allocated for band in self._all_bands) + self.kept_tokens

    @property
    def kept_tokens(self) -> int:
        bands = [one.row.band for one in self._kept]
        prefixes = {id(band.prefix): band.prefix_tokens for band in bands}
        return sum(band.row_tokens for band in bands) + sum(prefixes.values())

    @property
    def held_tokens(self) -> int:
        return sum(band.row_tokens * len(band.rows) for band in self._all_bands)

    @property
    def longest(self) -> int:
        """Tokens that a row can hold at most."""
        return self._capacities[-1]

    def shares(self, num_tokens: int) -> bool:
        """Return whether rows continue from a prefix of so many tokens without a copy of it."""
        return num_tokens >= SHARE_FROM_TOKENS and self._shares

    def capacity_for(self, length: int) -> int:
        return next(capacity for capacity in self._capacities if capacity >= length)

    def cost(self, length: int) -> int:
        """Return what a row for so many tokens takes of the budget: its states count as tokens of their size."""
        return self.capacity_for(length) + state_tokens(self._architecture, self._like)

    def fits(self, length: int, freed_tokens: int = 0, prefix_tokens: int = 0) -> bool:
        """Return whether a row for `length` tokens is within the budget.

        Args:
            length: tokens of the row.
            freed_tokens: what is given back for it, as by `Band.row_tokens`.
            prefix_tokens: of a prefix that must be held, too.
        """
        wanted = self.cost(length) + prefix_tokens
        return self.held_tokens - freed_tokens + wanted <= self.budget_tokens

    def add(self, length: int, prefix: Prefix | None = None) -> Row:
        """Hand out a row for `length` tokens, which come after those of the prefix."""
        bands = prefix.bands if prefix else self.bands
        return _new_row(bands[self._capacities.index(self.capacity_for(length))])

    def add_prefix(self, num_tokens: int) -> Prefix:
        """Hand out a place for what the sequences of a group begin with."""
        row = _new_row(Band(num_tokens, 1, self._architecture, self._like))
        prefix = Prefix(row, self._new_bands(row))
        self.prefixes.append(prefix)
        return prefix

    def remove_prefix(self, prefix: Prefix) -> None:
        """Release a prefix that no sample's row continues from."""
        self.prefixes.remove(prefix)
        for band in prefix.bands:
            band.drop()
        self._release(prefix.row)

    def _release(self, prefix: Row) -> None:
        """Release the memory of a prefix, unless samples or kept rows continue from it."""
        used = [one.row for one in self.prefixes] + [one.row.band.prefix for one in self._kept]
        if not any(one is prefix for one in used):
            prefix.band.drop()

    def remove(self, row: Row) -> None:
        """Give a row back; the last row of its band moves into its place."""
        band = row.band
        last = band.rows.pop()
        if last is not row:
            if n := last.cached:
                row.kv[:, :, :, :n] = last.kv[:, :, :, :n]
                row.states[:] = last.states
            last.index = row.index
            band.rows[row.index] = last

    def grow(self, row: Row, length: int) -> Row:
        """Move a row to the band for `length` tokens of its own and return its new place."""
        prefix = next((one for one in self.prefixes if one.row is row.band.prefix), None)
        new = self.add(length, prefix)
        if row.cached:
            self.allocate()
            n = row.cached
            new.kv[:, :, :, :n] = row.kv[:, :, :, :n]
            new.states[:] = row.states
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
            row.states[:] = source.states

    def allocate(self) -> None:
        """Have memory for every row in use; where the budget ends, bands give back what no row of theirs uses."""
        bands = self._all_bands
        short = [band for band in bands if len(band.rows) > band.num_allocated]
        if not short:
            return
        missing = sum(band.row_tokens * (len(band.rows) - band.num_allocated) for band in short)
        is_tight = self.allocated_tokens + missing > self.budget_tokens
        for band in bands:
            if band not in short and (is_tight or not band.rows):
                band.resize(len(band.rows))
        self.make_free(missing)
        spare = max(self.budget_tokens - self.allocated_tokens - missing, 0)
        for band in short:  # twice as many as there were, where there is room: few blocks are then made anew
            more = min(max(2 * band.num_allocated - len(band.rows), 0), spare // band.row_tokens)
            spare -= more * band.row_tokens
            band.resize(len(band.rows) + more)

    def keep(self, tokens: Sequence[int], row: Row, adapter: str = "") -> None:
        """Copy a row that is about to be given back, with the tokens of its sequence; older ones make room."""
        num_tokens = row.end
        if not row.cached or not REUSE_FROM_TOKENS <= num_tokens <= self._keep_tokens:
            return
        ids = np.asarray(tokens[:num_tokens])
        for one in [one for one in self._kept if _num_common(one.ids, ids) == len(one.ids) and one.adapter == adapter]:
            self._forget(one)
        taken = num_tokens + state_tokens(self._architecture, self._like)
        while self._kept and self.kept_tokens + taken > self._keep_tokens:
            self._forget(self._kept[0])
        self.make_free(taken)
        if taken > self._keep_tokens or self.allocated_tokens + taken > self.budget_tokens:
            return
        kept = _new_row(Band(row.cached, 1, self._architecture, self._like, row.band.prefix))
        kept.band.resize(1)
        kept.kv[:] = row.kv[:, :, :, : row.cached]
        kept.states[:] = row.states
        kept.cached = row.cached
        self._kept.append(KeptRow(ids, kept, adapter))

    def reuse(self, tokens: Sequence[int], row: Row, adapter: str = "") -> None:
        """Begin an empty row of a sequence's first tokens with what is kept of them.

        States are known after the last token that is kept, and not before: they serve sequences that go on from there.
        """
        ids = np.asarray(tokens)
        common = [_num_common(one.ids, ids) if one.adapter == adapter else 0 for one in self._kept]
        if self.holds_states:
            common = [n if n == len(one.ids) else 0 for n, one in zip(common, self._kept, strict=True)]
        num_tokens = max(common, default=0)
        if num_tokens < REUSE_FROM_TOKENS:
            return
        found = self._kept.pop(common.index(num_tokens))
        self._kept.append(found)
        self.allocate()
        if found not in self._kept:  # given back to make room for the row
            return
        prefix = found.row.band.prefix
        start = min(found.row.band.prefix_tokens, num_tokens)
        if prefix is not None:
            row.kv[:, :, :, :start] = prefix.kv[:, :, :, :start]
        row.kv[:, :, :, start:num_tokens] = found.row.kv[:, :, :, : num_tokens - start]
        row.states[:] = found.row.states
        row.cached = num_tokens

    def make_free(self, num_tokens: int) -> None:
        """Give kept rows back until so much of the budget is free, or nothing is kept."""
        while self._kept and self.allocated_tokens + num_tokens > self.budget_tokens:
            self._forget(self._kept[0])

    def _forget(self, kept: KeptRow) -> None:
        """Give its memory back at once: a row and its band refer to each other."""
        self._kept.remove(kept)
        kept.row.band.drop()
        if kept.row.band.prefix is not None:
            self._release(kept.row.band.prefix)

    def drop(self) -> None:
        """Forget what was computed: rows keep their places and hold nothing, and nothing is kept."""
        self.release()

    def release(self) -> None:
        """Give all memory back, and `drop`."""
        for one in list(self._kept):
            self._forget(one)
        for band in self._all_bands:
            band.drop()


def _num_common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """Return how many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def token_bytes(architecture: Architecture, like: Tensor | torch.dtype) -> int:
    """Return the bytes of one token's keys and values."""
    a = architecture
    return max(2 * a.num_attention_layers * a.num_kv_heads * a.head_dim * like.itemsize, 1)


def state_tokens(architecture: Architecture, like: Tensor | torch.dtype) -> int:
    """Return how many tokens' keys and values take as much memory as the states of one row."""
    return -(-4 * architecture.held_size // token_bytes(architecture, like))


def _new_row(band: Band) -> Row:
    row = Row(band, len(band.rows))
    band.rows.append(row)
    return row


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
