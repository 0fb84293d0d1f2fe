"""The planner: nodes and groups in, a plan out, if there is one. The same answer everywhere, in any order of nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Final, NamedTuple

from offbeat_placement._assign import assign
from offbeat_placement._groups import RankGroup, kinds_of, pools_of
from offbeat_placement._nodes import Node, sort_nodes
from offbeat_placement._packing import Packing, pack
from offbeat_placement._plan import Plan
from offbeat_placement._units import Room, UnitType

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

    per_replica = group.pipeline_parallel if by_stages else 1
    yield [units(group.ranks_per_replica // per_replica, group.num_replicas * per_replica)]
    if not group.spans_nodes:
        return
    assert kind is not None  # RankGroup refuses the other
    yield from _spanning_units(group, [(room.free[kind], room.total[kind]) for room in rooms], units)


def _spanning_units(
    group: RankGroup, rooms: Sequence[tuple[int, int]], units: Callable[..., UnitType]
) -> Iterator[list[UnitType]]:
    """Ways of cutting a group whose stages may lie on several nodes: as many stages as can on one node each, the others
    on whole nodes of one size, which are narrower than a stage.

    Args:
        group: to be cut.
        rooms: free accelerators of each node, and how many it has in all.
        units: makes units of a width.
    """
    width, num_stages = group.tensor_parallel, group.num_replicas * group.pipeline_parallel
    whole = [total for free, total in rooms if 0 < free == total < width and width % total == 0]
    sizes = sorted(set(whole), reverse=True)
    most = [sum(free // width for free, _ in rooms), *(whole.count(size) // (width // size) for size in sizes)]
    for single, *numbers in _splits(num_stages, most):
        if single == num_stages:
            continue  # that is the way of a group that spans no nodes
        yield [
            *([units(width, single)] if single else []),
            *(
                units(size, number * (width // size), whole=True)
                for size, number in zip(sizes, numbers, strict=True)
                if number
            ),
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
