"""Spreads an update over data parallel ranks in micro-batches.

A pure function of the whole update: every rank computes the same plan without asking, so the number of micro-batches
cannot differ between ranks that must agree on it.
"""

import heapq
from collections.abc import Sequence

from offbeat_engine_megatron._packing import used_tokens
from offbeat_types import TrainSequence

Share = list[list[int]]
"""Micro-batches of one data parallel rank: the sequences of each; an empty one keeps the others company."""


def plan_shares(
    sequences: Sequence[TrainSequence], *, budget: int, num_shares: int, round_up_to: int = 1
) -> list[Share]:
    """Choose micro-batches for every share, as many for each.

    The longest sequence left goes to the least filled micro-batch.
    Source: the longest-processing-time rule (Graham 1969).

    Args:
        sequences: those without a loss token are left out.
        budget: tokens of a micro-batch at most; a longer sequence goes alone.
        num_shares: data parallel ranks.
        round_up_to: the number of micro-batches becomes a multiple of it, as interleaved pipelines need.
    """
    sizes = {index: used_tokens(sequence) for index, sequence in enumerate(sequences)}
    order = sorted((index for index in sizes if sizes[index]), key=lambda index: (-sizes[index], index))
    if not order:
        return [[] for _ in range(num_shares)]
    rounds = max(1, -(-sum(sizes.values()) // (budget * num_shares)))
    while (bins := _fill(order, sizes, rounds * num_shares, budget)) is None:
        rounds += 1
    bins.sort(key=lambda members: (-sum(sizes[member] for member in members), members))
    shares: list[Share] = [bins[first::num_shares] for first in range(num_shares)]
    for share in shares:
        share += [[]] * (-len(share) % round_up_to)
    return shares


def _fill(order: Sequence[int], sizes: dict[int, int], num_bins: int, budget: int) -> list[list[int]] | None:
    """Put each sequence into the emptiest bin; None when one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, place) for place in range(num_bins)]
    for index in order:
        load, place = heapq.heappop(emptiest)
        if load and load + sizes[index] > budget:
            return None
        bins[place].append(index)
        heapq.heappush(emptiest, (load + sizes[index], place))
    return bins
