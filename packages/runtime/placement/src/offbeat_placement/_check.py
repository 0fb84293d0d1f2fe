"""Checks a plan, or what was really placed, against the promises of placement: written apart from the planner."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from offbeat_core import PlacementError
from offbeat_placement._plan import PlacedDriver, PlacedRank, Plan
from offbeat_placement._resources import Node, RankGroup, node_order, sort_nodes

_MOST_SHOWN = 8
_SLACK = 1e-6


def check_plan(plan: Plan, nodes: Sequence[Node], groups: Sequence[RankGroup]) -> None:
    """Hold a plan to every promise: nothing straddles, nothing is used twice, everything is in order.

    Args:
        plan: to check.
        nodes: what was free before.
        groups: wanted.

    Raises:
        PlacementError: with every promise that is broken, by rank and node.
    """
    broken = list(broken_promises(plan, nodes, groups))
    if broken:
        shown = [*broken[:_MOST_SHOWN], *([f"and {len(broken) - _MOST_SHOWN} more"] * (len(broken) > _MOST_SHOWN))]
        raise PlacementError("ranks do not lie where they must:", tuple(shown))


def verify_placed(
    ranks: Sequence[PlacedRank],
    drivers: Sequence[PlacedDriver],
    nodes: Sequence[Node],
    groups: Sequence[RankGroup],
) -> None:
    """Check where ranks and drivers really are, after a cluster has placed them.

    Args:
        ranks: each with the node and the device that its process reports.
        drivers: each with the node that its process reports.
        nodes: what was free before.
        groups: wanted.

    Raises:
        PlacementError: with every promise that is broken, by rank and node.
    """
    check_plan(Plan(ranks=tuple(ranks), drivers=tuple(drivers)), nodes, groups)


def broken_promises(plan: Plan, nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Iterator[str]:
    """Describe every promise that a plan breaks."""
    by_name = {node.name: node for node in sort_nodes(nodes)}
    missing = sorted({rank.node for rank in plan.ranks} - by_name.keys(), key=node_order)
    if missing:
        yield f"no such node: {', '.join(missing)}"
        return
    for group in groups:
        own = sorted((rank for rank in plan.ranks if rank.role == group.role), key=lambda rank: rank.rank)
        if [rank.rank for rank in own] != list(range(group.num_ranks)):
            yield f"{group.role}: needs ranks 0 to {group.num_ranks - 1}, each once, and has {len(own)}"
            continue
        yield from _wrong_devices(group, own, by_name)
        yield from _straddling(group, own, by_name)
        yield from _out_of_order(group, own)
        yield from _far_drivers(group, own, plan.drivers)
    unknown = {rank.role for rank in plan.ranks} - {group.role for group in groups}
    if unknown:
        yield f"no such group: {', '.join(sorted(unknown))}"
        return
    yield from _shared_devices(plan, groups)
    yield from _overfull(plan, by_name, groups)


def _wrong_devices(group: RankGroup, ranks: Sequence[PlacedRank], nodes: dict[str, Node]) -> Iterator[str]:
    for rank in ranks:
        if rank.replica != rank.rank // group.ranks_per_replica:
            yield f"{group.role} rank {rank.rank} belongs to replica {rank.rank // group.ranks_per_replica}"
        if not group.accelerator:
            if rank.device is not None:
                yield f"{group.role} rank {rank.rank} needs no device and has {rank.device} on {rank.node}"
        elif rank.device not in nodes[rank.node].free.get(group.accelerator, ()):
            yield f"{group.role} rank {rank.rank}: {group.accelerator} {rank.device} of {rank.node} is not free"


def _straddling(group: RankGroup, ranks: Sequence[PlacedRank], nodes: dict[str, Node]) -> Iterator[str]:
    for first in range(0, len(ranks), group.tensor_parallel):
        stage = ranks[first : first + group.tensor_parallel]
        held = Counter(rank.node for rank in stage)
        if len(held) == 1:
            continue
        where = ", ".join(f"{count} on {name}" for name, count in held.items())
        named = f"{group.role} replica {stage[0].replica}, ranks {stage[0].rank} to {stage[-1].rank}"
        if not group.spans_nodes:
            yield f"{named}: a tensor-parallel group must lie on one node, and straddles {len(held)}: {where}"
        elif any(count != nodes[name].num_total(group.accelerator) for name, count in held.items()):
            yield f"{named}: a group over several nodes must take each whole: {where}"


def _out_of_order(group: RankGroup, ranks: Sequence[PlacedRank]) -> Iterator[str]:
    if not group.accelerator:
        return
    width = group.tensor_parallel
    places = [(node_order(rank.node), rank.device or 0) for rank in ranks]
    for first in range(0, len(ranks), width):
        if any(before >= after for before, after in pairwise(places[first : first + width])):
            yield f"{group.role} ranks {first} to {first + width - 1} are not in the order of node and device"
    if any(before >= after for before, after in pairwise(places[::width])):
        yield f"{group.role}: its tensor-parallel groups are not in the order of node and device"


def _far_drivers(group: RankGroup, ranks: Sequence[PlacedRank], drivers: Sequence[PlacedDriver]) -> Iterator[str]:
    nodes = defaultdict(list)
    for driver in drivers:
        if driver.role == group.role:
            nodes[driver.replica].append(driver.node)
    for first in ranks[:: group.ranks_per_replica]:
        if nodes[first.replica] != [first.node]:
            yield (
                f"{group.role} replica {first.replica}: its one driver must be on {first.node}, with its rank 0: "
                f"it is on {', '.join(nodes[first.replica]) or 'none'}"
            )


def _shared_devices(plan: Plan, groups: Sequence[RankGroup]) -> Iterator[str]:
    by_role = {group.role: group for group in groups}
    holders: dict[tuple[str, str, int], list[PlacedRank]] = defaultdict(list)
    for rank in plan.ranks:
        if rank.device is not None:
            holders[rank.node, by_role[rank.role].accelerator, rank.device].append(rank)
    for (node, kind, device), ranks in holders.items():
        for place, rank in enumerate(ranks):
            for other in ranks[:place]:
                if not _may_share(by_role, rank.role, other.role):
                    yield (
                        f"{kind} {device} of {node} is used by {other.role} rank {other.rank} and "
                        f"{rank.role} rank {rank.rank}, which do not share devices"
                    )


def _may_share(by_role: dict[str, RankGroup], one: str, other: str) -> bool:
    """Return whether two roles are linked by `shares_devices_with`, in any number of steps."""
    if one == other:
        return False
    reached, grew = {one}, True
    while grew:
        links = [(group.role, group.shares_devices_with) for group in by_role.values() if group.shares_devices_with]
        more = {b for a, b in links if a in reached} | {a for a, b in links if b in reached}
        grew = not more <= reached
        reached |= more
    return other in reached


def _overfull(plan: Plan, nodes: dict[str, Node], groups: Sequence[RankGroup]) -> Iterator[str]:
    by_role = {group.role: group for group in groups}
    cpus: dict[str, float] = defaultdict(float)
    memory_bytes: dict[str, float] = defaultdict(float)
    for rank in plan.ranks:
        cpus[rank.node] += by_role[rank.role].cpus_per_rank
        memory_bytes[rank.node] += by_role[rank.role].memory_bytes_per_rank
    for name, node in nodes.items():
        if cpus[name] > node.num_cpus + _SLACK:
            yield f"{name}: its ranks need {cpus[name]:g} CPUs and {node.num_cpus:g} are free"
        if memory_bytes[name] > node.memory_bytes:
            needed, free = memory_bytes[name], node.memory_bytes
            yield f"{name}: its ranks need {needed:.0f} bytes of memory and {free:.0f} are free"
