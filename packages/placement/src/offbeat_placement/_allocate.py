"""The part of a cluster that an allocation names: which nodes it takes, where some of them lack CPUs or memory."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

from offbeat_placement._groups import Allocation, RankGroup
from offbeat_placement._nodes import Node, sort_nodes
from offbeat_placement._planner import fits

MAX_PARTS: Final = 64
"""Parts that are tried."""
MAX_CLASSES: Final = 64
"""Kinds of nodes that parts are made of; over that, the best nodes are tried and nothing is proved."""


class Part(NamedTuple):
    """Nodes cut down to what was asked for.

    Args:
        nodes: those that the groups fit on, if there are such; else the first ones with room.
        proven: whether the groups fit on no other part either, when they do not fit on this one.
    """

    nodes: list[Node]
    proven: bool = True


class _Worth(NamedTuple):
    """What a node of a part has besides its accelerators; more than the groups could use is infinite."""

    num_cpus: float
    memory_bytes: float
    others: tuple[tuple[str, int, int], ...]
    """Accelerators of other kinds: kind, free, in all."""

    def is_at_least(self, other: "_Worth") -> bool:
        """Whether everything that fits beside the other fits here; false where only trying tells."""
        enough = self.num_cpus >= other.num_cpus and self.memory_bytes >= other.memory_bytes
        return enough and self.others == other.others


def allocate(nodes: Sequence[Node], allocation: Allocation, groups: Sequence[RankGroup]) -> Part | None:
    """The part of the cluster that an allocation names, cut down to what was asked for.

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


def _classes(nodes: Sequence[Node], groups: Sequence[RankGroup], kind: str) -> list[tuple[_Worth, list[Node]]]:
    """Nodes alike, the best first."""
    found: dict[_Worth, list[Node]] = defaultdict(list)
    for node in nodes:
        found[_worth(node, groups, kind)].append(node)
    return sorted(found.items(), key=lambda each: each[0], reverse=True)


def _worth(node: Node, groups: Sequence[RankGroup], kind: str) -> _Worth:
    num_ranks = [min(g.num_ranks, node.num_free(g.accelerator)) if g.accelerator else g.num_ranks for g in groups]
    cpus = sum(number * group.cpus_per_rank for number, group in zip(num_ranks, groups, strict=True))
    memory_bytes = sum(number * group.memory_bytes_per_rank for number, group in zip(num_ranks, groups, strict=True))
    kinds = sorted({group.accelerator for group in groups if group.accelerator} - {kind})
    return _Worth(
        num_cpus=float("inf") if node.num_cpus >= cpus else node.num_cpus,
        memory_bytes=float("inf") if node.memory_bytes >= memory_bytes else node.memory_bytes,
        others=tuple((each, node.num_free(each), node.num_total(each)) for each in kinds),
    )


def _parts(classes: Sequence[tuple[_Worth, list[Node]]], num_nodes: int) -> Iterator[list[Node]]:
    """Parts of so many nodes, none of which could have a better node instead of one of its own."""
    if not num_nodes:
        yield []
        return
    if sum(len(nodes) for _, nodes in classes) < num_nodes:
        return
    worth, nodes = classes[0]
    for number in range(min(num_nodes, len(nodes)), -1, -1):
        later = classes[1:]
        if number < len(nodes):  # some are left over, so none that is worse may be taken
            later = [each for each in later if not worth.is_at_least(each[0])]
        for rest in _parts(later, num_nodes - number):
            yield [*nodes[:number], *rest]
