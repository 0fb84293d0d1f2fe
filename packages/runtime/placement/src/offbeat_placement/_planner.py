"""The planner: nodes and groups in, a plan out, if there is one. The same answer everywhere, in any order of nodes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Final, NamedTuple

from offbeat_placement._packing import Counts, Packing, Room, UnitType, pack
from offbeat_placement._plan import PlacedDriver, PlacedRank, Plan
from offbeat_placement._resources import Allocation, Node, RankGroup, kinds_of, pools_of, sort_nodes

MAX_LAYOUTS: Final = 64
"""Ways of cutting groups into units that are tried; only stages over several nodes of different sizes give many."""
MAX_PARTS: Final = 64
"""Parts of a cluster that are tried."""
MAX_CLASSES: Final = 64
"""Kinds of nodes that parts are made of; over that, the best nodes are tried and nothing is proved."""


@dataclass(frozen=True)
class Outcome:
    """Result of the planner.

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
    packing = _pack(nodes, groups)
    return Outcome(_assign(nodes, groups, packing.types, packing.counts) if packing.counts else None, packing.proven)


def fits(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> bool:
    """Return whether there is a plan, without making it."""
    return _pack(sort_nodes(nodes), groups).counts is not None


def _pack(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Packing:
    kinds = kinds_of(groups)
    rooms = [_room(node, kinds) for node in nodes]
    layouts = list(islice(_layouts(groups, kinds, rooms), MAX_LAYOUTS + 1))
    proven = len(layouts) <= MAX_LAYOUTS
    for types in layouts[:MAX_LAYOUTS]:
        packing = pack(types, rooms)
        if packing.counts is not None:
            return packing
        proven = proven and packing.proven
    return Packing((), None, proven)


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
    for by_stages in [False, True] if any(group.pipeline_parallel > 1 for group in groups) else [False]:
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

    def units(width: int, count: int, whole: bool = False) -> UnitType:
        cpus, memory_bytes = width * group.cpus_per_rank, width * group.memory_bytes_per_rank
        return UnitType(index, pool, kind, width, count, cpus, memory_bytes, whole)

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
    on whole nodes of one size, which are narrower than a stage. `rooms` is (free, in all) of each node.
    """
    width, num_stages = group.tensor_parallel, group.num_replicas * group.pipeline_parallel
    whole = [total for free, total in rooms if 0 < free == total < width and width % total == 0]
    sizes = sorted(set(whole), reverse=True)
    most = [sum(free // width for free, _ in rooms), *(whole.count(size) // (width // size) for size in sizes)]
    for single, *numbers in _splits(num_stages, most):
        if single == num_stages:
            continue  # that is the way of a group that spans no nodes
        whole_nodes = [(size, n * (width // size)) for size, n in zip(sizes, numbers, strict=True) if n]
        yield [units(width, single)] * bool(single) + [units(size, n, whole=True) for size, n in whole_nodes]


def _splits(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to split a number into parts, each at most so much, the first part as large as it may be."""
    if not most:
        if not total:
            yield ()
        return
    for first in range(min(total, most[0]), -1, -1):
        for rest in _splits(total - first, most[1:]):
            yield first, *rest


class _Slot(NamedTuple):
    """A unit in its place: a node and devices of it, or as many None."""

    node: str
    devices: tuple[int | None, ...]


def _assign(
    nodes: Sequence[Node], groups: Sequence[RankGroup], types: Sequence[UnitType], counts: Sequence[Counts]
) -> Plan:
    """Number the ranks in (node, device) order; `counts` are units of each type on each node."""
    kinds = kinds_of(groups)
    slots: dict[int, list[_Slot]] = {index: [] for index in range(len(groups))}
    for node, held in zip(nodes, counts, strict=True):
        for type_, devices in _lay_out(node, kinds, types, held):
            slots[type_.group].append(_Slot(node.name, devices))
    ranks: list[PlacedRank] = []
    drivers: list[PlacedDriver] = []
    for index, group in enumerate(groups):
        own = list(_number(group, _stages_together(group, slots[index])))
        ranks += own
        firsts = own[:: group.ranks_per_replica]
        drivers += [PlacedDriver(role=each.role, replica=each.replica, node=each.node) for each in firsts]
    return Plan(ranks=tuple(ranks), drivers=tuple(drivers))


def _lay_out(
    node: Node, kinds: Sequence[str], types: Sequence[UnitType], held: Counts
) -> Iterator[tuple[UnitType, tuple[int | None, ...]]]:
    """Units of one node with their devices. Pools of wide units come first, so that these start where the hardware
    pairs devices: 0 to 3 and not 1 to 4.
    """
    present = [(each, count) for each, count in zip(types, held, strict=True) if count]
    widths: dict[tuple[int | None, str], int] = {}
    sizes: dict[tuple[int | None, str], int] = {}
    for each, count in present:
        key = (each.kind, each.pool)
        widths[key] = max(widths.get(key, 0), each.width)
        sizes[key] = max(sizes.get(key, 0), count * each.width)
    starts: dict[tuple[int | None, str], int] = {}
    used: dict[int | None, int] = {}
    for key in sorted(widths, key=lambda key: -widths[key]):
        starts[key] = used.get(key[0], 0)
        used[key[0]] = starts[key] + sizes[key]
    for each, count in present:
        start = starts[each.kind, each.pool]
        for number in range(count):
            if each.kind is None:
                yield each, (None,) * each.width
            else:
                first = start + number * each.width
                yield each, node.free[kinds[each.kind]][first : first + each.width]


def _stages_together(group: RankGroup, slots: list[_Slot]) -> list[_Slot]:
    """Slots in the order of ranks. A stage over several nodes takes nodes of one size, so its slots are gathered."""
    if not group.spans_nodes or all(len(slot.devices) >= group.tensor_parallel for slot in slots):
        return slots
    gathered: dict[int, list[list[_Slot]]] = {}
    stages: list[list[_Slot]] = []
    for slot in slots:
        width = len(slot.devices)
        open_stages = gathered.setdefault(width, [])
        if not open_stages or len(open_stages[-1]) * width == group.tensor_parallel:
            open_stages.append([])
            stages.append(open_stages[-1])
        open_stages[-1].append(slot)
    return [slot for stage in stages for slot in stage]


def _number(group: RankGroup, slots: Sequence[_Slot]) -> Iterator[PlacedRank]:
    places = ((slot.node, device) for slot in slots for device in slot.devices)
    for rank, (node, device) in enumerate(places):
        yield PlacedRank(
            role=group.role,
            replica=rank // group.ranks_per_replica,
            rank=rank,
            node=node,
            device=device,
            num_cpus=group.cpus_per_rank,
        )


class Part(NamedTuple):
    """Nodes cut down to what was asked for.

    Args:
        nodes: those that the groups fit on, if there are such; else the first ones with room.
        proven: whether the groups fit on no other part either, when they do not fit on this one.
    """

    nodes: list[Node]
    proven: bool = True


class _NodeResources(NamedTuple):
    """Resources of a node besides its accelerators; more than the groups could use counts as infinite."""

    num_cpus: float
    memory_bytes: float
    others: tuple[tuple[str, int, int], ...]
    """Accelerators of other kinds: kind, free, in all."""

    def is_at_least(self, other: "_NodeResources") -> bool:
        """Return whether everything that fits beside the other fits here; false where only a try can show it."""
        enough = self.num_cpus >= other.num_cpus and self.memory_bytes >= other.memory_bytes
        return enough and self.others == other.others


def allocate(nodes: Sequence[Node], allocation: Allocation, groups: Sequence[RankGroup]) -> Part | None:
    """Return the part of the cluster that an allocation names, cut down to what was asked for.

    These are its first nodes with room, unless the groups fit on others only.

    Args:
        nodes: of the cluster.
        allocation: so many nodes with so many accelerators each.
        groups: to go there.

    Returns:
        None when there are not so many such nodes.
    """
    kind, per_node = allocation.kind, allocation.accelerators_per_node
    roomy = [
        replace(node, free={**node.free, kind: node.free[kind][:per_node]}, total={**node.total, kind: per_node})
        for node in sort_nodes(nodes)
        if node.num_free(kind) >= per_node
    ]
    if len(roomy) < allocation.num_nodes:
        return None
    first = roomy[: allocation.num_nodes]
    if len(roomy) == allocation.num_nodes or fits(first, groups):
        return Part(first)
    classes = _classes(roomy, groups, kind)
    parts = list(islice(_parts(classes[:MAX_CLASSES], allocation.num_nodes), MAX_PARTS + 1))
    for part in parts[:MAX_PARTS]:
        if fits(part, groups):
            return Part(sort_nodes(part))
    return Part(first, proven=len(parts) <= MAX_PARTS and len(classes) <= MAX_CLASSES)


def _classes(nodes: Sequence[Node], groups: Sequence[RankGroup], kind: str) -> list[tuple[_NodeResources, list[Node]]]:
    """Nodes alike, the best first."""
    found: dict[_NodeResources, list[Node]] = defaultdict(list)
    for node in nodes:
        found[_node_resources(node, groups, kind)].append(node)
    return sorted(found.items(), key=lambda each: each[0], reverse=True)


def _node_resources(node: Node, groups: Sequence[RankGroup], kind: str) -> _NodeResources:
    num_ranks = [min(g.num_ranks, node.num_free(g.accelerator)) if g.accelerator else g.num_ranks for g in groups]
    cpus = sum(number * group.cpus_per_rank for number, group in zip(num_ranks, groups, strict=True))
    memory_bytes = sum(number * group.memory_bytes_per_rank for number, group in zip(num_ranks, groups, strict=True))
    kinds = sorted({group.accelerator for group in groups if group.accelerator} - {kind})
    return _NodeResources(
        num_cpus=float("inf") if node.num_cpus >= cpus else node.num_cpus,
        memory_bytes=float("inf") if node.memory_bytes >= memory_bytes else node.memory_bytes,
        others=tuple((each, node.num_free(each), node.num_total(each)) for each in kinds),
    )


def _parts(classes: Sequence[tuple[_NodeResources, list[Node]]], num_nodes: int) -> Iterator[list[Node]]:
    """Parts of so many nodes, none of which could have a better node instead of one of its own."""
    if not num_nodes:
        yield []
        return
    if sum(len(nodes) for _, nodes in classes) < num_nodes:
        return
    resources, nodes = classes[0]
    for number in range(min(num_nodes, len(nodes)), -1, -1):
        later = classes[1:]
        if number < len(nodes):  # some are left over, so none that is worse may be taken
            later = [each for each in later if not resources.is_at_least(each[0])]
        for rest in _parts(later, num_nodes - number):
            yield [*nodes[:number], *rest]
