"""Where the ranks of a run go: what it wants, the nodes it is asked about, and every rank in its place."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from offbeat_placement import (
    ACCELERATOR,
    Allocation,
    Block,
    Node,
    Plan,
    RankGroup,
    draw_plan,
    plan_blocks,
    plan_placement,
    read_nodes,
)

_RAY_NAMES: Final = {"cuda": ACCELERATOR}
"""Kinds of device that Ray does not call by their own name in capitals."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Every rank of a run in its place.

    Args:
        nodes: of the cluster.
        groups: of ranks, as the configuration asks for them.
        plan: where each rank goes.
    """

    nodes: tuple[Node, ...]
    groups: tuple[RankGroup, ...]
    plan: Plan

    @property
    def picture(self) -> str:
        """The nodes with every rank in its place, at most 100 columns wide."""
        return draw_plan(self.plan, self.nodes, self.groups)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What a launcher reserves."""
        return plan_blocks(self.plan, self.groups)

    def only(self, *roles: str) -> "Placement":
        """These roles where they are. What they share with others they then have alone."""
        groups = [
            replace(group, shares_devices_with=group.shares_devices_with if group.shares_devices_with in roles else "")
            for group in self.groups
            if group.role in roles
        ]
        plan = Plan(
            ranks=tuple(rank for rank in self.plan.ranks if rank.role in roles),
            drivers=tuple(driver for driver in self.plan.drivers if driver.role in roles),
        )
        return replace(self, groups=tuple(groups), plan=plan)

    def accelerator_bytes(self, role: str) -> int:
        """Memory of the smallest accelerator that a role uses; 0 when nobody knows."""
        names = {rank.node for rank in self.plan.ranks if rank.role == role and rank.device is not None}
        return min((node.accelerator_memory_bytes for node in self.nodes if node.name in names), default=0)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a run would take place.

    Args:
        nodes: and what is free on them.
        reserves: CPUs and devices are reserved for each role, and kinds of accelerator are called as the cluster calls
            them. Without that, as on one machine without Ray, roles share the CPUs, kinds are called as the device seam
            calls them, and a role that is to take one device by its number shares it with whoever does the same.
    """

    nodes: tuple[Node, ...]
    reserves: bool

    @classmethod
    def named(cls, words: str, devices: Iterable[str]) -> "Site":
        """Nodes from words.

        Args:
            words: "4x8", or a file of nodes.
            devices: settings of the recipe, which tell the kind of accelerator where the words do not.

        Raises:
            ConfigError: the words or the file are wrong.
        """
        return cls(nodes=tuple(read_nodes(words, _named_kind(devices))), reserves=True)

    def kind(self, device: str) -> str:
        """Kind of accelerator that a role is to be given for its device setting; "" for none."""
        kinds = sorted({kind for node in self.nodes for kind in (*node.free, *node.total)})
        name, _, index = device.partition(":")
        if name == "auto":
            return kinds[0] if kinds else ""
        if name == "cpu" or (not self.reserves and (index or name not in kinds)):
            return ""
        return name.upper() if name.upper() in kinds or not kinds else kinds[0]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run asks for.

    Args:
        groups: of ranks.
        allocation: the part of the cluster it takes; None: all of it.
    """

    groups: tuple[RankGroup, ...]
    allocation: Allocation | None = None

    def place(self, site: Site) -> Placement:
        """Plan where every rank goes. Pure.

        Raises:
            PlacementError: it does not fit, with the changes that would.
            ConfigError: settings that contradict each other.
        """
        plan = plan_placement(site.nodes, self.groups, self.allocation)
        return Placement(nodes=site.nodes, groups=self.groups, plan=plan)


def _named_kind(devices: Iterable[str]) -> str:
    """Kind of accelerator on nodes of which nobody says it, from what the recipe computes on; by Ray's name for it."""
    names = (device.partition(":")[0] for device in devices)
    named = next((name for name in names if name not in ("auto", "cpu")), "")
    return _RAY_NAMES.get(named, named.upper()) or ACCELERATOR
