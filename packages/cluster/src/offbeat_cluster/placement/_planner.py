"""The planner: nodes and groups in, a plan out, if there is one. The same answer everywhere, in any order of nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Final, NamedTuple

from offbeat_cluster.placement._assign import assign
from offbeat_cluster.placement._groups import Allocation, RankGroup, kinds_of, pools_of
from offbeat_cluster.placement._nodes import Node, sort_nodes
from offbeat_cluster.placement._packing import Packing, pack
from offbeat_cluster.placement._plan import Plan
from offbeat_cluster.placement._units import Room, UnitType

MAX_LAYOUTS: Final = 64
"""Ways of cutting groups into units that are tried; only stages over several nodes of different sizes give many."""


@dataclass(frozen=True)
class Outcome:
    """What the planner found.

    Args:
        plan: None when there is none.
        proven: whether "none" is certain.
    """

    plan: Plan | None
    proven: bool = True


def find_plan(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Outcome:
    """Look for a plan.

    Args:
        nodes: in any order.
        groups: wanted; earlier ones take earlier nodes where there is a choice.

    Raises:
        ConfigError: nodes or groups that contradict themselves.
    """
    nodes = sort_nodes(nodes)
    found = _find_packing(nodes, groups)
    if found.packing.counts is None:
        return Outcome(None, found.packing.proven)
    return Outcome(assign(nodes, groups, kinds_of(groups), found.types, found.packing.counts))


def fits(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> bool:
    """Whether there is a plan, without making it."""
    return _find_packing(sort_nodes(nodes), groups).packing.counts is not None


class _Found(NamedTuple):
    types: Sequence[UnitType]
    packing: Packing


def _find_packing(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> _Found:
    kinds = kinds_of(groups)
    rooms = [_room(node, kinds) for node in nodes]
    layouts = list(islice(_layouts(groups, kinds, rooms), MAX_LAYOUTS + 1))
    proven = len(layouts) <= MAX_LAYOUTS
    for types in layouts[:MAX_LAYOUTS]:
        packing = pack(types, rooms)
        if packing.counts is not None:
            return _Found(types, packing)
        proven = proven and packing.proven
    return _Found((), Packing(None, proven))


def _room(node: Node, kinds: Sequence[str]) -> Room:
    return Room(
        tuple(node.num_free(kind) for kind in kinds),
        tuple(node.num_total(kind) for kind in kinds),
        node.num_cpus,
        node.memory_bytes,
    )


def _layouts(groups: Sequence[RankGroup], kinds: Sequence[str], rooms: Sequence[Room]) -> Iterator[list[UnitType]]:
    """Ways of cutting the groups into units: replicas whole first, then by stages."""
    pools = pools_of(groups)
    cuts = [[False], [True]] if any(group.pipeline_parallel > 1 for group in groups) else [[False]]
    for [by_stages] in cuts:
        choices = [
            list(_units(index, group, kinds, rooms, pools[group.role], by_stages=by_stages))
            for index, group in enumerate(groups)
        ]
        for choice in product(*choices):
            yield [each for units in choice for each in units]


def _units(
    index: int, group: RankGroup, kinds: Sequence[str], rooms: Sequence[Room], pool: str, *, by_stages: bool
) -> Iterator[list[UnitType]]:
    """Ways of cutting one group."""
    kind = kinds.index(group.accelerator) if group.accelerator else None

    def units(width: int, count: int, *, whole: bool = False) -> UnitType:
        cpus, memory_bytes = width * group.cpus_per_rank, width * group.memory_bytes_per_rank
        return UnitType(
            group=index,
            pool=pool,
            kind=kind,
            width=width,
            count=count,
            num_cpus=cpus,
            memory_bytes=memory_bytes,
            whole=whole,
        )

    largest = max((room.total[kind] for room in rooms), default=0) if kind is not None else group.tensor_parallel
    if group.tensor_parallel <= largest or not group.spans_nodes:
        per_replica = group.pipeline_parallel if by_stages else 1
        yield [units(group.ranks_per_replica // per_replica, group.num_replicas * per_replica)]
        return
    assert kind is not None  # RankGroup refuses the other
    num_stages = group.num_replicas * group.pipeline_parallel
    whole_nodes = [room.total[kind] for room in rooms if 0 < room.free[kind] == room.total[kind]]
    sizes = [size for size in sorted(set(whole_nodes), reverse=True) if group.tensor_parallel % size == 0]
    for numbers in _splits(num_stages, [whole_nodes.count(s) // (group.tensor_parallel // s) for s in sizes]):
        yield [
            units(size, number * (group.tensor_parallel // size), whole=True)
            for size, number in zip(sizes, numbers, strict=True)
            if number
        ]


def _splits(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to split a number into parts, each at most so much, the first part as large as it may be."""
    if not most:
        if not total:
            yield ()
        return
    for first in range(min(total, most[0]), -1, -1):
        for rest in _splits(total - first, most[1:]):
            yield first, *rest


def allocate(nodes: Sequence[Node], allocation: Allocation) -> list[Node] | None:
    """The part of the cluster that an allocation names: its first nodes with room, cut down to what was asked for.

    None when there are not so many such nodes.
    """
    kind, per_node = allocation.kind, allocation.accelerators_per_node
    roomy = [node for node in sort_nodes(nodes) if node.num_free(kind) >= per_node][: allocation.num_nodes]
    if len(roomy) < allocation.num_nodes:
        return None
    return [
        replace(node, free={**node.free, kind: node.free[kind][:per_node]}, total={**node.total, kind: per_node})
        for node in roomy
    ]
