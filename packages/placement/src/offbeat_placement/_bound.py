"""The fractional packing: how far nodes would go if units could be cut, and a proof when even that is not enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat_placement._units import Counts

_TINY: Final = 1e-9
_MAX_PIVOTS: Final = 2000
_SCALE: Final = 10**6


@dataclass(frozen=True)
class NodeClass:
    """Nodes with the same patterns.

    Args:
        nodes: their indices.
        patterns: what each of them can hold.
    """

    nodes: tuple[int, ...]
    patterns: tuple[Counts, ...]


@dataclass(frozen=True)
class Fraction:
    """The best fractional packing.

    Args:
        share: part of what is wanted that it holds, at most 1.
        amounts: for each class, how many of its nodes take each pattern: floats that add up to its nodes at most.
        weights: worth of one unit of each type; if `share` is below 1, the nodes hold less worth than is wanted.
    """

    share: float
    amounts: tuple[NDArray[np.float64], ...]
    weights: tuple[int, ...]


def pack_fractions(classes: Sequence[NodeClass], wanted: Counts) -> Fraction:
    """Maximise s ≤ 1 such that fractions of nodes hold s · wanted: a linear program, by the simplex method.

    Source: P. C. Gilmore, R. E. Gomory, A linear programming approach to the cutting-stock problem, Operations
    Research 9 (1961), for patterns as columns; the tableau is the textbook's, with Bland's rule against cycles.
    """
    columns = [(place, pattern) for place, each in enumerate(classes) for pattern in each.patterns]
    num_types, num_classes, num_columns = len(wanted), len(classes), len(columns)
    num_rows = num_types + num_classes + 1
    tableau = np.zeros((num_rows + 1, 1 + num_columns + num_rows + 1))
    tableau[:num_types, 0] = wanted
    for column, (place, pattern) in enumerate(columns, start=1):
        tableau[:num_types, column] = np.negative(pattern)
        tableau[num_types + place, column] = 1
    tableau[num_types : num_types + num_classes, -1] = [len(each.nodes) for each in classes]
    tableau[num_rows - 1, 0] = tableau[num_rows - 1, -1] = 1
    tableau[:num_rows, 1 + num_columns : -1] = np.eye(num_rows)
    tableau[-1, 0] = -1
    basis = _pivot_to_the_end(tableau, list(range(1 + num_columns, 1 + num_columns + num_rows)))
    values = np.zeros(tableau.shape[1] - 1)
    values[basis] = tableau[:-1, -1]
    ends = np.cumsum([len(each.patterns) for each in classes])[:-1]
    amounts = tuple(np.split(values[1 : 1 + num_columns], ends))
    duals = np.maximum(tableau[-1, 1 + num_columns : 1 + num_columns + num_types], 0)
    largest = duals.max(initial=0)
    weights = np.rint(duals / largest * _SCALE) if largest else np.zeros(num_types)
    return Fraction(float(values[0]), amounts, tuple(int(weight) for weight in weights))


def _pivot_to_the_end(tableau: NDArray[np.float64], basis: list[int]) -> list[int]:
    for pivots in range(_MAX_PIVOTS):
        costs = tableau[-1, :-1]
        candidates = np.flatnonzero(costs < -_TINY)
        if not len(candidates):
            break
        # The steepest first, which is fast; after a while the first, which cannot cycle.
        column = int(candidates[0]) if pivots > _MAX_PIVOTS // 4 else int(np.argmin(costs))
        rows = np.flatnonzero(tableau[:-1, column] > _TINY)
        if not len(rows):
            break
        ratios = tableau[rows, -1] / tableau[rows, column]
        ties = rows[ratios <= ratios.min() + _TINY]
        row = int(min(ties, key=lambda each: basis[each]))
        tableau[row] /= tableau[row, column]
        others = np.arange(len(tableau)) != row
        tableau[others] -= np.outer(tableau[others, column], tableau[row])
        basis[row] = column
    return basis


def cannot_hold(classes: Sequence[NodeClass], wanted: Counts, weights: Sequence[int]) -> bool:
    """Whether the weights prove that the nodes cannot hold what is wanted: exact, in whole numbers.

    No node holds more worth than the best of its patterns.
    """
    most = sum(len(each.nodes) * max(worth(pattern, weights) for pattern in each.patterns) for each in classes)
    return most < worth(wanted, weights)


def worth(counts: Sequence[int], weights: Sequence[int]) -> int:
    """Sum of counts times weights."""
    return sum(count * weight for count, weight in zip(counts, weights, strict=True))
