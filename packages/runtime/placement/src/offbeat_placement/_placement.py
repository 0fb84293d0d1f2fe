"""The one call: nodes and groups in, a checked plan or one error out; and the settings that make a run fit."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from offbeat_core import PlacementError
from offbeat_placement._check import check_plan
from offbeat_placement._memory import MemoryEstimate
from offbeat_placement._plan import Block, Plan, draw_plan, plan_blocks
from offbeat_placement._planner import Part, allocate, find_plan
from offbeat_placement._resources import Allocation, ClusterView, Node, RankGroup, names_text, sort_nodes
from offbeat_placement._shortfall import Suggestion, allocation_error, misfit_error, suggest_changes

SettingValue = bool | int
_MAX_ROUNDS: Final = 4
"""The allocation may need a change, and then a group within it."""
_BY_NUMBER: Final = "roles that name one device by its number, such as KIND:0, share it"


def plan_placement(nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation | None = None) -> Plan:
    """Give every rank its node and device.

    A tensor-parallel stage lies on one node; ranks go in (node, device) order; the driver of a replica is on the node
    of its rank 0; groups share devices only where they are asked to.

    Args:
        nodes: what is free, in any order: the plan is the same.
        groups: wanted; earlier ones take earlier nodes where there is a choice.
        allocation: the part of the cluster to use; None: all of it.

    Raises:
        PlacementError: it does not fit, with the shortfall of each node and the smallest changes that would fit.
        ConfigError: nodes or groups that contradict themselves.
    """
    nodes = sort_nodes(nodes)
    part = allocate(nodes, allocation, groups) if allocation is not None else Part(list(nodes))
    if part is None:
        assert allocation is not None  # only an allocation can fail
        raise allocation_error(nodes, groups, allocation)
    outcome = find_plan(part.nodes, groups)
    if outcome.plan is None:
        raise misfit_error(part.nodes, groups, proven=outcome.proven and part.proven)
    check_plan(outcome.plan, part.nodes, groups)
    return outcome.plan


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
        """Return what a launcher reserves."""
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

    def is_on_cpu(self, role: str) -> bool:
        """None of its ranks has an accelerator."""
        return all(rank.device is None for rank in self.plan.ranks if rank.role == role)

    def main_memory(self, roles: Mapping[str, MemoryEstimate]) -> dict[str, tuple[int, float]]:
        """Return, by the names of nodes alike, bytes of main memory that their ranks need, and those that are free.

        Needed is what waits there for a device, and all of ranks that have none. Empty where nothing waits.

        Args:
            roles: memory of one rank of each.
        """
        held: Counter[str] = Counter()
        for rank in self.plan.ranks:
            if (estimate := roles.get(rank.role)) is not None:
                held[rank.node] += estimate.main_bytes + (rank.device is None) * estimate.num_bytes
        alike: defaultdict[tuple[int, float], list[str]] = defaultdict(list)
        for node in self.nodes if any(estimate.main for estimate in roles.values()) else ():
            if held[node.name]:
                alike[held[node.name], node.memory_bytes].append(node.name)
        return {names_text(names): sizes for sizes, names in alike.items()}

    def accelerator_bytes(self, role: str) -> int:
        """Memory of the smallest accelerator that a role uses; 0 if unknown."""
        names = {rank.node for rank in self.plan.ranks if rank.role == role and rank.device is not None}
        return min((node.accelerator_memory_bytes for node in self.nodes if node.name in names), default=0)


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """Resources that a run asks for.

    Args:
        groups: of ranks.
        allocation: the part of the cluster it takes; None: all of it.
    """

    groups: tuple[RankGroup, ...]
    allocation: Allocation | None = None

    def place(self, view: ClusterView) -> Placement:
        """Plan where every rank goes. Pure.

        Raises:
            PlacementError: it does not fit, with the changes that would.
            ConfigError: settings that contradict each other.
        """
        try:
            plan = plan_placement(view.nodes, self.groups, self.allocation)
        except PlacementError as error:
            if view.reserves or self.allocation is not None:
                raise
            changes = [", ".join(change.text for change in each) for each in _suggest_settings(self, view)]
            raise PlacementError(error.reason, error.shortfall, (*changes, _BY_NUMBER)) from None
        return Placement(nodes=view.nodes, groups=self.groups, plan=plan)


def _suggest_settings(wanted: ResourceRequest, view: ClusterView) -> list[Suggestion]:
    """Changes of settings that would make it fit on these very nodes."""
    found = suggest_changes(view.nodes, wanted.groups, wanted.allocation)
    return [changes for changes in found if all(change.field != "nodes" for change in changes)]


def no_companions(_: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
    """No setting needs another."""
    return {}


def fit_settings(
    view: ClusterView,
    request: Callable[[Mapping[str, SettingValue]], ResourceRequest],
    companions: Callable[[Mapping[str, SettingValue]], Mapping[str, SettingValue]] = no_companions,
) -> dict[str, SettingValue]:
    """Settings that make a run fit, by "section.key"; empty when it fits as it is.

    Args:
        view: to fit it to.
        request: what the run asks for with some settings changed.
        companions: settings that must change together with those that are changed.

    Raises:
        PlacementError: no change of settings makes it fit.
    """
    settings: dict[str, SettingValue] = {}
    for _ in range(_MAX_ROUNDS):
        wanted = request(settings)
        try:
            wanted.place(view)
        except PlacementError as error:
            usable = _suggest_settings(wanted, view)
            if not usable:
                raise error from None
            settings |= {
                change.key: True if change.field == "shares_devices_with" else int(change.setting)
                for change in usable[0]
            }
            settings |= companions(settings)
        else:
            return settings
    raise PlacementError("no change of settings was found that makes the recipe fit: choose the cluster first")
