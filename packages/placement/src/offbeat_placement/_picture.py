"""A plan as a picture: nodes from top to bottom, devices from left to right, every rank in its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from offbeat_placement._groups import RankGroup, kinds_of
from offbeat_placement._nodes import Node, sort_nodes
from offbeat_placement._plan import PlacedRank, Plan
from offbeat_placement._shortfall import names_text, width_text

_FREE, _TAKEN = ".", "x"
_FEWEST_HIDDEN = 2
"""Nodes alike between two others are counted instead of drawn, from so many on."""


def draw_plan(plan: Plan, nodes: Sequence[Node], groups: Sequence[RankGroup], *, width: int = 100) -> str:
    """Draw a plan.

    Each rank has a cell: the letter of its role and its number; for replicas of several ranks, replica and rank within
    it, as in R3.1. Roles that share a device stand below each other. "." is a free device, "x" a taken one. Of a
    row of nodes that look alike the first and the last are drawn: ranks go on in order between them.

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
    """The shortest beginning of each role that no other role has."""
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
            text += f"{group.num_replicas} replica{'s' * (group.num_replicas > 1)}, each {width_text(group)}"
        else:
            text += f"{group.num_ranks} rank{'s' * (group.num_ranks > 1)} on {group.accelerator or 'CPUs'}"
        if group.shares_devices_with:
            text += f", sharing devices with {group.shares_devices_with}"
        yield text
