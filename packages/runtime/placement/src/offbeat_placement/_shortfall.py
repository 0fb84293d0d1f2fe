"""Messages about a placement that does not fit: the shortfall of each node, and the smallest changes that fit.

Each change is tried with the planner before it is named.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from math import ceil
from typing import Any, Final

from offbeat_core import PlacementError
from offbeat_placement._planner import allocate, fits
from offbeat_placement._resources import Allocation, Node, RankGroup, kinds_of, names_text, sort_nodes

_MOST_LINES: Final = 12
MAX_SUGGESTIONS: Final = 5
_MAX_MORE_NODES: Final = 4096
_GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting with another value, or more nodes.

    Args:
        role: of the group it changes; "" for the allocation, or the cluster.
        field: of `RankGroup` or `Allocation`; "nodes" for the cluster.
        key: the setting behind it, for people.
        before: value now.
        after: value that fits.
        scale: how much of the setting one of the field is.
    """

    role: str
    field: str
    key: str
    before: Any
    after: Any
    scale: int = 1

    @property
    def text(self) -> str:
        """Text for people."""
        if self.field == "nodes":
            number = self.after - self.before
            return f"{number} more node{'s' * (number > 1)} with {self.key} free"
        if self.field == "shares_devices_with":
            return f"{self.role} on the devices of {self.after} ({self.key})"
        if self.scale == 1:
            return f"{self.key} {self.before} -> {self.after}"
        return f"{self.key} {self.before * self.scale:g} -> {self.setting:g}"

    @property
    def setting(self) -> Any:
        """The value that fits, as its setting counts it."""
        return self.after if self.scale == 1 else self.after * self.scale


Suggestion = tuple[Change, ...]
"""Changes that fit together."""

Keeps = Callable[..., bool]
"""Function that returns whether groups fit with these changes."""


def suggest_changes(
    nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation | None = None
) -> tuple[Suggestion, ...]:
    """Changes that would fit, those that give up the fewest devices first.

    Args:
        nodes: of the cluster.
        groups: that do not fit.
        allocation: the part of the cluster asked for.
    """
    nodes = sort_nodes(nodes)
    if allocation is not None:
        part = allocate(nodes, allocation, groups)
        if part is None:
            return tuple(_other_shapes(nodes, groups, allocation))
        nodes = part.nodes
    found = _that_can_be_set(_single_changes(nodes, groups), groups)
    if not found:
        found = _that_can_be_set(_fewer_of_all(nodes, groups), groups)
    found.sort(key=lambda suggestion: _num_devices(groups) - _num_devices(apply_changes(groups, suggestion)))
    return (*found[: MAX_SUGGESTIONS - 1], *_more_nodes(nodes, groups))


def _that_can_be_set(suggestions: Iterable[Suggestion], groups: Sequence[RankGroup]) -> list[Suggestion]:
    """Return those whose fields all have settings behind them, for groups that say which do."""
    keys = {group.role: group.keys for group in groups if group.keys}
    return [
        each for each in suggestions if all(change.field in keys.get(change.role, [change.field]) for change in each)
    ]


def apply_changes(groups: Sequence[RankGroup], changes: Suggestion) -> list[RankGroup]:
    """Return the groups with changes made; those of the cluster are left out."""
    changed = []
    for group in groups:
        for change in changes:
            if change.role == group.role:
                group = replace(group, **{change.field: change.after})
        changed.append(group)
    return changed


def _num_devices(groups: Sequence[RankGroup]) -> int:
    return sum(group.num_ranks for group in groups)


def _change(group: RankGroup, field: str, after: Any) -> Change:
    return Change(
        role=group.role,
        field=field,
        key=group.key(field),
        before=getattr(group, field),
        after=after,
        scale=group.scales.get(field, 1),
    )


def _single_changes(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Iterator[Suggestion]:
    def keeps(*changes: Change) -> bool:
        return fits(nodes, apply_changes(groups, changes))

    def keeps_with(group: RankGroup, field: str, value: int) -> bool:
        return keeps(_change(group, field, value))

    for place, group in enumerate(groups):
        yield from _shared(group, groups[:place], keeps)
        yield from _narrower(group, keeps)
        for field, most in (("num_replicas", group.num_replicas - 1), ("cpus_per_rank", ceil(group.cpus_per_rank) - 1)):
            if fewer := _largest(most, partial(keeps_with, group, field)):
                yield (_change(group, field, fewer),)


def _shared(group: RankGroup, others: Sequence[RankGroup], keeps: Keeps) -> Iterator[Suggestion]:
    """Suggest the devices of another group."""
    if group.shares_devices_with or not group.accelerator:
        return
    for other in others:
        if group.accelerator == other.accelerator and keeps(share := _change(group, "shares_devices_with", other.role)):
            yield (share,)
            return


def _narrower(group: RankGroup, keeps: Keeps) -> Iterator[Suggestion]:
    """The same devices in groups of fewer, or else fewer; a group over whole nodes if that is all it needs."""
    if not group.spans_nodes and group.accelerator and keeps(span := _change(group, "spans_nodes", True)):
        yield (span,)
    width = group.tensor_parallel
    narrower = [each for each in range(width // 2, 0, -1) if width % each == 0 and each % group.width_multiple == 0]
    slim = [_change(group, "tensor_parallel", each) for each in narrower]
    as_many = [(each, _change(group, "num_replicas", group.num_replicas * width // each.after)) for each in slim]
    for changes in (as_many, [(each,) for each in slim]):
        yield from islice((each for each in changes if keeps(*each)), 1)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits; 0 if none does. What fits with more fits with less."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fewer_of_all(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Iterator[Suggestion]:
    """Every group cut down by the same share, where no single change is enough."""

    def cut(parts: int) -> Suggestion:
        changes = [(group, max(1, group.num_replicas * parts // 64)) for group in groups if group.accelerator]
        return tuple(_change(group, "num_replicas", n) for group, n in changes if n < group.num_replicas)

    parts = _largest(63, lambda parts: fits(nodes, apply_changes(groups, cut(parts))))
    if parts:
        yield cut(parts)


def _more_nodes(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> Iterator[Suggestion]:
    """Nodes like the largest one, wholly free, as many as it takes."""
    kinds = {group.accelerator for group in groups if group.accelerator}
    if not nodes or not kinds:
        return
    largest = max(nodes, key=lambda node: sum(node.num_total(kind) for kind in kinds))
    free = {kind: tuple(range(largest.num_total(kind))) for kind in kinds}
    whole = replace(largest, free=free, total={})
    alone = [replace(group, num_replicas=1, pipeline_parallel=1, shares_devices_with="") for group in groups]
    if not all(group.spans_nodes or fits([whole], [group]) for group in alone):
        return  # however many

    def enough(number: int) -> bool:
        more = [replace(whole, name=f"{largest.name}+{n}") for n in range(number)]
        return fits([*nodes, *more], groups)

    number = 1
    while not enough(number):
        number *= 2
        if number > _MAX_MORE_NODES:
            return
    spare = _largest(number - number // 2, lambda fewer: enough(number - fewer))
    number -= spare
    amount = " and ".join(f"{len(devices)} {kind}" for kind, devices in sorted(free.items()) if devices)
    yield (Change(role="", field="nodes", key=amount, before=len(nodes), after=len(nodes) + number),)


def _other_shapes(nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation) -> Iterator[Suggestion]:
    """Suggest as many accelerators in another shape; or the largest shape there is, with groups that fit into it."""
    kind = allocation.kind
    most = max((node.num_free(kind) for node in nodes), default=0)
    wanted = allocation.num_nodes * allocation.accelerators_per_node
    for per_node in range(most, 0, -1):
        shape = replace(allocation, num_nodes=-(-wanted // per_node), accelerators_per_node=per_node)
        part = allocate(nodes, shape, groups)
        if part is not None and fits(part.nodes, groups):
            yield _reshape(allocation, shape)
            return
    shapes = [(sum(node.num_free(kind) >= size for node in nodes), size) for size in range(most, 0, -1)]
    if not shapes:
        return
    num_nodes, per_node = max(shapes, key=lambda shape: shape[0] * shape[1])
    shape = replace(allocation, num_nodes=num_nodes, accelerators_per_node=per_node)
    part = allocate(nodes, shape, groups)
    held = part.nodes if part is not None else []
    if fits(held, groups):
        yield _reshape(allocation, shape)
        return
    for changes in suggest_changes(held, groups):
        if all(change.field != "nodes" for change in changes):
            yield (*_reshape(allocation, shape), *changes)


def _reshape(allocation: Allocation, shape: Allocation) -> Suggestion:
    return tuple(
        Change(
            role="",
            field=field,
            key=allocation.key(field),
            before=getattr(allocation, field),
            after=getattr(shape, field),
        )
        for field in ("num_nodes", "accelerators_per_node")
        if getattr(allocation, field) != getattr(shape, field)
    )


def allocation_error(nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation) -> PlacementError:
    """Return the error for a part that the cluster does not have.

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
    """Return the shape that fits, and how to ask for it."""
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
    """Return the error for groups that do not fit on the nodes.

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
        f"{group.num_replicas} × {group.role} of {group.width_text}"
        + (f" beside {group.shares_devices_with}" if group.shares_devices_with else "")
        for group in groups
    )


def _totals_text(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> str:
    """Return where sums alone say that it cannot be, or that sums are not the matter."""
    texts, short = [], _short_of(nodes, groups)
    for kind in kinds_of(groups):
        own = [group for group in groups if group.accelerator == kind]
        if any(group.shares_devices_with for group in own):
            continue
        wanted, free = sum(group.num_ranks for group in own), sum(node.num_free(kind) for node in nodes)
        pieces = "" if wanted > free or short else ", but not in such pieces"
        texts.append(f"{wanted} {kind} wanted, {free} free{pieces}")
    return "; ".join(texts + short)


def _short_of(nodes: Sequence[Node], groups: Sequence[RankGroup]) -> list[str]:
    """Return texts about CPUs and memory where all ranks together need more than all nodes have free."""
    cpus = sum(group.num_ranks * group.cpus_per_rank for group in groups)
    free_cpus = sum(node.num_cpus for node in nodes)
    memory = sum(group.num_ranks * group.memory_bytes_per_rank for group in groups)
    free_memory = sum(node.memory_bytes for node in nodes)
    texts = [f"{cpus:g} CPUs wanted, {free_cpus:g} free"] if cpus > free_cpus else []
    if memory > free_memory:
        texts.append(f"{memory / _GIB:.3g} GiB of memory wanted, {free_memory / _GIB:.3g} GiB free")
    return texts


def _misfit_line(node: Node, groups: Sequence[RankGroup]) -> str:
    kinds = kinds_of(groups)
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


def _per_node(nodes: Sequence[Node], describe: Callable[[Node], str]) -> tuple[str, ...]:
    lines = [f"{names_text(node.name for node in alike)}: {text}" for text, alike in groupby(nodes, key=describe)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    return tuple(lines)
