"""Proofs: what cannot clear by waiting; which process failed first; cycles of the wait-for graph. Pure.

There are four kinds of proof, and only these end a run before the timeout of what is waited in:

- a member is dead: its process has ended, or an exception is ending it, while others are in a wait for it;
- members have issued different operations, shapes or roots at one place of one group's sequence;
- a cycle of waits: every process in it has answered and waits without a deadline of its own, and the thread that would
  have to act is the one that waits;
- a member has left for good: it has destroyed the group, or ended in order, and others are in a wait for it.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from offbeat_liveness._diagnosis.build import (
    ADVICE,
    absent_party,
    advice_for,
    build_verdict,
    call_text,
    cycle_text,
    fate_text,
    group_of,
    in_order,
    name_order,
    notes_of,
    parties_of,
    votes,
    waiters,
    why_in_flight,
)
from offbeat_liveness._diagnosis.graph import ENDED, AbsentProcess, Edge, WaitGraph
from offbeat_liveness._diagnosis.verdict import Verdict, VerdictKind, join_names, name_of_group
from offbeat_liveness._process.snapshot import Collective, GroupSnapshot, ProcessSnapshot

MAX_STARTS: Final = 16
Node = tuple[str, str]
Steps = dict[Node, list[tuple[Node, Edge]]]
# The fate that explains the others: an exception comes before the exits it leads to.
FATE_ORDER: Final = ("raised", "crashed", "killed", "left", "exited")
CERTAIN: Final = ("raised", "crashed", "killed")
# What gloo, nccl's watchdog and torch's store report on a process whose peer went away: from an HTTP client or a queue
# the same words mean something outside the run.
SIGNS_OF_A_LOST_PEER: Final = (
    "Broken pipe",
    "Connection closed by peer",
    "Connection refused",
    "Connection reset by peer",
    "Connection was likely closed",
    "Socket Timeout",
    "Timed out waiting",
    "failed to recv, got 0 bytes",
    "remote process exited",
)
OWN_SIGN: Final = "PeerFailedError"  # of offbeat's own groups
WORLD: Final = "0"  # torch's name of the default group
TORCH_ERRORS: Final = ("RuntimeError:", "torch.distributed.")


def find_cycle(edges: Sequence[Edge], *, of_threads: bool = False) -> list[Edge]:
    """Return a cycle among some edges, [] if there is none: the shortest of those that pass one found first.

    `of_threads` follows an edge only to the thread that has to act, where that is known: two threads of one process may
    each wait for something that the other side's other thread will do.
    """
    steps = _steps(edges, of_threads=of_threads)
    cycles = [_way_back(node, steps) for node in _walk_in_circle(steps)[:MAX_STARTS]]
    return min(cycles, key=len, default=[])


def _steps(edges: Sequence[Edge], *, of_threads: bool) -> Steps:
    """Return where each process, or thread, that waits leads to among those that wait."""
    threads: dict[str, set[str]] = {}
    for edge in edges:
        threads.setdefault(edge.waiter, set()).add(edge.wait.thread if of_threads else "")
    steps: Steps = {}
    for edge in edges:
        node = (edge.waiter, edge.wait.thread if of_threads else "")
        targets = [thread for thread in threads.get(edge.target, ()) if not of_threads or edge.actor in ("", thread)]
        steps.setdefault(node, []).extend(((edge.target, thread), edge) for thread in sorted(targets))
    return steps


def _walk_in_circle(steps: Steps) -> list[Node]:
    """Nodes on some cycle, found depth first."""
    dead_ends: set[Node] = set()
    for start in steps:
        way, ways_on = [start], [iter(steps[start])]
        on_way = {start}
        while way:
            target = next((node for node, _ in ways_on[-1] if node not in dead_ends), None)
            if target in on_way:
                return way[way.index(target) :]
            if target is None:
                dead = way.pop()
                ways_on.pop()
                dead_ends.add(dead)
                on_way.discard(dead)
                continue
            way.append(target)
            on_way.add(target)
            ways_on.append(iter(steps[target]))
    return []


def _way_back(start: Node, steps: Steps) -> list[Edge]:
    came_by: dict[Node, tuple[Node, Edge]] = {}
    nodes = deque([start])
    while nodes:
        node = nodes.popleft()
        for target, edge in steps.get(node, ()):
            if target not in came_by:
                came_by[target] = node, edge
                nodes.append(target)
        if start in came_by:
            break
    node, edge = came_by[start]
    way = [edge]
    while node != start:
        node, edge = came_by[node]
        way.append(edge)
    return way[::-1]


def find_failure(graph: WaitGraph) -> Verdict | None:
    """Return a verdict on the first failure, when others depend on the process: no wait need have lasted long.

    Ranks of one torch world depend on each other; other processes on those that they wait for.

    None if every process failed on its own account, or no process waited for one that did.
    """
    gone = _failed(graph)
    names = {each.name for each in gone}
    on_its_way_out = [each.head for each in graph.absent if each.fate == "raised" and each.head is not None]
    hurt = [head for head in [*graph.heads, *on_its_way_out] if head.name not in names and _is_hurt(head)]
    hurt = [head for head in hurt if any(_concerns(graph, each, head) for each in gone)]
    gone = [each for each in gone if any(_concerns(graph, each, head) for head in hurt)]
    if not gone:
        return None
    first = first_fate(gone)
    missing = in_order(each.name for each in first)
    _, group, entry = _newest_call(hurt)
    where = f" after {entry} on {name_of_group(group.name, group.axes)}" if entry and group else ""
    return Verdict(
        kind="dead-peer",
        certainty="proof",
        fate=first[0].fate,
        headline=f"{fate_text(first)}; {join_names(each.name for each in hurt)} cannot go on{where}",
        stalled_s=max((wait.age_s for each in graph.heads for wait in each.waits), default=0.0),
        time_s=graph.time_s,
        group=group.name if group else "",
        axes=group.axes if group else (),
        members=group.ranks if group else (),
        op=entry.op if entry else "",
        seq=entry.seq if entry else 0,
        missing=tuple(missing),
        arrived=tuple(in_order(each.name for each in hurt)),
        parties=(
            *(absent_party(each) for each in first),
            *(party for each in hurt for party in parties_of(graph, each, None)),
        ),
        advice=advice_for(first[0], graph),
        notes=notes_of(graph),
    )


def _failed(graph: WaitGraph) -> list[AbsentProcess]:
    """Processes that failed on their own account; those that left in order only if others were cut off."""
    raised = [
        AbsentProcess(name=head.name, rank=head.rank, world=head.world, fate="raised", text=head.error, head=head)
        for head in graph.heads
        if head.state == "failed" and not is_secondary(head.error)
    ]
    cut_off = _cut_off_worlds(graph)
    gone = [each for each in graph.absent if not (each.fate == "raised" and is_secondary(each.text))]
    gone = [each for each in gone if each.fate in CERTAIN or (each.fate == "exited" and each.world in cut_off)]
    return [*raised, *_left(graph, cut_off), *gone]


def _cut_off_worlds(graph: WaitGraph) -> set[str]:
    cut_off = {head.world for head in graph.heads if is_secondary(head.error)}
    cut_off |= {each.world for each in graph.absent if each.fate == "raised" and is_secondary(each.text)}
    return cut_off - {""}


def _left(graph: WaitGraph, cut_off: set[str]) -> list[AbsentProcess]:
    return [
        AbsentProcess(
            name=head.name, rank=left.rank, world=left.world, fate="left", text=why_in_flight(head), head=head
        )
        for head in graph.heads
        for left in head.left_groups[-1:]
        if head.state == "running" and left.group.name == WORLD and left.world in cut_off
    ]


def _is_hurt(head: ProcessSnapshot) -> bool:
    return is_secondary(head.error) or (head.state == "running" and bool(head.waits))


def _concerns(graph: WaitGraph, gone: AbsentProcess, head: ProcessSnapshot) -> bool:
    """Return whether the end of one process is a matter for another: it waits for it, or has failed for a lost peer."""
    is_cut_off = gone.world == head.world != "" and is_secondary(head.error)
    return is_cut_off or gone.name in graph.needed_by(head)


def _newest_call(
    heads: Sequence[ProcessSnapshot],
) -> tuple[ProcessSnapshot | None, GroupSnapshot | None, Collective | None]:
    calls = [(head, group, entry) for head in heads for group in head.groups for entry in group.recent]
    return max(calls, key=lambda call: call[2].created_ns, default=(None, None, None))


def is_secondary(error: str) -> bool:
    """Return whether an exception only says that a peer or a connection went away."""
    if OWN_SIGN in error:
        return True
    return error.startswith(TORCH_ERRORS) and any(sign in error for sign in SIGNS_OF_A_LOST_PEER)


def first_fate(gone: Sequence[AbsentProcess]) -> list[AbsentProcess]:
    """Return those whose fate explains the others, the earliest first."""
    first = min(_fate_order(each) for each in gone)
    same = [each for each in gone if _fate_order(each) == first]
    return sorted(same, key=lambda each: each.head.time_s if each.head else 0.0)


def _fate_order(absent: AbsentProcess) -> int:
    """Return an exception that only says that a peer went away explains least."""
    secondary = absent.fate == "raised" and is_secondary(absent.text)
    return len(FATE_ORDER) if secondary else FATE_ORDER.index(absent.fate)


def find_proof(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    failed = any(head.state == "failed" for head in graph.heads)
    return (
        (find_failure(graph) if failed else None)
        or _ended(graph, edges)
        or _left_the_group(graph, edges)
        or _mismatch(graph, edges)
        or _other_root(graph, edges)
        or _cycle(graph, edges)
    )


def _ended(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    reached = {edge.target: edge for edge in edges if edge.is_binding and edge.target in graph.absent_by_name}
    ended = [each for each in graph.absent if each.name in reached and each.fate in ENDED]
    if not ended:
        return None
    first = first_fate(ended)
    edge = reached[first[0].name]
    return build_verdict(
        graph, "dead-peer", f"{fate_text(first)}; {waiters(graph, edge)} in {call_text(edge.wait, edge.group)}",
        edges, edge, certainty="proof", fate=first[0].fate, missing=[each.name for each in first],
        first=[absent_party(each) for each in first], advice=advice_for(first[0], graph),
    )  # fmt: skip


def _left_the_group(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    left = [edge for edge in edges if edge.reason == "left" and edge.is_binding and edge.target in graph.by_name]
    if not left:
        return None
    edge = max(left, key=lambda each: each.wait.age_s)
    names = in_order({each.target for each in left if each.wait.group == edge.wait.group})
    has = "has" if len(names) == 1 else "have"
    headline = f"{join_names(names)} {has} left the group (destroy_process_group); {waiters(graph, edge)} in "
    headline += call_text(edge.wait, edge.group)
    return build_verdict(
        graph, "dead-peer", headline, edges, edge, certainty="proof", missing=names, advice=ADVICE["left"]
    )


def _mismatch(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    """Members that stand at one place of the sequence with different calls; the earliest such place."""
    unlike = [edge for edge in edges if edge.reason in ("other-op", "other-shape") and edge.mine and edge.theirs]
    if not unlike:
        return None
    edge = min(unlike, key=lambda each: (each.wait.seq, each.reason))
    assert edge.group is not None
    kind: VerdictKind = "different-op" if edge.reason == "other-op" else "shape-mismatch"
    where = name_of_group(edge.group.name, edge.group.axes)
    headline = f"collective {edge.wait.seq} of {where} is {votes(graph, edge)}"
    involved = {name for each in unlike if each.group == edge.group for name in (each.waiter, each.target)}
    return build_verdict(graph, kind, headline, edges, edge, certainty="proof", involved=involved)


def _other_root(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    """Find members that name different roots for one collective; known from their stacks: no recorder has roots."""
    for head, wait in graph.stalled:
        others = [
            (other, each)
            for other in graph.heads
            for each in other.waits
            if wait.root is not None
            and each.root is not None
            and wait.seq > 0  # else nothing shows that it is the same call
            and (other.world, each.group, each.seq) == (head.world, wait.group, wait.seq)
            and each.root != wait.root
            and wait.kind == each.kind == "collective"
        ]
        if others:
            other, theirs = others[0]
            headline = f"{wait.what} has root {wait.root} on {head.name} and root {theirs.root} on {other.name}"
            edge = Edge(waiter=head.name, target=other.name, wait=wait, reason="other-op", group=group_of(head, wait))
            advice = "give one root to all members; in a sub-group it is a global rank: dist.get_global_rank(group, 0)"
            return build_verdict(
                graph, "different-op", headline, [*edges, edge], edge, certainty="proof", advice=advice
            )
    return None


def _cycle(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    """Threads that wait for each other in a circle, each for the very one that has to act."""
    cycle = find_cycle([edge for edge in edges if edge.is_binding], of_threads=True)
    if not cycle or not all(_is_held(graph, edge, cycle[(place + 1) % len(cycle)]) for place, edge in enumerate(cycle)):
        return None
    return cycle_verdict(graph, cycle, is_proof=True)


def _is_held(graph: WaitGraph, edge: Edge, following: Edge) -> bool:
    """Return whether only the thread in the next wait of the cycle could do what an edge waits for."""
    head = graph.by_name[edge.target]
    return edge.actor == following.wait.thread or not head.free_threads


def cycle_verdict(graph: WaitGraph, cycle: Sequence[Edge], *, is_proof: bool) -> Verdict:
    """Return the verdict on a cycle of waits, which lists its members from the lowest on."""
    start = min(range(len(cycle)), key=lambda place: name_order(cycle[place].waiter))
    cycle = [*cycle[start:], *cycle[:start]]
    kinds, calls = {edge.wait.kind for edge in cycle}, {edge.wait.what for edge in cycle}
    kind: VerdictKind = "different-order" if kinds == {"collective"} else "wait-cycle"
    if kinds == {"rendezvous"} and len(calls) == 1:
        kind = "different-op"  # such as new_group with other ranks
    return build_verdict(
        graph, kind, cycle_text(cycle), cycle, cycle[0], certainty="proof" if is_proof else "suspicion",
        missing=in_order(graph.awaited(cycle[0])), involved={edge.waiter for edge in cycle},
    )  # fmt: skip
