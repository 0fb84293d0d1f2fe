"""avg@k, pass@k and maj@k of one item from its n samples, and the interval of a mean over items.

Every estimate is exact: the expectation over all subsets of k of the n samples, each as likely as the others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat_core import ConfigError

CONFIDENCE: Final = 0.95
NUM_RESAMPLES: Final = 2000
_RESAMPLES_AT_ONCE: Final = 100


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that at least one of k samples is right.

    Args:
        num_samples: n, sampled of the item.
        num_right: of these, in [0, n].
        k: in [1, n].

    Raises:
        ConfigError: k is out of range.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    _check(num_samples, k)
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_at_k(votes: Sequence[str | None], right: Sequence[float], k: int) -> float:
    """Return the expected score of the answer that most of k samples give; a draw is decided by lot.

    Args:
        votes: of each of the n samples the answer in it; None where there is none, which is no vote.
        right: of each of the n samples, in [0, 1]: the score of an answer is the mean over the samples that give it.
        k: in [1, n].

    Returns:
        In [0, 1]; k samples without a vote have the score 0.

    Raises:
        ConfigError: k is out of range.

    Source: Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
    """
    _check(len(votes), k)
    counts = Counter(vote for vote in votes if vote is not None)
    score: dict[str, float] = defaultdict(float)
    for vote, value in zip(votes, right, strict=True):
        if vote is not None:
            score[vote] += value / counts[vote]
    won: dict[int, float] = {}  # answers given equally often win equally often
    total = 0.0
    for answer, count in counts.items():
        if score[answer]:
            if count not in won:
                others = Counter(counts.values())
                others[count] -= 1
                won[count] = _chance_to_win(count, others, len(votes) - counts.total(), k)
            total += score[answer] * won[count]
    return total


def _chance_to_win(count: int, others: Counter[int], num_silent: int, k: int) -> float:
    """Probability that an answer of `count` samples wins among k of all samples.

    Args:
        count: samples that give it.
        others: how many other answers are given by so many samples.
        num_silent: samples without an answer.
        k: samples drawn without replacement.
    """
    num_samples = count + sum(size * number for size, number in others.items()) + num_silent
    ways = 0.0
    whole = comb(num_samples, k)
    for votes in range(1, min(count, k) + 1):
        own = comb(count, votes)
        for tied, number in _ways_of_others(others, num_silent, k - votes, votes):
            ways += own * number / whole / (tied + 1)
    return ways


def _ways_of_others(others: Counter[int], num_silent: int, drawn: int, most: int) -> Iterator[tuple[int, int]]:
    """Pairs (s, ways): to draw so many other samples, no answer more than `most` times and s answers just as often."""
    # By (samples drawn so far, answers with `most` of them): a product of one polynomial per answer.
    table: dict[tuple[int, int], int] = {(0, 0): 1}
    for size in others.elements():
        longer: dict[tuple[int, int], int] = defaultdict(int)
        row = _binomials(size)
        for (used, tied), number in table.items():
            for taken in range(min(size, most, drawn - used) + 1):
                longer[used + taken, tied + (taken == most)] += number * row[taken]
        table = longer
    silent = _binomials(num_silent)
    ending = sorted(
        (tied, number * silent[drawn - used]) for (used, tied), number in table.items() if drawn - used <= num_silent
    )
    for tied, group in groupby(ending, key=lambda pair: pair[0]):
        yield tied, sum(number for _, number in group)


@lru_cache(maxsize=4096)
def _binomials(size: int) -> tuple[int, ...]:
    return tuple(comb(size, taken) for taken in range(size + 1))


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ConfigError(f"k = {k} of pass@k and maj@k must be from 1 to the {num_samples} samples of an item")


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over items: percentiles of the means of 2000 resampled sets of as many items.

    Samples of one item are no independent draws, so items are resampled, each with all its samples. Equal values give
    an empty interval: of items that are all right, or all wrong, a set this small shows no more.

    Args:
        values: one of each item, at least one, finite.
        seed: of the resampling.

    Returns:
        Lower and upper end.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.3.
    """
    value_I = np.asarray(values, np.float64)
    draws, means = np.random.default_rng(seed), list[NDArray[np.float64]]()
    for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        chosen = draws.integers(0, len(value_I), (_RESAMPLES_AT_ONCE, len(value_I)))
        means.append(value_I[chosen].mean(axis=1))
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(np.concatenate(means), (tail, 1.0 - tail))
    return float(low), float(high)
