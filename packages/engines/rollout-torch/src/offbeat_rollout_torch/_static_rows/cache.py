"""Keys and values in rows of one length, which stay where they are."""

from collections.abc import Callable

from torch import Tensor

from offbeat_device import StableMemory
from offbeat_rollout_torch._cache import SMALLEST_CAPACITY, Band, Block, KVCache, token_bytes
from offbeat_rollout_torch._families import Architecture


class StaticCache(KVCache):
    """Rows of one length, in one block that has memory from the first row on and stays where it is until `release`.

    A prompt is copied to all samples of its group, and never held once for them. What ended samples leave is kept in
    what the block leaves of the budget.

    Args:
        num_rows: of the block.
        row_tokens: of each, as by `static_row_tokens`.
        reserve: makes memory of so many bytes for the block, which is then the same after `release`, too; None, or
            where it gives None: another one.
        others: as for `KVCache`.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_rows: int,
        row_tokens: int,
        budget_tokens: int,
        like: Tensor,
        keep_tokens: int = 0,
        reserve: Callable[[int], StableMemory | None] | None = None,
    ) -> None:
        super().__init__(architecture, budget_tokens, row_tokens, like, keep_tokens)
        self._capacities, self.num_rows = [row_tokens], num_rows
        self.bands = [Band(row_tokens, num_rows, architecture, like)]
        self._memory = reserve(num_rows * row_tokens * token_bytes(architecture, like)) if reserve else None
        if self._memory is not None:
            self._stable_block = Block(num_rows, row_tokens, architecture, like, self._memory.tensor)

    @property
    def block(self) -> Block:
        """The block of all rows; `allocate` first."""
        return self.bands[0].blocks[0]

    def shares(self, num_tokens: int) -> bool:
        return False

    def fits(self, length: int, freed_tokens: int = 0, prefix_tokens: int = 0) -> bool:
        return len(self.bands[0].rows) < self.num_rows

    @property
    def keeps_addresses(self) -> bool:
        """Return whether the block is the same, at the same addresses, after `release`."""
        return self._memory is not None

    def allocate(self) -> None:
        if self.bands[0].rows and not self.bands[0].blocks:
            self.make_free(self.num_rows * self.longest)
            if self._memory is None:
                self.bands[0].resize(self.num_rows)
            else:
                self.restore()

    def restore(self) -> None:
        """Have the block's memory before there are rows, so that too little of it is found out now.

        Raises:
            OffbeatError: the device has too little.
        """
        if self._memory is not None and not self.bands[0].blocks:
            self._memory.restore()
            self.bands[0].blocks.append(self._stable_block)

    def release(self) -> None:
        super().release()
        if self._memory is not None:
            self._memory.release()

    def drop(self) -> None:
        for one in list(self._kept):
            self._forget(one)
        for block in self.bands[0].blocks:
            block.kv.zero_()
        for row in self.bands[0].rows:
            row.cached = 0


def static_row_tokens(max_length: int) -> int:
    """Tokens of a row of `StaticCache` for sequences of at most `max_length`."""
    return -(-max_length // SMALLEST_CAPACITY) * SMALLEST_CAPACITY
