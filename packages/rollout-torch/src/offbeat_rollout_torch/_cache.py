"""Keys and values of the samples being decoded.

Samples of similar length share a *band*: one dense tensor [L, 2, rows, kv heads, capacity, head_dim] whose capacity
is 64, 128, 256 ... tokens. A sample that outgrows its band moves to the next. So attention reads rows in place, with
no gathering of pages, pads to less than twice the length, and is one product per band and layer. Rows stay dense:
when a sample leaves, the last row takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from offbeat_rollout_torch._families import Architecture

SMALLEST_CAPACITY: Final = 64


@dataclass(eq=False)
class Row:
    """The place of one sample. `cached` counts the tokens whose keys and values lie there."""

    band: "Band"
    index: int
    cached: int = 0


class Band:
    """All rows of one capacity."""

    def __init__(self, capacity: int, architecture: Architecture, like: Tensor) -> None:
        self.capacity, self.rows = capacity, list[Row]()
        self._architecture, self._like = architecture, like
        self._kv: Tensor | None = None
        self.flat: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def num_allocated(self) -> int:
        """Rows there is memory for."""
        return 0 if self._kv is None else self._kv.shape[2]

    @property
    def kv(self) -> Tensor:
        """[L, 2, rows, kv heads, capacity, head_dim]; keys, then values."""
        assert self._kv is not None
        return self._kv

    def reserve(self, num_rows: int) -> None:
        """Have memory for this many rows; it grows by doubling. New memory is zero: masked values must be finite."""
        if num_rows <= self.num_allocated:
            return
        a, old = self._architecture, self._kv
        rows = max(num_rows, 2 * self.num_allocated)
        kv = self._like.new_zeros(a.num_layers, 2, rows, a.num_kv_heads, self.capacity, a.head_dim)
        if old is not None:
            kv[:, :, : old.shape[2]] = old
        self._kv = kv
        self.flat = list(kv.view(a.num_layers, -1, a.head_dim).unbind())
        self.keys, self.values = (
            list(kv[:, which].view(a.num_layers, -1, self.capacity, a.head_dim).unbind()) for which in (0, 1)
        )

    def drop(self) -> None:
        """Give the memory back; the rows keep their places and hold nothing."""
        self._kv, self.flat, self.keys, self.values = None, [], [], []
        for row in self.rows:
            row.cached = 0


class KVCache:
    """Hands out rows under a budget.

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
        self.bands = [Band(capacity, architecture, like) for capacity in capacities]

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
            if last.cached and band.num_allocated:
                n = last.cached
                band.kv[:, :, row.index, :, :n] = band.kv[:, :, last.index, :, :n]
            last.index = row.index
            band.rows[row.index] = last

    def grow(self, row: Row, length: int) -> Row:
        """Move a row to the band for `length` tokens and return its new place."""
        new = self.add(length)
        if row.cached:
            self.allocate()
            n = row.cached
            new.band.kv[:, :, new.index, :, :n] = row.band.kv[:, :, row.index, :, :n]
            new.cached = n
        self.remove(row)
        return new

    def share(self, source: Row, targets: Sequence[Row], num_tokens: int) -> None:
        """Copy the first keys and values of one row to others: a prompt computed once for all its samples."""
        self.allocate()
        prefix = source.band.kv[:, :, source.index, :, :num_tokens]
        for band in {row.band.capacity: row.band for row in targets}.values():
            indices = sorted(row.index for row in targets if row.band is band)
            if indices[-1] - indices[0] + 1 == len(indices):
                band.kv[:, :, indices[0] : indices[-1] + 1, :, :num_tokens] = prefix.unsqueeze(2)
            else:
                for index in indices:
                    band.kv[:, :, index, :, :num_tokens] = prefix
        for row in targets:
            row.cached = num_tokens

    def allocate(self) -> None:
        """Have memory for every row in use; a band that needs more takes it from bands that stand empty."""
        if all(len(band.rows) <= band.num_allocated for band in self.bands):
            return
        for band in self.bands:
            if not band.rows:
                band.drop()
        for band in self.bands:
            band.reserve(len(band.rows))

    def drop(self) -> None:
        """Forget all keys and values and give their memory back."""
        for band in self.bands:
            band.drop()


def flat_positions(band: Band, rows: Tensor, positions: Tensor, num_kv_heads: int) -> Tensor:
    """Index, in the flat view of a layer, of each token's keys then values.

    Args:
        band: whose memory is addressed.
        rows: [N] int64 row of each token.
        positions: [N] int64 place of each token in its row.
        num_kv_heads: key and value heads.

    Returns:
        [N * 2 * kv heads] int64, token by token, keys before values.
    """
    half = band.num_allocated * num_kv_heads * band.capacity
    heads = torch.arange(num_kv_heads, device=rows.device) * band.capacity
    offsets = torch.cat((heads, heads + half))
    first = rows * (num_kv_heads * band.capacity) + positions
    return (first[:, None] + offsets).view(-1)
