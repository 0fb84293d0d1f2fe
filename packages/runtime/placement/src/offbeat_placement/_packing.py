"""Packs units into nodes: how many of each type every node takes.

Three steps, each exact in what it says: a few simple orders of filling, such as the widest first, find most packings;
weights prove most of the others impossible; what is left is searched. With widths that each divide the next
(1, 2, 4, 8) and CPUs to spare the second step refuses whatever the first does not find, so no search is needed: a unit
of width w takes the same room from all smaller ones wherever it lies.
Source: E. G. Coffman, M. R. Garey, D. S. Johnson, Bin packing with divisible item sizes, J. Complexity 3 (1987).

Legend: a *unit* is ranks that one node must hold together; a *type* is units alike; *counts* says how many units of
each type a node holds; a *pattern* is counts that fit and to which no unit can be added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_PATTERNS: Final = 2000
"""Most patterns of one node; with more, nothing is proved."""

SEARCH_STEPS: Final = 20_000
"""A search over 512 nodes then ends within a second, found or not."""

MAX_COLUMNS: Final = 600
"""Patterns of all classes together; the search goes one call deeper for each."""

_SLACK: Final = 1e-9
"""CPUs are fractions such as 0.1, which a float cannot hold: three of them must fit into 0.3."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class UnitType:
    """Units alike.

    Args:
        group: index of the group they belong to.
        pool: units of one pool share devices.
        kind: index of the kind of accelerator; None for CPUs only.
        width: devices of one unit; ranks of one unit where there are none.
        count: units wanted.
        num_cpus: of one unit.
        memory_bytes: of one unit.
        whole: a unit takes a node whole.
    """

    group: int
    pool: str
    kind: int | None
    width: int
    count: int
    num_cpus: float = 0
    memory_bytes: float = 0
    whole: bool = False


class Room(NamedTuple):
    """Free resources of a node: accelerators by kind and number, CPUs and memory."""

    free: tuple[int, ...]
    total: tuple[int, ...]
    num_cpus: float
    memory_bytes: float


class NodeCapacity:
    """Computes how many units fit into a room.

    Args:
        types: all types of units, of any kind.
    """

    def __init__(self, types: Sequence[UnitType]) -> None:
        self.types = tuple(types)
        self.wanted: Counts = tuple(each.count for each in types)

    def most(self, room: Room, counts: Sequence[int], index: int) -> int:
        """Units of type `index` that fit beside the counts of the others, and at most as many as are wanted."""
        return min(
            self.types[index].count,
            self._most_by_devices(room, counts, index),
            self._most_by_amount(room.num_cpus, [each.num_cpus for each in self.types], counts, index),
            self._most_by_amount(room.memory_bytes, [each.memory_bytes for each in self.types], counts, index),
        )

    def _most_by_devices(self, room: Room, counts: Sequence[int], index: int) -> int:
        own = self.types[index]
        if own.kind is None:
            return own.count
        used: dict[str, int] = {}
        for each, count in zip(self.types, counts, strict=True):
            if count and each.kind == own.kind and each.pool != own.pool:
                used[each.pool] = max(used.get(each.pool, 0), count * each.width)
        left = room.free[own.kind] - sum(used.values())
        if own.whole:
            return int(left == room.total[own.kind] == own.width)
        return max(0, left) // own.width

    def _most_by_amount(self, amount: float, needs: list[float], counts: Sequence[int], index: int) -> int:
        if not needs[index] or math.isinf(amount):
            return self.types[index].count
        used = sum(
            need * count for place, (need, count) in enumerate(zip(needs, counts, strict=True)) if place != index
        )
        return max(0, math.floor((amount - used) / needs[index] + _SLACK))

    def patterns(self, room: Room, limit: int) -> tuple[Counts, ...] | None:
        """Return all patterns of a room, the ones with most of the first types first.

        None when there are over `limit`.
        """
        found: list[Counts] = []
        counts = [0] * len(self.types)

        def extend(index: int) -> bool:
            most = self.most(room, counts, index)
            is_last = index == len(counts) - 1
            for count in range(most, (most if is_last or self._is_free(index) else 0) - 1, -1):
                counts[index] = count
                if is_last:
                    found.append(tuple(counts))
                elif not extend(index + 1):
                    return False
            counts[index] = 0
            return len(found) <= limit

        return _largest(found) if extend(0) else None

    def _is_free(self, index: int) -> bool:
        own = self.types[index]
        return own.kind is None and not own.num_cpus and not own.memory_bytes

    def clip(self, room: Room) -> Room:
        """Return the same room as far as patterns go: CPUs and memory beyond what devices could ever need are infinite.

        So nodes that differ by a few bytes of free memory are alike.
        """
        cpus = sum(self._most_by_devices(room, [0] * len(self.types), i) * t.num_cpus for i, t in enumerate(self.types))
        memory = sum(
            self._most_by_devices(room, [0] * len(self.types), i) * t.memory_bytes for i, t in enumerate(self.types)
        )
        return room._replace(
            num_cpus=math.inf if room.num_cpus >= cpus else room.num_cpus,
            memory_bytes=math.inf if room.memory_bytes >= memory else room.memory_bytes,
        )


def _largest(found: list[Counts]) -> tuple[Counts, ...]:
    """Return those to which no other adds anything; they come in falling order, so only an earlier one can."""
    kept: list[Counts] = []
    for counts in found:
        if not any(all(mine >= its for mine, its in zip(other, counts, strict=True)) for other in kept):
            kept.append(counts)
    return tuple(kept)


class NodeClass(NamedTuple):
    """Nodes with the same patterns, by their indices."""

    nodes: tuple[int, ...]
    patterns: tuple[Counts, ...]


@dataclass(frozen=True)
class Packing:
    """The outcome.

    Args:
        types: units that were packed.
        counts: for each node, units of each type; None when no packing was found.
        proven: whether "none" is certain; a search that gives up has proved nothing.
    """

    types: Sequence[UnitType]
    counts: tuple[Counts, ...] | None
    proven: bool = True


def pack(types: Sequence[UnitType], rooms: Sequence[Room]) -> Packing:
    """Pack all units, or say that it cannot be done.

    Args:
        types: units wanted.
        rooms: of the nodes, in order.
    """
    shelf = NodeCapacity(types)
    for type_order, node_order in _filling_orders(types, rooms):
        if filled := _fill(shelf, rooms, type_order, node_order):
            return Packing(types, filled)
    classes = _classes(shelf, rooms)
    if classes is None:
        return Packing(types, None, proven=False)
    weights = _simple_weights(types)
    if any(cannot_hold(classes, shelf.wanted, each) for each in weights):
        return Packing(types, None)
    if sum(len(each.patterns) for each in classes) > MAX_COLUMNS:
        return Packing(types, None, proven=False)
    search = _Search(classes, weights)
    if search.run(shelf.wanted):
        return Packing(types, _deal_out(shelf.wanted, search, len(rooms)))
    return Packing(types, None, proven=search.steps_left > 0)


def _filling_orders(types: Sequence[UnitType], rooms: Sequence[Room]) -> list[tuple[list[int], list[int]]]:
    """Orders of types and nodes to fill by: as given, which reads best; then the widest first into the tightest."""
    as_given = list(range(len(types)))
    widest = sorted(as_given, key=lambda i: (types[i].kind is None, not types[i].whole, -types[i].width, i))
    hungriest = sorted(as_given, key=lambda i: (types[i].kind is None, -types[i].num_cpus, -types[i].width, i))
    nodes = list(range(len(rooms)))
    tightest = sorted(nodes, key=lambda node: (sum(rooms[node].free), rooms[node].num_cpus, node))
    return [(as_given, nodes), (widest, tightest), (widest, nodes), (hungriest, nodes), (hungriest, tightest[::-1])]


def _fill(
    shelf: NodeCapacity, rooms: Sequence[Room], type_order: Sequence[int], node_order: Sequence[int]
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


def _classes(shelf: NodeCapacity, rooms: Sequence[Room]) -> list[NodeClass] | None:
    """Nodes by their patterns; None where one has too many."""
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


def _simple_weights(types: Sequence[UnitType]) -> list[Counts]:
    """Weights that refuse most of what cannot be: each type alone, and whole multiples of each width."""
    alone = [tuple(int(i == j) for j in range(len(types))) for i in range(len(types))]
    widths = sorted({each.width for each in types if each.kind is not None})
    return alone + [tuple(each.width // width if each.kind is not None else 0 for each in types) for width in widths]


def cannot_hold(classes: Sequence[NodeClass], wanted: Counts, weights: Counts) -> bool:
    """Return whether the weights prove that the nodes cannot hold what is wanted.

    No node holds more weight than the heaviest of its patterns.
    """
    most = sum(len(each.nodes) * max(_weight(pattern, weights) for pattern in each.patterns) for each in classes)
    return most < _weight(wanted, weights)


def _weight(counts: Counts, weights: Counts) -> int:
    return sum(count * weight for count, weight in zip(counts, weights, strict=True))


class _Column(NamedTuple):
    """A pattern of a class."""

    node_class: NodeClass
    pattern: Counts
    is_first: bool
    """True for the first one of its class."""


class _Search:
    """Decides how many nodes of each class take each of its patterns; remembers what has failed.

    Args:
        classes: of nodes.
        weights: each prunes what it proves impossible; see `cannot_hold`.
    """

    def __init__(self, classes: Sequence[NodeClass], weights: Sequence[Counts]) -> None:
        self.columns = [_Column(each, pattern, i == 0) for each in classes for i, pattern in enumerate(each.patterns)]
        self.amounts = [0] * len(self.columns)
        self.steps_left = SEARCH_STEPS
        self._failed: set[tuple[int, int, Counts]] = set()
        self._bounds = [(each, self._most_weight(each)) for each in weights]

    def run(self, wanted: Counts) -> bool:
        """Return whether a packing was found: `amounts` nodes of each column."""
        return self._place(0, 0, wanted)

    def _most_weight(self, weights: Counts) -> list[tuple[int, int]]:
        """Return for each column the largest weight of a node of its class from it on, and of all later classes."""
        found: list[tuple[int, int]] = []
        best = later = 0
        for column in reversed(self.columns):
            best = max(best, _weight(column.pattern, weights))
            found.append((best, later))
            if column.is_first:
                later += best * len(column.node_class.nodes)
                best = 0
        return found[::-1]

    def _is_hopeless(self, index: int, nodes_left: int, wanted: Counts) -> bool:
        return any(
            _weight(wanted, weights) > nodes_left * most[index][0] + most[index][1] for weights, most in self._bounds
        )

    def _place(self, index: int, nodes_left: int, wanted: Counts) -> bool:
        if not any(wanted):
            return True
        if index == len(self.columns) or self.steps_left <= 0:
            return False
        self.steps_left -= 1
        column = self.columns[index]
        if column.is_first:
            nodes_left = len(column.node_class.nodes)
        state = (index, nodes_left, wanted)
        if state in self._failed or self._is_hopeless(*state):
            return False
        useful = max(
            (-(-want // count) for want, count in zip(wanted, column.pattern, strict=True) if count), default=0
        )
        for amount in range(min(nodes_left, useful), -1, -1):
            left = tuple(max(0, want - amount * count) for want, count in zip(wanted, column.pattern, strict=True))
            self.amounts[index] = amount
            if self._place(index + 1, nodes_left - amount, left):
                return True
        self.amounts[index] = 0
        self._failed.add(state)
        return False


def _deal_out(wanted: Counts, search: _Search, num_nodes: int) -> tuple[Counts, ...]:
    """Give each node of a class its pattern, and take off what is over at the end."""
    held: list[Counts] = [(0,) * len(wanted)] * num_nodes
    for column, amount in zip(search.columns, search.amounts, strict=True):
        if column.is_first:
            nodes = iter(column.node_class.nodes)
        for _ in range(amount):
            held[next(nodes)] = column.pattern
    left = list(wanted)
    for node, counts in enumerate(held):
        held[node] = tuple(min(count, have) for count, have in zip(counts, left, strict=True))
        left = [have - count for have, count in zip(left, held[node], strict=True)]
    return tuple(held)
