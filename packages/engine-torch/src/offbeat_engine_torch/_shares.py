"""Spreads an update's micro-batches over data-parallel ranks.

A pure function of the whole update, so that every rank computes the same plan without asking the others.
"""

import heapq
from collections.abc import Sequence

from offbeat_engine_torch._packing import Family, find_families, plan_packs
from offbeat_types import TrainSequence

MicroBatch = list[Family]
"""What one forward and backward pass computes; empty for a rank that only keeps the others company."""


def plan_shares(
    sequences: Sequence[TrainSequence], *, budget: int, share_prompts: bool, num_shares: int
) -> list[list[MicroBatch]]:
    """Choose micro-batches for every share, as many for each: the ranks meet in each of them.

    One share is planned as `plan_packs` does. For more, a prompt's sequences are cut apart where that is what it
    takes to give every share work, and families go to the least filled micro-batch, longest first.
    Source: the longest-processing-time rule (Graham 1969).

    Args:
        sequences: those without a loss token are left out.
        budget: packed tokens of a micro-batch at most; a sequence longer than that goes alone.
        share_prompts: lay out a prompt once for all sequences of a micro-batch that begin with it.
        num_shares: data-parallel ranks.

    Returns:
        For each share its micro-batches, in the order in which the shares meet.
    """
    if num_shares == 1:
        return [plan_packs(sequences, budget=budget, share_prompts=share_prompts)]
    num_tokens = sum(family.num_tokens for family in find_families(sequences, budget, share_prompts))
    if not num_tokens:
        return [[] for _ in range(num_shares)]
    rounds = -(-num_tokens // (budget * num_shares))
    while True:
        fair = -(-num_tokens // (rounds * num_shares))
        families = find_families(sequences, budget, share_prompts, fair=fair)
        bins = _fill(families, rounds * num_shares, budget)
        if bins is not None:
            return _deal(bins, num_shares)
        rounds += 1


def rounds_with_images(sequences: Sequence[TrainSequence], shares: list[list[MicroBatch]]) -> list[bool]:
    """For each round of micro-batches, whether any share has an image in it: all meet in the vision tower then."""
    return [
        any(sequences[member].images for batch in batches for family in batch for member in family.members)
        for batches in zip(*shares, strict=True)
    ]


def members_in_order(shares: list[list[MicroBatch]]) -> list[list[int]]:
    """For each share, the sequences it computes, in the order in which it computes them."""
    return [[member for batch in share for family in batch for member in family.members] for share in shares]


def count_tokens(sequences: Sequence[TrainSequence], members: list[list[int]]) -> list[int]:
    """Loss tokens of each share."""
    return [sum(int(sequences[member].loss_mask.sum()) for member in share) for share in members]


def _fill(families: list[Family], num_bins: int, budget: int) -> list[MicroBatch] | None:
    """Put the largest family left into the emptiest bin; None when one does not fit."""
    bins: list[MicroBatch] = [[] for _ in range(num_bins)]
    emptiest = [(0, place) for place in range(num_bins)]
    for family in sorted(families, key=lambda family: (-family.num_tokens, family.members)):
        load, place = heapq.heappop(emptiest)
        if load and load + family.num_tokens > budget:
            return None
        bins[place].append(family)
        heapq.heappush(emptiest, (load + family.num_tokens, place))
    return bins


def _deal(bins: list[MicroBatch], num_shares: int) -> list[list[MicroBatch]]:
    """Deal bins, fullest first, so that those of one round are alike; every second round goes backwards."""
    bins = sorted(bins, key=lambda batch: -sum(family.num_tokens for family in batch))
    shares: list[list[MicroBatch]] = [[] for _ in range(num_shares)]
    for first in range(0, len(bins), num_shares):
        order = range(num_shares) if first // num_shares % 2 == 0 else reversed(range(num_shares))
        for share, batch in zip(order, bins[first : first + num_shares], strict=True):
            shares[share].append(batch)
    return shares
