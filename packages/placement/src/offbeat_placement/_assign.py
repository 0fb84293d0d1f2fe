"""From counts to a plan: which unit takes which devices, and which ranks are in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat_placement._groups import RankGroup
from offbeat_placement._nodes import Node
from offbeat_placement._plan import PlacedDriver, PlacedRank, Plan
from offbeat_placement._units import Counts, UnitType


@dataclass(frozen=True)
class _Slot:
    """A unit in its place: a node and devices of it, or as many None."""

    node: str
    devices: tuple[int | None, ...]


def assign(
    nodes: Sequence[Node],
    groups: Sequence[RankGroup],
    kinds: Sequence[str],
    types: Sequence[UnitType],
    counts: Sequence[Counts],
) -> Plan:
    """Number the ranks in (node, device) order.

    Args:
        nodes: in order.
        groups: wanted.
        kinds: of accelerators, as `UnitType.kind` counts them.
        types: units of the groups.
        counts: for each node, units of each type.
    """
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
