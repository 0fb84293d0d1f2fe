"""The order in which items are served: a pure function of the position, so a run resumes from one number."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from offbeat_types import DataError


@lru_cache(maxsize=4)
def permutation(num_items: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Random order of `num_items` items, [num_items] int64, read-only.

    It sorts raw 64-bit draws instead of calling `Generator.permutation`: numpy promises the raw stream of a bit
    generator never to change (NEP 19), and makes no such promise for Generator's methods.
    """
    draws = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(num_items)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


class EpochOrder:
    """Maps a position, counted from the start of the run, to (epoch, item).

    Every epoch serves every item once, in an order of its own. There is no state: to resume, go on counting.

    Args:
        num_items: items of one epoch, >= 1.
        seed: of the order.
        shuffle: False serves items in their own order.

    Raises:
        DataError: num_items < 1.
    """

    def __init__(self, num_items: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1:
            raise DataError(f"an epoch needs at least one item: got {num_items}; give a data set that is not empty")
        self.num_items, self.seed, self.shuffle = num_items, seed, shuffle

    def __call__(self, position: int) -> tuple[int, int]:
        """The epoch and the item at `position` >= 0."""
        if position < 0:
            raise IndexError(f"positions count from 0: got {position}")
        epoch, place = divmod(position, self.num_items)
        return epoch, int(permutation(self.num_items, self.seed, epoch)[place]) if self.shuffle else place

    def num_positions(self, epochs: int) -> int:
        """Positions in `epochs` epochs."""
        return epochs * self.num_items
