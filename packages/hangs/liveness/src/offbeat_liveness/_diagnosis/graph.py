"""The wait-for graph: which process waits for which, from the snapshots of each. Pure: no clock, no torch."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from offbeat_liveness._diagnosis.mismatch import difference
from offbeat_liveness._process.snapshot import (
    MAIN_THREAD,
    Collective,
    GroupSnapshot,
    OutsideWait,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
)

Fate = Literal[
    "killed", "crashed", "exited", "left", "raised", "stopped", "silent", "unreachable", "never-came", "unwatched"
]
Obstacle = tuple[str, Collective | None, "Reason"]
Reason = Literal[
    "absent", "left", "not-entered", "unknown", "other-op", "other-shape", "peer", "producer", "outside", "none"
]
SETTLED: Final = 0.25  # share of stall_after_s after which a wait, or a quiet process, counts as standing
BUSY: Final = 0.25  # share of a core from which a process without new lines counts as computing
AWAY: Final = frozenset({"http", "socket", "ray", "subprocess", "terminal", "debugger", "sleep"})
"""Waits that no thread of the same process can end."""
TREE_BUSY: Final = 0.1  # cores that a process and its descendants use together, from which they count as computing
COMPUTE_PATIENCE: Final = 10  # × stall_after_s for a process that computes
ENDED: Final = ("killed", "crashed", "raised", "exited")
"""Fates that are certain: its host has said that the process is gone, or it has said so itself."""
LATE_S: Final = 5.0
"""Time for torch, or the program, to raise an error that is due; a verdict is acted upon after that."""
MAX_TARGETS: Final = 64  # edges of one wait; with thousands of ranks the graph would be their square
# Rendezvous at which the members of a world, or of the group to be made, meet each other.
MEETINGS: Final = frozenset(
    {
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
        "_store_based_barrier",
        "_new_process_group_helper",
    }
)
ENTRY: Final = "init_process_group"


@dataclass(frozen=True, kw_only=True)
class AbsentProcess:
    """A process that gave no answer.

    Args:
        name, rank, world: its identity.
        fate: killed (gone without a word), crashed (by native code, as its crash report says), exited (left without
            an error), left (runs, and has destroyed the group), raised, stopped (SIGSTOP or a debugger), silent (its
            pid is there, its monitor does not answer), unreachable (another host that cannot be asked), never-came,
            unwatched (in the world, without a monitor).
        text: what is known, one line: the exception, the pid.
        pid: on its machine; 0 where that is not known.
        head: the last it said of itself, if anything.
    """

    name: str
    rank: int | None = None
    world: str = ""
    fate: Fate
    text: str = ""
    pid: int = 0
    head: ProcessSnapshot | None = None


@dataclass(frozen=True, kw_only=True)
class Edge:
    """`waiter` cannot continue before `target` acts.

    Args:
        waiter, target: names of processes.
        wait: the wait of the waiter.
        reason: why the target is needed.
        actor: name of the thread of the target that has to act; "" where any of its threads may.
        group: of the wait, if it has one.
        mine, theirs: the two collectives that differ.
        is_certain: no other process could do instead what is waited for, and the target has not done it already.
    """

    waiter: str
    target: str
    wait: Wait
    reason: Reason
    actor: str = ""
    group: GroupSnapshot | None = None
    mine: Collective | None = None
    theirs: Collective | None = None
    is_certain: bool = True

    @property
    def thread(self) -> str:
        """Name of the target's thread that is expected: ranks run one program, so where its group does not show it,
        the thread named as the one that waits.
        """
        return self.actor or self.wait.thread

    @property
    def is_binding(self) -> bool:
        """Return whether the waiter cannot continue without the target: no deadline of its own is left to expire.

        The timeouts of torch's groups do not count: a program that meets one has failed.
        """
        if not self.is_certain or self.reason == "unknown" or self.wait.is_posted:
            return False
        if self.wait.has_own_deadline and self.wait.age_s < (self.wait.timeout_s or 0.0) + LATE_S:
            return False
        if self.wait.kind == "declared":
            return self.wait.deadline_s is None or self.wait.age_s >= self.wait.deadline_s
        if self.wait.kind == "outside":
            return self.wait.outside is not None and self.wait.outside.timeout_s is None
        return True


@dataclass(kw_only=True)
class WaitGraph:
    """All that is known at one moment.

    Args:
        heads: processes that answered.
        absent: processes that did not.
        stall_after_s: what counts as too long.
        time_s: now, seconds since the epoch.
    """

    heads: Sequence[ProcessSnapshot]
    absent: Sequence[AbsentProcess] = ()
    stall_after_s: float
    time_s: float = 0.0
    _obstacles: dict[Any, list[Obstacle]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Make names unique: two worlds may both have a rank 0, and all ranks may have been given one name."""
        places: dict[str, set[tuple[str, int | None]]] = {}
        everybody: list[ProcessSnapshot | AbsentProcess] = [*self.heads, *self.absent]
        for each in everybody:
            places.setdefault(each.name, set()).add((each.world, each.rank))
        self.heads = [dataclasses.replace(each, name=_full_name(each, places[each.name])) for each in self.heads]
        self.absent = [dataclasses.replace(each, name=_full_name(each, places[each.name])) for each in self.absent]

    @cached_property
    def by_name(self) -> dict[str, ProcessSnapshot]:
        return {head.name: head for head in self.heads}

    @cached_property
    def absent_by_name(self) -> dict[str, AbsentProcess]:
        return {each.name: each for each in self.absent}

    @cached_property
    def name_by_rank(self) -> dict[tuple[str, int], str]:
        everybody: list[ProcessSnapshot | AbsentProcess] = [*self.heads, *self.absent]
        now = {(each.world, each.rank): each.name for each in everybody if each.rank is not None}
        return {(left.world, left.rank): head.name for head in self.heads for left in head.left_groups} | now

    @cached_property
    def edges(self) -> list[Edge]:
        """Edges of all waits that have lasted long enough."""
        least_s = SETTLED * self.stall_after_s
        return [
            edge
            for head in self.heads
            for wait in head.waits
            if head.has_answered and wait.kind != "outside" and wait.age_s >= least_s and self._is_held_up(head, wait)
            for edge in self._edges_of(head, wait)
        ]

    @cached_property
    def outside_edges(self) -> list[Edge]:
        """Return what processes wait for outside torch.distributed, where the other side is watched too."""
        least_s = SETTLED * self.stall_after_s
        return [
            Edge(waiter=head.name, target=name, wait=wait, reason="outside")
            for head in self.heads
            for wait in head.waits
            if wait.outside is not None and wait.age_s >= least_s
            for name in self.other_side(head, wait.outside)
        ]

    def other_side(self, head: ProcessSnapshot, outside: OutsideWait) -> list[str]:
        """Names of the watched processes that a wait outside torch.distributed is for."""
        host, _, port = outside.address.rpartition(":")
        is_here = host.startswith("127.") or host in ("localhost", "::1", "[::1]")
        found = [
            each.name
            for each in self.heads
            if (outside.pid and (each.pid, each.host) == (outside.pid, head.host))
            or (port.isdecimal() and int(port) in each.listens and (each.host == head.host or not is_here))
            or (outside.on and each.name == outside.on)
        ]
        return [name for name in dict.fromkeys(found) if name != head.name]

    @cached_property
    def stalled(self) -> list[tuple[ProcessSnapshot, Wait]]:
        found = [
            (head, wait)
            for head in self.heads
            for wait in head.waits
            if head.has_answered
            and wait.kind != "outside"
            and unanswered_s(head, wait) >= self.stall_after_s
            and self._is_held_up(head, wait)
        ]
        return sorted(found, key=lambda pair: -pair[1].age_s)

    @cached_property
    def _edges_by_waiter(self) -> dict[str, list[Edge]]:
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.waiter, []).append(edge)
        return found

    def awaited(self, edge: Edge) -> list[str]:
        """Return all processes that the wait of an edge needs; the graph itself holds at most MAX_TARGETS."""
        head = self.by_name[edge.waiter]
        if edge.wait.kind == "collective" and edge.group is not None:
            mine = edge.group.at(edge.wait.seq)
            way = self._in_the_way(head, edge.group, edge.wait.seq, mine)
            return [name for name, _, _ in way if name != edge.waiter]
        return [each.target for each in self.edges_from(edge.waiter) if each.wait == edge.wait]

    def needed_by(self, head: ProcessSnapshot) -> set[str]:
        """Return all that a process waits for, however short a time, without a deadline of its own."""
        return {edge.target for wait in head.waits for edge in self._edges_of(head, wait) if edge.is_binding}

    def _is_held_up(self, head: ProcessSnapshot, wait: Wait) -> bool:
        """Return whether a thread stands in a wait, and does not just run beside an operation that it has posted.

        A process that computes beside an operation of gloo is not in it; a host that waits for a device may use a whole
        core.
        """
        if wait.kind == "declared":
            return True
        still_s = next((each.still_s for each in head.threads if each.name == wait.thread), wait.age_s)
        group = _group_named(head, wait.group)
        may_spin = wait.kind != "p2p" and (group is None or not group.backend.startswith("gloo"))
        computes = not may_spin and head.busy >= BUSY and head.still_s < COMPUTE_PATIENCE * self.stall_after_s
        return still_s >= SETTLED * self.stall_after_s and not computes

    def edges_from(self, name: str) -> list[Edge]:
        return self._edges_by_waiter.get(name, [])

    def reach(self, names: Iterable[str]) -> list[Edge]:
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

    def is_moving(self, head: ProcessSnapshot, thread: str = "") -> bool:
        """New lines or new entries lately, or computing, with ten times the patience.

        While the thread that has to act waits for something outside of the process, what its other threads
        communicate does not count.
        """
        if head.tree_busy >= TREE_BUSY:
            return True
        if any(each.name == thread and self._stands_alone(each) for each in head.threads):
            return False
        if head.still_s < SETTLED * self.stall_after_s:
            return True
        return head.busy >= BUSY and head.still_s < COMPUTE_PATIENCE * self.stall_after_s

    def _stands_alone(self, thread: ThreadSnapshot) -> bool:
        is_away = thread.outside is not None and thread.outside.kind in AWAY
        return is_away and thread.still_s >= SETTLED * self.stall_after_s

    def _members(self, world: str, ranks: Iterable[int]) -> list[str]:
        """Return names of ranks in a world; "rank N" for an unknown one."""
        return [self.name_by_rank.get((world, rank), f"rank {rank}") for rank in ranks]

    def _edges_of(self, head: ProcessSnapshot, wait: Wait) -> Iterator[Edge]:
        if wait.kind == "collective":
            yield from self._collective_edges(head, wait)
        elif wait.kind == "barrier" or (wait.kind == "rendezvous" and wait.what in MEETINGS):
            yield from self._meeting_edges(head, wait)
        elif wait.kind == "p2p":
            group = _group_named(head, wait.group)
            for name in self._members(head.world, wait.peers):
                reason: Reason = "left" if self._has_left(name, head.world, group) else "peer"
                actor = self._actor(name, group)
                yield Edge(
                    waiter=head.name, target=name, wait=wait, reason=reason, actor=actor, group=group,
                    is_certain=len(wait.peers) == 1,
                )  # fmt: skip
        elif wait.kind == "declared" and wait.on:
            yield from self._producer_edges(head, wait)

    def _producer_edges(self, head: ProcessSnapshot, wait: Wait) -> Iterator[Edge]:
        """Yield edges to all of a role, as any of them may act; one that has ended in order only if no other may."""
        targets = [name for name in self._named(wait.on) or [wait.on] if name != head.name]
        fates = {name: self.absent_by_name[name].fate for name in targets if name in self.absent_by_name}
        may_act = [name for name in targets if fates.get(name) not in ENDED]
        for name in targets:
            if not may_act or fates.get(name) != "exited":
                yield Edge(
                    waiter=head.name, target=name, wait=wait, reason="producer",
                    is_certain=not may_act or may_act == [name],
                )  # fmt: skip

    def _collective_edges(self, head: ProcessSnapshot, wait: Wait) -> Iterator[Edge]:
        group = _group_named(head, wait.group)
        if group is None:
            return
        mine = group.at(wait.seq)
        for name, theirs, reason in self._in_the_way(head, group, wait.seq, mine)[:MAX_TARGETS]:
            if name != head.name:
                yield Edge(
                    waiter=head.name, target=name, wait=wait, reason=reason, actor=self._actor(name, group),
                    group=group, mine=mine, theirs=theirs,
                )  # fmt: skip

    def _in_the_way(
        self, head: ProcessSnapshot, group: GroupSnapshot, seq: int, mine: Collective | None
    ) -> list[Obstacle]:
        """Return members that hold up one collective, absent and idle ones first; alike waits share the answer."""
        alike = (mine.op, mine.inputs, mine.outputs) if mine else None
        key = (head.world, group.key, seq, alike)
        if key not in self._obstacles:
            found = [
                (name, theirs, reason)
                for name in self.members(head, group)
                for theirs, reason in [self._obstacle(name, head.world, group, seq, mine)]
                if reason is not None
            ]
            known = [each for each in found if each[2] != "unknown"]
            self._obstacles[key] = sorted(known or found, key=lambda each: self._waits_itself(each[0]))
        return self._obstacles[key]

    def members(self, head: ProcessSnapshot, group: GroupSnapshot) -> list[str]:
        """Names of a group's members; of a group across worlds those that are watched."""
        if group.is_foreign:
            return [each.name for each in self.heads if each.group(group.key) is not None]
        return self._members(head.world, group.ranks)

    def _actor(self, name: str, group: GroupSnapshot | None) -> str:
        """Return the thread by which a process takes part in a group, "" where that is not known."""
        theirs = self.by_name[name].group(group.key) if group and name in self.by_name else None
        return theirs.worker if theirs else ""

    def _has_left(self, name: str, world: str, group: GroupSnapshot | None) -> bool:
        head = self.by_name.get(name)
        return head is not None and group is not None and head.left_group(world, group.key) is not None

    def _waits_itself(self, name: str) -> bool:
        head = self.by_name.get(name)
        return head is not None and bool(head.waits)

    def _obstacle(
        self, name: str, world: str, group: GroupSnapshot, seq: int, mine: Collective | None
    ) -> tuple[Collective | None, Reason | None]:
        absent = self.absent_by_name.get(name)
        other = absent.head if absent else self.by_name.get(name)
        theirs = other.group(group.key) if other else None
        left = other.left_group(world, group.key) if other and theirs is None else None
        if left is not None:
            return _compare(left, seq, mine, "left")
        return _compare(theirs, seq, mine, "absent" if name not in self.by_name else None)

    def _meeting_edges(self, head: ProcessSnapshot, wait: Wait) -> Iterator[Edge]:
        """Yield edges to all that should be in the same call and are not; nothing numbers these calls."""
        group = _group_named(head, wait.group)
        ranks = wait.peers or (group.ranks if group else range(head.world_size))
        for name in self._members(head.world, ranks):
            other = self.by_name.get(name)
            there = other is not None and any(_meet(each, wait) for each in other.waits)
            if other is not None and wait.kind == "rendezvous" and _has_made(other, head, ranks):
                continue
            if name != head.name and not there:
                reason: Reason = "absent" if other is None else "not-entered"
                # A process that left a world may be entering the next, which its store may know by the same name.
                if other is not None and wait.what != ENTRY and _has_left_world(other, head):
                    reason = "left"
                actor = self._actor(name, group)
                yield Edge(waiter=head.name, target=name, wait=wait, reason=reason, actor=actor, group=group)

    def _named(self, on: str) -> list[str]:
        """Processes that a declared wait means: by name, or by role ("rollouter" for "rollouter-0")."""
        names = [*self.by_name, *self.absent_by_name]
        exact = [name for name in names if name == on]
        return exact or [name for name in names if name.startswith((f"{on}-", f"{on} ", f"{on}/", f"{on}["))]


def _meet(one: Wait, other: Wait) -> bool:
    """Return whether two processes are in one rendezvous.

    On its way into a world a process looks for the store first, and only then for the others: ranks of one start may
    stand in either, so where it looks does not distinguish two worlds.
    """
    call, other_call = ((each.kind, each.what, each.group) for each in (one, other))
    return call == other_call and (one.on == other.on or one.what == ENTRY)


def is_loop_blocked(head: ProcessSnapshot, wait: Wait) -> bool:
    """Return whether the event loop that a declared wait is in does not turn, so that no answer is received."""
    return wait.kind == "declared" and wait.thread == MAIN_THREAD and head.held_up_s > 0


def unanswered_s(head: ProcessSnapshot, wait: Wait) -> float:
    """Return for how long a wait has lasted; of one that nothing can end, for how long that has been so."""
    return min(wait.age_s, head.held_up_s) if is_loop_blocked(head, wait) else wait.age_s


def _has_left_world(other: ProcessSnapshot, head: ProcessSnapshot) -> bool:
    """Return whether a process has destroyed the group of all ranks of another's world.

    A side group of all ranks is not the world: a process that has left that has no group any more.
    """
    is_in_it = other.world == head.world and any(not group.is_foreign for group in other.groups)
    has_left = any(left.world == head.world and len(left.group.ranks) == head.world_size for left in other.left_groups)
    return has_left and not is_in_it


def _has_made(other: ProcessSnapshot, head: ProcessSnapshot, ranks: Iterable[int]) -> bool:
    """Return whether a process has a group of some ranks already, which another of its world is still about to make.

    Torch lets each of them go as soon as it is ready itself.
    """
    known = {group.key for group in head.groups}
    made = (group for group in other.groups if group.key not in known and not group.is_foreign)
    return other.world == head.world and any(set(group.ranks) == set(ranks) for group in made)


def _full_name(each: ProcessSnapshot | AbsentProcess, places: set[tuple[str, int | None]]) -> str:
    """Return a name, with what distinguishes the processes that share it."""
    ranks, worlds = {rank for _, rank in places}, {world for world, _ in places}
    parts = [f"rank {each.rank}"] if len(ranks) > 1 else []
    parts += [f"world {each.world or 'none'}"] if len(worlds) > 1 else []
    return f"{each.name} ({', '.join(parts)})" if parts else each.name


def _group_named(head: ProcessSnapshot, name: str) -> GroupSnapshot | None:
    return next((each for each in head.groups if each.name == name), None)


def _compare(
    theirs_group: GroupSnapshot | None, seq: int, mine: Collective | None, gone: Literal["absent", "left"] | None
) -> tuple[Collective | None, Reason | None]:
    """Return why a member holds up collective `seq` of a group; no reason if it is in it, alike.

    `theirs_group` is how far that member has come in the group, `mine` the collective of the waiter if it is
    remembered, `gone` how the member went.
    """
    theirs = theirs_group.at(seq) if theirs_group else None
    if theirs is None and theirs_group is not None:
        if theirs_group.entered is None:
            return None, "unknown"
        if gone and theirs_group.entered >= seq:
            return None, None  # it was in it, and whether that was over is unknown
    if theirs_group is None or (theirs is None and (theirs_group.entered or 0) < seq):
        return None, gone or "not-entered"
    if mine and theirs and (differs := difference(mine, theirs)):
        return theirs, differs
    # A member that left after its own part was over is not to blame; one that died in the middle is.
    return theirs, gone if gone and not (theirs and theirs.done) else None
