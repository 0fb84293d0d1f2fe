"""The one error of a placement that does not fit: what was wanted, what each node lacks, and what would fit."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from offbeat_placement._changes import Suggestion, suggest_changes
from offbeat_placement._groups import Allocation, RankGroup
from offbeat_placement._nodes import Node
from offbeat_types import PlacementError

_MOST_LINES = 12


def allocation_error(nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation) -> PlacementError:
    """The cluster has no such part.

    Args:
        nodes: in order.
        groups: that were to go there.
        allocation: what was asked for.
    """
    kind, per_node = allocation.kind, allocation.accelerators_per_node
    lines = _per_node(nodes, lambda node: _allocation_line(node, kind, per_node))
    return PlacementError(
        f"{_shape_text(allocation.num_nodes, per_node)} {kind} asked for "
        f"({allocation.key('num_nodes')}, {allocation.key('accelerators_per_node')}): "
        f"{sum(node.num_free(kind) >= per_node for node in nodes)} of {len(nodes)} nodes have {per_node} free",
        lines,
        tuple(_reshape_text(each, nodes, allocation) for each in suggest_changes(nodes, groups, allocation)),
    )


def _reshape_text(changes: Suggestion, nodes: Sequence[Node], allocation: Allocation) -> str:
    """The shape that fits, and how to ask for it."""
    shape = {change.field: change.after for change in changes if not change.role}
    num_nodes = shape.get("num_nodes", allocation.num_nodes)
    per_node = shape.get("accelerators_per_node", allocation.accelerators_per_node)
    most = max(node.num_total(allocation.kind) for node in nodes)
    settings = ", ".join(f"{change.key} = {change.after}" for change in changes if not change.role)
    others = "".join(f", {change.text}" for change in changes if change.role)
    return f"nodes have {most}: ask for {_shape_text(num_nodes, per_node)} ({settings}){others}"


def _shape_text(num_nodes: int, per_node: int) -> str:
    return f"{num_nodes} node{'s' * (num_nodes > 1)} × {per_node}"


def _allocation_line(node: Node, kind: str, per_node: int) -> str:
    lacks = per_node - node.num_free(kind)
    return f"{_free_text(node, [kind])}{f', {lacks} short' if lacks > 0 else ''}"


def misfit_error(nodes: Sequence[Node], groups: Sequence[RankGroup], *, proven: bool) -> PlacementError:
    """The groups do not fit on the nodes.

    Args:
        nodes: in order.
        groups: wanted.
        proven: whether that is certain.
    """
    reason = "the ranks wanted do not fit on the nodes: " + _wanted_text(groups)
    if totals := _totals_text(nodes, groups):
        reason += f"; {totals}"
    if not proven:
        reason += "; the search was cut short before all ways were tried, so one may exist"
    lines = _per_node(nodes, lambda node: _misfit_line(node, groups))
    texts = [", ".join(change.text for change in changes) for changes in suggest_changes(nodes, groups)]
    return PlacementError(reason, lines, tuple(texts))


def _wanted_text(groups: Sequence[RankGroup]) -> str:
    return ", ".join(
        f"{group.num_replicas} × {group.role} of {width_text(group)}"
        + (f" beside {group.shares_devices_with}" if group.shares_devices_with else "")
        for group in groups
    )


def width_text(group: RankGroup) -> str:
    """Devices of one replica in words: "4 GPU on one node", "2 stages of 4 GPU"."""
    width, kind = group.tensor_parallel, group.accelerator or "rank"
    text = f"{width} {kind}"
    if group.pipeline_parallel > 1:
        text = f"{group.pipeline_parallel} stages of {text}"
    if width > 1:
        text += " on whole nodes" if group.spans_nodes else " on one node"
    return text


def _totals_text(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> str:
    """Where sums alone say that it cannot be, or that sums are not the matter."""
    texts = []
    for kind in dict.fromkeys(group.accelerator for group in groups if group.accelerator):
        own = [group for group in groups if group.accelerator == kind]
        if any(group.shares_devices_with for group in own):
            continue
        wanted, free = sum(group.num_ranks for group in own), sum(node.num_free(kind) for node in nodes)
        texts.append(f"{wanted} {kind} wanted, {free} free" + ("" if wanted > free else ", but not in such pieces"))
    return "; ".join(texts)


def _misfit_line(node: Node, groups: Sequence[RankGroup]) -> str:
    kinds = list(dict.fromkeys(group.accelerator for group in groups if group.accelerator))
    texts = [_free_text(node, kinds)]
    for group in groups:
        width = group.tensor_parallel
        if group.accelerator and width > 1 and not group.spans_nodes:
            lacks = width - node.num_free(group.accelerator) % width
            fitting = node.num_free(group.accelerator) // width
            texts.append(f"room for {fitting} × {group.role} of {width}, {lacks} short of one more")
        cpus = width * group.cpus_per_rank
        if cpus > node.num_cpus:
            texts.append(f"{cpus:g} CPUs for one {group.role}, {cpus - node.num_cpus:g} short")
    return "; ".join(texts)


def _free_text(node: Node, kinds: Sequence[str]) -> str:
    parts = [f"{node.num_free(kind)} of {node.num_total(kind)} {kind} free" for kind in kinds]
    if node.num_cpus < float("inf"):
        parts.append(f"{node.num_cpus:g} CPUs")
    return ", ".join(parts)


def _per_node(nodes: Sequence[Node], describe: object) -> tuple[str, ...]:
    assert callable(describe)
    lines = [f"{names_text(node.name for node in alike)}: {text}" for text, alike in groupby(nodes, key=describe)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    return tuple(lines)


def names_text(names: Iterable[str]) -> str:
    """Names of neighbours: "node-0", "node-0, node-1", or "node-0 … node-7 (8)"."""
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 2 else f"{listed[0]} … {listed[-1]} ({len(listed)})"
