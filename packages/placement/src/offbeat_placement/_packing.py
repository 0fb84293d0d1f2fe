"""Packs units into nodes: how many of each type every node takes.

Three steps, each exact in what it says: a few simple orders of filling find most packings; weights prove most of the
others impossible; what is left is searched, starting from the fractional packing. With widths of which each divides the
next (1, 2, 4, 8) the second step refuses whatever the first does not find, so no search is needed: a unit of width w
takes the same room from all smaller ones wherever it lies.
Source: E. G. Coffman, M. R. Garey, D. S. Johnson, Bin packing with divisible item sizes, J. Complexity 3 (1987).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat_placement._bound import Fraction, NodeClass, cannot_hold, pack_fractions
from offbeat_placement._search import Search
from offbeat_placement._units import Counts, Room, Shelf, UnitType

MAX_PATTERNS: Final = 2000
"""Of one node; over that, nothing is proved."""

SEARCH_STEPS: Final = 20_000
"""Of each of the searches below; a plan of 512 nodes is found or refused within a second."""

MAX_COLUMNS: Final = 600
"""Patterns of all classes together; the search goes one call deeper for each."""

_LOOSENED: Final = (0, 1, 4, None)
"""Nodes of each pattern that a search takes back from the fractional packing, one search after the other; None: all."""


@dataclass(frozen=True)
class Packing:
    """The outcome.

    Args:
        counts: for each node, units of each type; None when no packing was found.
        proven: whether "none" is certain; a search that gives up has proved nothing.
    """

    counts: tuple[Counts, ...] | None
    proven: bool = True


def pack(types: Sequence[UnitType], rooms: Sequence[Room]) -> Packing:
    """Pack all units, or say that it cannot be done.

    Args:
        types: units wanted.
        rooms: of the nodes, in order.
    """
    shelf = Shelf(types)
    for type_order, node_order in _filling_orders(types, rooms):
        if filled := _fill(shelf, rooms, type_order, node_order):
            return Packing(filled)
    classes = _classes(shelf, rooms)
    if classes is None:
        return Packing(None, proven=False)
    fraction = pack_fractions(classes, shelf.wanted)
    if any(cannot_hold(classes, shelf.wanted, weights) for weights in [fraction.weights, *simple_weights(types)]):
        return Packing(None)
    if sum(len(each.patterns) for each in classes) > MAX_COLUMNS:
        return Packing(None, proven=False)
    return _search(shelf, classes, fraction, len(rooms))


def _filling_orders(types: Sequence[UnitType], rooms: Sequence[Room]) -> list[tuple[list[int], list[int]]]:
    """Orders of types and nodes to fill by: as given, which reads best; then the widest first into the tightest."""
    as_given = list(range(len(types)))
    widest = sorted(as_given, key=lambda i: (types[i].kind is None, not types[i].whole, -types[i].width, i))
    hungriest = sorted(as_given, key=lambda i: (types[i].kind is None, -types[i].num_cpus, -types[i].width, i))
    nodes = list(range(len(rooms)))
    tightest = sorted(nodes, key=lambda node: (sum(rooms[node].free), rooms[node].num_cpus, node))
    return [(as_given, nodes), (widest, tightest), (widest, nodes), (hungriest, nodes), (hungriest, tightest[::-1])]


def _fill(
    shelf: Shelf, rooms: Sequence[Room], type_order: Sequence[int], node_order: Sequence[int]
) -> tuple[Counts, ...] | None:
    held = [[0] * len(shelf.types) for _ in rooms]
    for index in type_order:
        left = shelf.wanted[index]
        for node in node_order:
            if not left:
                break
            taken = min(left, shelf.most(rooms[node], held[node], index))
            held[node][index] += taken
            left -= taken
        if left:
            return None
    return tuple(map(tuple, held))


def _classes(shelf: Shelf, rooms: Sequence[Room]) -> list[NodeClass] | None:
    patterns_of: dict[Room, tuple[Counts, ...]] = {}
    nodes_of: dict[tuple[Counts, ...], list[int]] = {}
    for node, room in enumerate(rooms):
        clipped = shelf.clip(room)
        if clipped not in patterns_of:
            patterns = shelf.patterns(clipped, MAX_PATTERNS)
            if patterns is None:
                return None
            patterns_of[clipped] = patterns
        nodes_of.setdefault(patterns_of[clipped], []).append(node)
    return [NodeClass(tuple(nodes), patterns) for patterns, nodes in nodes_of.items()]


def simple_weights(types: Sequence[UnitType]) -> list[Counts]:
    """Weights that refuse most of what cannot be: each type alone, and whole multiples of each width."""
    alone = [tuple(int(i == j) for j in range(len(types))) for i in range(len(types))]
    widths = sorted({each.width for each in types if each.kind is not None})
    return alone + [tuple(each.width // width if each.kind is not None else 0 for each in types) for width in widths]


def _search(shelf: Shelf, classes: Sequence[NodeClass], fraction: Fraction, num_nodes: int) -> Packing:
    weights = [fraction.weights, *simple_weights(shelf.types)]
    for loosened in _LOOSENED:
        fixed = [_whole_part(amounts, loosened) for amounts in fraction.amounts]
        held = np.zeros(len(shelf.wanted), dtype=np.int64)
        for each, amounts in zip(classes, fixed, strict=True):
            held += np.asarray(amounts) @ np.asarray(each.patterns)
        wanted = tuple(max(0, want - int(has)) for want, has in zip(shelf.wanted, held, strict=True))
        sizes = [len(each.nodes) - sum(amounts) for each, amounts in zip(classes, fixed, strict=True)]
        search = Search([each.patterns for each in classes], sizes, weights, SEARCH_STEPS)
        if found := search.run(wanted):
            return Packing(_deal_out(shelf.wanted, classes, fixed, found, num_nodes))
    return Packing(None, proven=not search.gave_up)


def _whole_part(amounts: Sequence[float] | np.ndarray, loosened: int | None) -> list[int]:
    if loosened is None:
        return [0] * len(amounts)
    return [max(0, int(np.floor(amount + 1e-6)) - loosened) for amount in amounts]


def _deal_out(
    wanted: Counts,
    classes: Sequence[NodeClass],
    fixed: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    num_nodes: int,
) -> tuple[Counts, ...]:
    """Give each node of a class its pattern, and take off what is over at the end."""
    held: list[Counts] = [(0,) * len(wanted)] * num_nodes
    for each, *amounts in zip(classes, fixed, found, strict=True):
        nodes = iter(each.nodes)
        for pattern, *numbers in zip(each.patterns, *amounts, strict=True):
            for _ in range(sum(numbers)):
                held[next(nodes)] = pattern
    left = list(wanted)
    for node, counts in enumerate(held):
        held[node] = tuple(min(count, have) for count, have in zip(counts, left, strict=True))
        left = [have - count for have, count in zip(left, held[node], strict=True)]
    return tuple(held)
