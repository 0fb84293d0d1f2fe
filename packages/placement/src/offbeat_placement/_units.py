"""What a node can hold: units of ranks that stay together, and the largest sets of them that fit.

Legend: a *unit* is ranks that one node must hold together; a *type* is units alike; *counts* says how many units of
each type a node holds; a *pattern* is counts that fit and to which no unit can be added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_SLACK: Final = 1e-9
"""CPUs are fractions such as 0.1, which a float cannot hold: three of them must fit into 0.3."""

Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
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
    """What is free on a node: accelerators by kind, of how many, CPUs and memory."""

    free: tuple[int, ...]
    total: tuple[int, ...]
    num_cpus: float
    memory_bytes: float


class Shelf:
    """Knows how many units fit into a room.

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
        """All patterns of a room, the ones with most of the first types first; None when there are over `limit`."""
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
        """The same room as far as patterns go: CPUs and memory beyond what devices could ever need are infinite.

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
    """Those to which no other adds anything; they come in falling order, so only an earlier one can."""
    kept: list[Counts] = []
    for counts in found:
        if not any(all(mine >= its for mine, its in zip(other, counts, strict=True)) for other in kept):
            kept.append(counts)
    return tuple(kept)
