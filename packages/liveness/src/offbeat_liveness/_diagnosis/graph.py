"""The wait-for graph: from what each process says of itself, who waits for whom. Pure: no clock, no torch."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from offbeat_liveness._process.head import Collective, GroupHead, Head, Wait

Fate = Literal["killed", "crashed", "exited", "raised", "stopped", "silent", "unreachable", "never-came", "unwatched"]
Obstacle = tuple[str, Collective | None, "Reason"]
Reason = Literal["absent", "not-entered", "other-op", "other-shape", "peer", "producer", "nobody"]

SETTLED: Final = 0.25  # share of stall_after_s after which a wait, or a quiet process, counts as standing
BUSY: Final = 0.25  # share of a core from which a process without new lines counts as computing
COMPUTE_PATIENCE: Final = 10  # × stall_after_s for a process that computes
MAX_STARTS: Final = 16
MAX_TARGETS: Final = 64  # edges of one wait; with thousands of ranks the graph would be their square
# Operations whose inputs must be alike on all members, and those whose outputs must be; the rest may differ by rank.
LIKE_INPUTS: Final = frozenset(
    {"all_reduce", "allreduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_base",
     "all_gather_into_tensor", "all_gather_single", "allgather_base", "gather", "reduce_scatter", "reduce_scatter_base",
     "reduce_scatter_single", "reduce_scatter_tensor"}
)  # fmt: skip
LIKE_OUTPUTS: Final = frozenset({"scatter"})


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A process that gave no answer.

    Args:
        name, rank, world: who it is.
        fate: killed (gone without a word), crashed (ended by native code, as its last words say), exited (left without
            an error), raised, stopped (SIGSTOP or a debugger), silent (its pid is there, its monitor does not answer),
            unreachable (another host that cannot be asked), never-came, unwatched (in the world, without a monitor).
        text: what is known, one line: the exception, the pid.
        head: the last it said of itself, if anything.
        was_heard: its monitor has spoken before, so its silence says something.
    """

    name: str
    rank: int | None = None
    world: str = ""
    fate: Fate
    text: str = ""
    head: Head | None = None
    was_heard: bool = False


@dataclass(frozen=True, kw_only=True)
class Edge:
    """`waiter` cannot go on before `target` acts.

    Args:
        waiter, target: names of processes.
        wait: the wait of the waiter.
        reason: why the target is needed.
        group: of the wait, if it has one.
        mine, theirs: the two collectives that differ.
    """

    waiter: str
    target: str
    wait: Wait
    reason: Reason
    group: GroupHead | None = None
    mine: Collective | None = None
    theirs: Collective | None = None


@dataclass(kw_only=True)
class Scene:
    """All that is known at one moment.

    Args:
        heads: processes that answered.
        absent: processes that did not.
        stall_after_s: what counts as too long.
        time_s: now, seconds since the epoch.
    """

    heads: Sequence[Head]
    absent: Sequence[Absent] = ()
    stall_after_s: float
    time_s: float = 0.0
    _obstacles: dict[Any, list[Obstacle]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Two worlds may both have a rank 0, and all ranks may have been given one name: tell them apart."""
        places: dict[str, set[tuple[str, int | None]]] = {}
        everybody: list[Head | Absent] = [*self.heads, *self.absent]
        for each in everybody:
            places.setdefault(each.name, set()).add((each.world, each.rank))
        self.heads = [dataclasses.replace(each, name=_full_name(each, places[each.name])) for each in self.heads]
        self.absent = [dataclasses.replace(each, name=_full_name(each, places[each.name])) for each in self.absent]

    @cached_property
    def head_by_name(self) -> dict[str, Head]:
        """Processes that answered."""
        return {head.name: head for head in self.heads}

    @cached_property
    def absent_by_name(self) -> dict[str, Absent]:
        """Processes that did not."""
        return {each.name: each for each in self.absent}

    @cached_property
    def name_by_rank(self) -> dict[tuple[str, int], str]:
        """Names by world and rank."""
        everybody: list[Head | Absent] = [*self.heads, *self.absent]
        return {(each.world, each.rank): each.name for each in everybody if each.rank is not None}

    @cached_property
    def edges(self) -> list[Edge]:
        """The graph over all waits that have settled."""
        least_s = SETTLED * self.stall_after_s
        return [
            edge
            for head in self.heads
            for wait in head.waits
            if wait.age_s >= least_s and self._is_held_up(head, wait)
            for edge in self._edges_of(head, wait)
        ]

    @cached_property
    def stalled(self) -> list[tuple[Head, Wait]]:
        """Waits that have lasted too long, the oldest first."""
        found = [
            (head, wait)
            for head in self.heads
            for wait in head.waits
            if wait.age_s >= self.stall_after_s and self._is_held_up(head, wait)
        ]
        return sorted(found, key=lambda pair: -pair[1].age_s)

    @cached_property
    def _edges_by_waiter(self) -> dict[str, list[Edge]]:
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.waiter, []).append(edge)
        return found

    def awaited(self, edge: Edge) -> list[str]:
        """All that the wait of an edge waits for; the graph itself holds a few of many."""
        head = self.head_by_name[edge.waiter]
        if edge.wait.kind == "collective" and edge.group is not None:
            mine = edge.group.at(edge.wait.seq)
            way = self._in_the_way(head.world, edge.group, edge.wait.seq, mine)
            return [name for name, _, _ in way if name != edge.waiter]
        return [each.target for each in self.edges_from(edge.waiter) if each.wait == edge.wait]

    def needed_by(self, head: Head) -> set[str]:
        """All that a process waits for, however short a time."""
        return {edge.target for wait in head.waits for edge in self._edges_of(head, wait)}

    def _is_held_up(self, head: Head, wait: Wait) -> bool:
        """Whether a thread stands in a wait, rather than going on beside an operation that it has posted.

        A handle of gloo's is not complete before somebody waits for it, so a process that computes beside one is not
        in it; a host that waits for a device may use a whole core.
        """
        if wait.kind == "declared":
            return True
        still_s = next((each.still_s for each in head.threads if each.name == wait.thread), wait.age_s)
        return still_s >= SETTLED * self.stall_after_s and not (wait.kind == "p2p" and self.is_moving(head))

    def edges_from(self, name: str) -> list[Edge]:
        """What one process waits for."""
        return self._edges_by_waiter.get(name, [])

    def reach(self, names: Iterable[str]) -> list[Edge]:
        """All edges on the way from some processes to whatever they wait for in the end."""
        open_names, seen, found = deque(names), set(), []
        while open_names:
            name = open_names.popleft()
            if name in seen:
                continue
            seen.add(name)
            edges = self.edges_from(name)
            found += edges
            open_names.extend(edge.target for edge in edges)
        return found

    def is_moving(self, head: Head) -> bool:
        """New lines or new entries lately, or computing, with ten times the patience."""
        if head.still_s < SETTLED * self.stall_after_s:
            return True
        return head.busy >= BUSY and head.still_s < COMPUTE_PATIENCE * self.stall_after_s

    def _members(self, world: str, ranks: Iterable[int]) -> list[str]:
        """Names of ranks in a world; "rank N" for one that nobody knows."""
        return [self.name_by_rank.get((world, rank), f"rank {rank}") for rank in ranks]

    def _edges_of(self, head: Head, wait: Wait) -> Iterator[Edge]:
        if wait.kind == "collective":
            yield from self._collective_edges(head, wait)
        elif wait.kind in ("barrier", "rendezvous"):
            yield from self._meeting_edges(head, wait)
        elif wait.kind == "p2p":
            group = _group_named(head, wait.group)
            for name in self._members(head.world, wait.peers):
                yield Edge(waiter=head.name, target=name, wait=wait, reason="peer", group=group)
        elif wait.kind == "declared" and wait.on:
            targets = self._named(wait.on) or [wait.on]
            for name in targets:
                if name != head.name:
                    yield Edge(waiter=head.name, target=name, wait=wait, reason="producer")

    def _collective_edges(self, head: Head, wait: Wait) -> Iterator[Edge]:
        group = _group_named(head, wait.group)
        if group is None:
            return
        mine = group.at(wait.seq)
        for name, theirs, reason in self._in_the_way(head.world, group, wait.seq, mine)[:MAX_TARGETS]:
            if name != head.name:
                yield Edge(
                    waiter=head.name, target=name, wait=wait, reason=reason, group=group, mine=mine, theirs=theirs
                )

    def _in_the_way(self, world: str, group: GroupHead, seq: int, mine: Collective | None) -> list[Obstacle]:
        """Members that hold up one collective, absent and idle ones first; who waits in it alike shares the answer."""
        alike = (mine.op, mine.inputs, mine.outputs) if mine else None
        key = (world, group.key, seq, alike)
        if key not in self._obstacles:
            found = [
                (name, theirs, reason)
                for name in self._members(world, group.ranks)
                for theirs, reason in [self._obstacle(name, group, seq, mine)]
                if reason is not None
            ]
            self._obstacles[key] = sorted(found, key=lambda each: self._waits_itself(each[0]))
        return self._obstacles[key]

    def _waits_itself(self, name: str) -> bool:
        head = self.head_by_name.get(name)
        return head is not None and bool(head.waits)

    def _obstacle(
        self, name: str, group: GroupHead, seq: int, mine: Collective | None
    ) -> tuple[Collective | None, Reason | None]:
        absent = self.absent_by_name.get(name)
        other = absent.head if absent else self.head_by_name.get(name)
        return _compare(group, seq, mine, other, is_gone=name not in self.head_by_name)

    def _meeting_edges(self, head: Head, wait: Wait) -> Iterator[Edge]:
        """Everybody who should be in the same call and is not; nothing numbers these calls."""
        group = _group_named(head, wait.group)
        ranks = wait.peers or (group.ranks if group else range(head.world_size))
        for name in self._members(head.world, ranks):
            other = self.head_by_name.get(name)
            there = other is not None and any(
                each.kind == wait.kind and each.what == wait.what and each.group == wait.group for each in other.waits
            )
            if name != head.name and not there:
                reason: Reason = "absent" if other is None else "not-entered"
                yield Edge(waiter=head.name, target=name, wait=wait, reason=reason, group=group)

    def _named(self, on: str) -> list[str]:
        """Processes that a declared wait means: by name, or by role ("rollouter" for "rollouter-0")."""
        names = [*self.head_by_name, *self.absent_by_name]
        exact = [name for name in names if name == on]
        return exact or [name for name in names if name.startswith((f"{on}-", f"{on} ", f"{on}/", f"{on}["))]


def _full_name(each: Head | Absent, places: set[tuple[str, int | None]]) -> str:
    """A name, with what tells those apart who share it."""
    ranks, worlds = {rank for _, rank in places}, {world for world, _ in places}
    parts = [f"rank {each.rank}"] if len(ranks) > 1 else []
    parts += [f"world {each.world or 'none'}"] if len(worlds) > 1 else []
    return f"{each.name} ({', '.join(parts)})" if parts else each.name


def _group_named(head: Head, name: str) -> GroupHead | None:
    return next((each for each in head.groups if each.name == name), None)


def _compare(
    group: GroupHead, seq: int, mine: Collective | None, other: Head | None, *, is_gone: bool
) -> tuple[Collective | None, Reason | None]:
    """Why a member holds up collective `seq` of a group; no reason if it is in it, alike."""
    theirs_group = other.group(group.key) if other else None
    if theirs_group is None or (theirs_group.entered or 0) < seq:
        return None, "absent" if is_gone else "not-entered"
    theirs = theirs_group.at(seq)
    if mine and theirs and (differs := difference(mine, theirs)):
        return theirs, differs
    # Whoever left after its own part was over is not to blame; whoever died in the middle is.
    return theirs, "absent" if is_gone and not (theirs and theirs.done) else None


def difference(mine: Collective, theirs: Collective) -> Literal["other-op", "other-shape"] | None:
    """How two members differ at one place of their group's sequence."""
    if mine.op != theirs.op:
        return "other-op"
    if mine.op in LIKE_INPUTS and mine.inputs != theirs.inputs:
        return "other-shape"
    return "other-shape" if mine.op in LIKE_OUTPUTS and mine.outputs != theirs.outputs else None


def find_cycle(edges: Sequence[Edge]) -> list[Edge]:
    """A cycle among some edges, [] if there is none: the shortest of those that pass one found first."""
    by_waiter: dict[str, list[Edge]] = {}
    for edge in edges:
        by_waiter.setdefault(edge.waiter, []).append(edge)
    on_cycle = _walk_in_circle(by_waiter)
    cycles = [_way_back(name, by_waiter) for name in on_cycle[:MAX_STARTS]]
    return min(cycles, key=len, default=[])


def _walk_in_circle(by_waiter: dict[str, list[Edge]]) -> list[str]:
    """Names on some cycle; found by walking on until a name comes again, and leaving names that lead nowhere."""
    dead_ends: set[str] = set()
    for start in by_waiter:
        way, ways_on = [start], [iter(by_waiter[start])]
        on_way = {start}
        while way:
            target = next((edge.target for edge in ways_on[-1] if edge.target not in dead_ends), None)
            if target in on_way:
                return way[way.index(target) :]
            if target is None or target not in by_waiter:
                dead = way.pop() if target is None else target
                dead_ends.add(dead)
                on_way.discard(dead)
                if target is None:
                    ways_on.pop()
                continue
            way.append(target)
            on_way.add(target)
            ways_on.append(iter(by_waiter[target]))
    return []


def _way_back(start: str, by_waiter: dict[str, list[Edge]]) -> list[Edge]:
    """The shortest way from a name to itself, breadth first."""
    came_by: dict[str, Edge] = {}
    names = deque([start])
    while names:
        for edge in by_waiter.get(names.popleft(), ()):
            if edge.target not in came_by:
                came_by[edge.target] = edge
                names.append(edge.target)
        if start in came_by:
            break
    way = [came_by[start]]
    while way[-1].waiter != start:
        way.append(came_by[way[-1].waiter])
    return way[::-1]
