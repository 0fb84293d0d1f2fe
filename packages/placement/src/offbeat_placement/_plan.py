"""A plan: every rank with its node and device, and what to reserve for it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class PlacedRank:
    """One rank in its place.

    Args:
        role: of its group.
        replica: which replica of the group.
        rank: within the group, over all replicas.
        node: name of its node.
        device: index of its accelerator on that node; None for a rank on CPUs.
        num_cpus: its own.
    """

    role: str
    replica: int
    rank: int
    node: str
    device: int | None = None
    num_cpus: float = 0


@dataclass(frozen=True, kw_only=True)
class PlacedDriver:
    """Where the process that drives a replica runs."""

    role: str
    replica: int
    node: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where everything goes. Made by `plan_placement`; whoever places it asks `verify_placed` afterwards.

    Args:
        ranks: of all groups, in the order of groups, then of rank.
        drivers: one for each replica.
    """

    ranks: tuple[PlacedRank, ...]
    drivers: tuple[PlacedDriver, ...]

    @cached_property
    def _by_replica(self) -> dict[tuple[str, int], tuple[PlacedRank, ...]]:
        return _grouped(self.ranks, lambda rank: (rank.role, rank.replica))

    @cached_property
    def _by_node(self) -> dict[str, tuple[PlacedRank, ...]]:
        return _grouped(self.ranks, lambda rank: rank.node)

    def replica(self, role: str, replica: int) -> tuple[PlacedRank, ...]:
        """Ranks of one replica, in order."""
        return self._by_replica[role, replica]

    def on_node(self, node: str) -> tuple[PlacedRank, ...]:
        """Ranks on one node, in the order of groups."""
        return self._by_node.get(node, ())

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles, in the order of groups."""
        return tuple(dict.fromkeys(rank.role for rank in self.ranks))

    def as_data(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return {"ranks": [asdict(rank) for rank in self.ranks], "drivers": [asdict(driver) for driver in self.drivers]}


def _grouped(ranks: Iterable[PlacedRank], key: Callable[[PlacedRank], K]) -> dict[K, tuple[PlacedRank, ...]]:
    found: dict[K, list[PlacedRank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return {name: tuple(each) for name, each in found.items()}
