"""A plan: every rank with its node and device, what to reserve for it, and its picture."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Final, TypeVar

from offbeat_core import RoleName
from offbeat_placement._resources import Node, RankGroup, kinds_of, names_text, sort_nodes

K = TypeVar("K")
_FREE, _TAKEN = ".", "x"
_FEWEST_HIDDEN: Final = 2
"""Nodes alike between two others are counted instead of drawn, from so many on."""


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
    """Place of the process that drives a replica."""

    role: str
    replica: int
    node: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Places of all ranks and drivers. Made by `plan_placement`; code that places it calls `verify_placed` afterwards.

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
        """Return the plan as JSON can hold it."""
        return {"ranks": [asdict(rank) for rank in self.ranks], "drivers": [asdict(driver) for driver in self.drivers]}


def _grouped(ranks: Iterable[PlacedRank], key: Callable[[PlacedRank], K]) -> dict[K, tuple[PlacedRank, ...]]:
    found: dict[K, list[PlacedRank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return {name: tuple(each) for name, each in found.items()}


@dataclass(frozen=True)
class Block:
    """A part of one node, reserved as one piece.

    Args:
        name: unique in the plan: "rollout-0"; "rollout-0@1" for the second node of one replica; "trainer@2" for the
            ranks of a mesh on its third node.
        node: name of the node of the plan. A launcher may take another, if it takes it for the whole block.
        num_devices: accelerators; 0 for processes on CPUs.
        device_kind: of the accelerators; "" for none.
        num_cpus: of all ranks in it.
        memory_bytes: of all ranks in it.
        roles: for each process in it the ordinals of its devices, 0 to num_devices - 1.
    """

    name: str
    node: str
    num_devices: int
    device_kind: str
    num_cpus: float
    memory_bytes: int
    roles: Mapping[RoleName, tuple[int, ...]] = field(default_factory=dict)


def plan_blocks(plan: Plan, groups: Sequence[RankGroup]) -> tuple[Block, ...]:
    """Return the blocks of a plan, in the order of groups, then of rank.

    A replica is one block, or one on each of its nodes; the ranks of a mesh are one block a node; groups that share
    devices share blocks.

    Args:
        plan: made for these groups.
        groups: wanted.
    """
    by_role = {group.role: group for group in groups}
    blocks: list[Block] = []
    num_nodes: dict[str, int] = defaultdict(int)
    for ranks in _pieces(plan, by_role):
        first = by_role[ranks[0].role]
        if first.process_per_replica or not first.accelerator:
            name = str(process_of(ranks[0], first))
            is_split = len({rank.node for rank in plan.replica(first.role, ranks[0].replica)}) > 1
        else:
            name, is_split = first.role, True
        if is_split:
            num_nodes[name] += 1
            name = f"{name}@{num_nodes[name] - 1}"
        blocks.append(_block(name, ranks, by_role))
    return tuple(blocks)


def process_of(rank: PlacedRank, group: RankGroup) -> RoleName:
    """Return the process that a rank belongs to: "trainer-3", or that of the whole replica: "rollout-1"."""
    return RoleName(group.role, rank.replica if group.process_per_replica else rank.rank)


def _pieces(plan: Plan, by_role: Mapping[str, RankGroup]) -> Iterator[list[PlacedRank]]:
    """Ranks that must be reserved together: of one replica, or of a mesh, on one node; and roles that share devices."""
    piece_of: dict[object, list[PlacedRank]] = {}
    for rank in plan.ranks:
        keys = _keys(rank, by_role[rank.role])
        piece = [rank]
        for held in {id(piece_of[key]): piece_of[key] for key in keys if key in piece_of}.values():
            piece = held + piece
        for other in piece:
            piece_of.update(dict.fromkeys(_keys(other, by_role[other.role]), piece))
    order = {id(rank): place for place, rank in enumerate(plan.ranks)}
    pieces = {id(piece): sorted(piece, key=lambda rank: order[id(rank)]) for piece in piece_of.values()}
    yield from sorted(pieces.values(), key=lambda piece: order[id(piece[0])])


def _keys(rank: PlacedRank, group: RankGroup) -> list[object]:
    """Return what a rank has in common with those it must be reserved with."""
    if group.process_per_replica:
        company: object = rank.replica
    else:  # a mesh on devices is one piece a node; on CPUs each stage is one
        company = None if group.accelerator else rank.rank // group.tensor_parallel
    keys: list[object] = [("company", rank.role, rank.node, company)]
    if rank.device is not None:
        keys.append(("device", rank.node, group.accelerator, rank.device))
    return keys


def _block(name: str, ranks: Sequence[PlacedRank], by_role: Mapping[str, RankGroup]) -> Block:
    kind = by_role[ranks[0].role].accelerator
    devices = sorted({rank.device for rank in ranks if rank.device is not None})
    roles: dict[RoleName, list[int]] = defaultdict(list)
    for rank in ranks:
        roles[process_of(rank, by_role[rank.role])] += [devices.index(rank.device)] if rank.device is not None else []
    return Block(
        name=name,
        node=ranks[0].node,
        num_devices=len(devices),
        device_kind=kind,
        num_cpus=sum(by_role[rank.role].cpus_per_rank for rank in ranks),
        memory_bytes=sum(by_role[rank.role].memory_bytes_per_rank for rank in ranks),
        roles={process: tuple(sorted(ordinals)) for process, ordinals in roles.items()},
    )


def draw_plan(plan: Plan, nodes: Sequence[Node], groups: Sequence[RankGroup], *, width: int = 100) -> str:
    """Draw a plan.

    Each rank has a cell: the letter of its role and its number; for replicas of several ranks, replica and rank within
    it, as in R3.1. Roles that share a device stand below each other. "." is a free device, "x" a taken one. Of a
    row of nodes that look alike the first and the last are drawn: ranks continue in order between them.

    Args:
        plan: to draw.
        nodes: it was made for.
        groups: it was made for.
        width: columns.
    """
    letters = _letters(groups)
    pictures = [_picture(node, plan, groups, letters) for node in sort_nodes(nodes)]
    texts = (text for each in pictures for row in [*each.rows, each.on_cpus] for text in row)
    cell = 1 + max(map(len, texts), default=1)
    indent = 2 + max(len(each.node.name) for each in pictures)
    per_line = max(1, (width - indent) // cell)
    per_line -= per_line % 8 if per_line > 8 else 0  # 16 devices are two lines of 8
    lines = [_summary(plan, nodes, groups), *_header(pictures, kinds_of(groups), indent, cell, per_line)]
    for _, run in groupby(pictures, key=lambda each: each.look):
        alike = list(run)
        hidden = len(alike) - 2
        if alike[0].is_empty and len(alike) > 1:
            lines.append(f"{names_text(each.node.name for each in alike)}: nothing")
        elif hidden < _FEWEST_HIDDEN:
            lines += [line for each in alike for line in _lines(each, indent, cell, per_line)]
        else:
            lines += _lines(alike[0], indent, cell, per_line)
            lines.append(f"{'⋮':<{indent}}{hidden} nodes alike, ranks in order")
            lines += _lines(alike[-1], indent, cell, per_line)
    return "\n".join(line.rstrip() for line in [*lines, *_legend(groups, letters)])


@dataclass(frozen=True)
class _NodePicture:
    """Rows of cells of one node, and what it looks like without the numbers."""

    node: Node
    rows: list[list[str]]
    on_cpus: list[str]
    look: tuple[object, ...]
    is_empty: bool


def _letters(groups: Sequence[RankGroup]) -> dict[str, str]:
    """Return the shortest beginning of each role that no other role has."""
    letters: dict[str, str] = {}
    for group in groups:
        others = [other.role.upper() for other in groups if other.role != group.role]
        role = group.role.upper()
        lengths = range(1, len(role) + 1)
        letters[group.role] = next((role[:n] for n in lengths if not any(o.startswith(role[:n]) for o in others)), role)
    return letters


def _picture(node: Node, plan: Plan, groups: Sequence[RankGroup], letters: dict[str, str]) -> _NodePicture:
    widths = {group.role: group.ranks_per_replica for group in groups}
    kinds = {group.role: group.accelerator for group in groups}
    shown = [kind for kind in kinds_of(groups) if node.num_total(kind)]
    columns = {place: i for i, place in enumerate((kind, n) for kind in shown for n in _devices(node, kind))}
    blank = [_FREE if device in node.free.get(kind, ()) else _TAKEN for kind, device in columns]
    rows: list[list[str]] = []
    on_cpus: list[str] = []
    look: list[object] = [tuple(blank)]
    for role in plan.roles:
        for rank in (each for each in plan.on_node(node.name) if each.role == role):
            label = letters[role] + _number(rank, widths[role])
            look.append((role, rank.device, rank.rank % widths[role]))
            if rank.device is None:
                on_cpus.append(label)
            else:
                _put(rows, blank, columns[kinds[role], rank.device], label)
    return _NodePicture(node, rows or [blank], on_cpus, tuple(look), len(look) == 1)


def _devices(node: Node, kind: str) -> Sequence[int]:
    free = node.free.get(kind, ())
    return range(max(node.num_total(kind), max(free, default=-1) + 1))


def _number(rank: PlacedRank, ranks_per_replica: int) -> str:
    return f"{rank.replica}.{rank.rank % ranks_per_replica}" if ranks_per_replica > 1 else str(rank.rank)


def _put(rows: list[list[str]], blank: list[str], column: int, label: str) -> None:
    """Write a cell into the first row where it is free."""
    for row in rows:
        if row[column] in (_FREE, ""):
            row[column] = label
            return
    rows.append(list(blank) if not rows else [""] * len(blank))
    rows[-1][column] = label


def _summary(plan: Plan, nodes: Sequence[Node], groups: Sequence[RankGroup]) -> str:
    kinds = {group.role: group.accelerator for group in groups}
    texts = [f"{len({rank.node for rank in plan.ranks})} of {len(nodes)} node{'s' * (len(nodes) > 1)} used"]
    for kind in kinds_of(groups):
        used = {(rank.node, rank.device) for rank in plan.ranks if kinds[rank.role] == kind}
        texts.append(f"{len(used)} of {sum(node.num_free(kind) for node in nodes)} free {kind}")
    return ", ".join(texts)


def _header(
    pictures: Sequence[_NodePicture], kinds: Sequence[str], indent: int, cell: int, per_line: int
) -> Iterator[str]:
    most = max((len(each.rows[0]) for each in pictures), default=0)
    if most:
        numbers = "".join(f"{number:<{cell}}" for number in range(min(most, per_line)))
        yield f"{'+'.join(kinds):<{indent}}{numbers}"


def _lines(picture: _NodePicture, indent: int, cell: int, per_line: int) -> list[str]:
    chunks = []
    for start in range(0, max(1, len(picture.rows[0])), per_line):
        for row in picture.rows:
            part = row[start : start + per_line]
            if any(part):
                chunks.append("".join(f"{text:<{cell}}" for text in part))
    if picture.on_cpus:
        cells = [f"{text:<{cell}}" for text in picture.on_cpus]
        chunks += ["CPU  " + "".join(cells[i : i + per_line - 1]) for i in range(0, len(cells), max(1, per_line - 1))]
    name = picture.node.name
    return [f"{name if number == 0 else '':<{indent}}{chunk}" for number, chunk in enumerate(chunks or [""])]


def _legend(groups: Sequence[RankGroup], letters: dict[str, str]) -> Iterator[str]:
    for group in groups:
        text = f"{letters[group.role]:<3}{group.role}: "
        if group.ranks_per_replica > 1:
            text += f"{group.num_replicas} replica{'s' * (group.num_replicas > 1)}, each {group.width_text}"
        else:
            place = group.accelerator or group.named_device or "CPUs"
            text += f"{group.num_ranks} rank{'s' * (group.num_ranks > 1)} on {place}"
        if group.shares_devices_with:
            text += f", sharing devices with {group.shares_devices_with}"
        yield text
