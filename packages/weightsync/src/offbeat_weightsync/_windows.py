"""Windows: what travels in one go. A bucket, or a part of one, for one side to begin before the other is done."""

from functools import lru_cache
from typing import Final, NamedTuple

from offbeat_weightsync._plan import BucketPlan, Piece, lay_out

WINDOW_BYTES: Final = 8 << 20
"""Of host memory: so long that the two sides seldom talk, so short that neither waits long for the other."""


class Window(NamedTuple):
    """Pieces of one bucket that travel together.

    Args:
        bucket: index in the plan.
        pieces: their `bucket_offset` counts from the window's start.
        num_bytes: with the gaps between the pieces.
        is_last: of its bucket.
    """

    bucket: int
    pieces: tuple[Piece, ...]
    num_bytes: int
    is_last: bool


@lru_cache(maxsize=8)
def cut_windows(plan: BucketPlan, window_bytes: int) -> tuple[Window, ...]:
    """All windows of a plan, in order. Pure, as the plan is: both sides cut alike, and a plan lives for many syncs.

    Args:
        plan: no window spans two of its buckets.
        window_bytes: no window is longer; a multiple of 64.
    """
    windows: list[Window] = []
    for index, bucket in enumerate(plan.buckets):
        runs = ((piece.tensor, piece.tensor_offset, piece.num_bytes) for piece in bucket.pieces)
        parts = lay_out(runs, window_bytes)
        windows += [Window(index, *part, is_last=part is parts[-1]) for part in parts]
    return tuple(windows)
