"""Suspicions: what may be a hang, and may be a healthy pause. Pure.

A suspicion is said once, with names and lines, and acted upon only at the timeout of what is waited in.
"""

from collections.abc import Sequence

from offbeat_liveness._diagnosis.build import (
    ADVICE,
    FATES,
    absent_party,
    advice_for,
    advice_on,
    are,
    build_verdict,
    call_text,
    group_of,
    in_order,
    name_order,
    outside_chain,
    same_call,
    same_wait,
    waiters,
)
from offbeat_liveness._diagnosis.graph import COMPUTE_PATIENCE, ENDED, MEETINGS, Edge, WaitGraph, is_loop_blocked
from offbeat_liveness._diagnosis.proofs import cycle_verdict, find_cycle
from offbeat_liveness._diagnosis.verdict import Party, Verdict, VerdictKind, join_names, name_of_group
from offbeat_liveness._process.snapshot import OutsideWait, ProcessSnapshot, Wait


def find_blocked_loop(graph: WaitGraph) -> Verdict | None:
    """Find a process with a declared wait that cannot receive an answer: its event loop does not turn."""
    head, wait = next((each for each in graph.stalled if is_loop_blocked(*each)), (None, None))
    if head is None or wait is None:
        return None
    doing = "in one callback of its event loop"
    place = f", at {wait.stack[0]}" if wait.stack else ""
    headline = f"{head.name} has been {doing} for {head.held_up_s:.0f} s{place}; it takes no answers meanwhile"
    party = Party(name=head.name, rank=head.rank, part="moving", doing=doing, for_s=head.held_up_s, stack=wait.stack)
    edge = Edge(waiter=head.name, target="", wait=wait, reason="none")
    return build_verdict(graph, "blocked-loop", headline, [], edge, first=[party])


def find_suspicion(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    """Return what a stall may be, where nothing is proved; a process that only posted an operation may still act."""
    edges = [edge for edge in edges if not edge.wait.is_posted] or edges
    found = _absence(graph, edges) or _cycle(graph, edges)
    if found is not None:
        return found
    waiting = {edge.waiter for edge in edges}
    ends = [edge for edge in edges if edge.target not in waiting and edge.target in graph.by_name]
    return (_idle_end(graph, edges, ends) if ends else None) or _no_end(graph)


def _absence(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    reached = {edge.target: edge for edge in edges}
    gone = [each for each in graph.absent if each.name in reached]
    unknown = [edge for edge in edges if edge.target not in graph.by_name and edge.target not in graph.absent_by_name]
    if not gone and not unknown:
        return None
    if unknown and not gone and unknown[0].reason == "producer":
        return _unknown_producer(graph, edges, unknown[0])
    names = list(dict.fromkeys([each.name for each in gone] + [edge.target for edge in unknown]))
    edge = reached[names[0]]
    fate = gone[0].fate if gone else "never-came"
    ended = gone and gone[0].fate in ENDED  # while the process that waits for it has a deadline of its own
    kind: VerdictKind = "dead-peer" if ended or fate in ("stopped", "silent") else "missing-member"
    headline = f"{are(names, FATES[fate])}; {waiters(graph, edge)} in {call_text(edge.wait, edge.group)}"
    first = [absent_party(each) for each in gone]
    advice = advice_for(gone[0], graph) if gone else ADVICE[fate]
    return build_verdict(graph, kind, headline, edges, edge, missing=names, first=first, advice=advice)


def _unknown_producer(graph: WaitGraph, edges: Sequence[Edge], edge: Edge) -> Verdict:
    headline = f"{edge.waiter} waits in {edge.wait.what} for {edge.target!r}; nothing of that name is watched"
    advice = f"start {edge.target!r} and let it call liveness.watch(name=...), or correct on={edge.wait.on!r}"
    return build_verdict(graph, "starved", headline, edges, edge, missing=[edge.target], advice=advice)


def _cycle(graph: WaitGraph, edges: Sequence[Edge]) -> Verdict | None:
    """Processes that wait for each other in a circle, though one of them has a deadline, or a thread that may act."""
    known = [edge for edge in edges if edge.reason != "unknown"]
    cycle = find_cycle([*known, *graph.outside_edges])
    return cycle_verdict(graph, cycle, is_proof=False) if cycle else None


def _idle_end(graph: WaitGraph, edges: Sequence[Edge], ends: Sequence[Edge]) -> Verdict | None:
    quiet = [edge for edge in ends if not graph.is_moving(graph.by_name[edge.target], edge.thread)]
    if not quiet:
        return _straggler(graph, edges, ends)
    edge = max(quiet, key=lambda each: each.wait.age_s)
    idle = {each.target for each in quiet if same_wait(graph, each, edge)}
    awaited = graph.awaited(edge)
    idle |= {name for name in awaited if name in graph.by_name and _is_idle(graph, graph.by_name[name], edge)}
    names = in_order(idle)
    why = outside_chain(graph, names[0], among=names) or _own_call(graph, names)
    if edge.wait.kind == "declared":
        headline = f"{waiters(graph, edge)} in {edge.wait.what}; {are(names, 'idle')}{why}"
        return build_verdict(graph, "starved", headline, edges, edge, missing=names)
    came = "has not come" if len(names) == 1 else "have not come"
    headline = f"{join_names(names)} {came} to {call_text(edge.wait, edge.group)}{why}; {waiters(graph, edge)} in it"
    advice = advice_on(graph.by_name[names[0]])
    return build_verdict(graph, "missing-member", headline, edges, edge, missing=names, advice=advice)


def _own_call(graph: WaitGraph, names: Sequence[str]) -> str:
    """Return the call of torch in which the first of those that have not come stands, as the rest of a sentence."""
    head = graph.by_name[names[0]]
    wait = next((each for each in head.waits if each.kind != "outside" and not each.is_posted), None)
    if wait is None:
        return ""
    return f": {head.name if len(names) > 1 else 'it'} is in {call_text(wait, group_of(head, wait))}"


def _is_idle(graph: WaitGraph, head: ProcessSnapshot, edge: Edge) -> bool:
    in_torch = any(wait.kind != "outside" and not wait.is_posted for wait in head.waits)
    return not in_torch and not graph.is_moving(head, edge.thread)


def _straggler(graph: WaitGraph, edges: Sequence[Edge], ends: Sequence[Edge]) -> Verdict | None:
    """Slow but moving. A declared wait may last as long as its deadline says while its producer moves."""
    late = [edge for edge in ends if edge.wait.age_s >= _patience_s(graph, edge.wait)]
    if not late:
        return None
    edge = max(late, key=lambda each: each.wait.age_s)
    names = sorted({each.target for each in late}, key=name_order)
    if not any(graph.by_name[name].has_answered for name in names):
        headline = f"{are(names, 'silent so far, and may only be slow')}; {waiters(graph, edge)} in "
        headline += call_text(edge.wait, edge.group)
        return build_verdict(graph, "straggler", headline, edges, edge, missing=names, advice=ADVICE["silent-so-far"])
    why = outside_chain(graph, names[0], among=names)
    headline = f"{are(names, 'slow, and moving')}{why}; {waiters(graph, edge)} in {call_text(edge.wait, edge.group)}"
    return build_verdict(graph, "straggler", headline, edges, edge, missing=names)


def _no_end(graph: WaitGraph) -> Verdict | None:
    """Find a stalled wait that leads nowhere: no process is missing, or none is known that should act."""
    leading = {(edge.waiter, edge.wait) for edge in graph.edges if not _is_in_it_too(graph, edge)}
    for head, wait in graph.stalled:
        if (head.name, wait) not in leading:
            edge = Edge(waiter=head.name, target="", wait=wait, reason="none", group=group_of(head, wait))
            unsure = wait.kind in ("store", "declared") or (wait.kind == "p2p" and not wait.peers)
            found = _wait_without_target(graph, head, edge) if unsure else _unending(graph, head, edge)
            if found is not None:
                return found
    return None


def _is_in_it_too(graph: WaitGraph, edge: Edge) -> bool:
    """Return whether a process about which the recorder says nothing is in the same call, by its stack."""
    head = graph.by_name.get(edge.target)
    return edge.reason == "unknown" and head is not None and any(same_call(each, edge.wait) for each in head.waits)


def _wait_without_target(graph: WaitGraph, head: ProcessSnapshot, edge: Edge) -> Verdict | None:
    """Return the verdict on a wait that does not name the process that has to act: any that moves may be about to."""
    wait = edge.wait
    what = wait.on or "a producer it does not name"
    if wait.kind == "store":
        what = f"key {wait.on!r}, which nobody has set"
    elif wait.kind == "p2p":
        what = "a message of any rank, which nobody has sent"
    headline = f"{head.name} waits in {wait.what} for {what}"
    stuck = {each.name for each, _ in graph.stalled}
    moving = [each.name for each in graph.heads if each.name not in stuck and graph.is_moving(each)]
    if not moving:
        return build_verdict(graph, "starved", headline, [], edge, everybody=True)
    if wait.age_s < _patience_s(graph, wait):
        return None
    headline += f"; {join_names(moving)} {'moves' if len(moving) == 1 else 'move'}"
    return build_verdict(graph, "straggler", headline, [], edge, everybody=True)


def _unending(graph: WaitGraph, head: ProcessSnapshot, edge: Edge) -> Verdict | None:
    """Return a call of torch that every known process is in, the last of them for long as well."""
    fellows = [other for other in graph.heads if other.world == head.world or (edge.group and edge.group.is_foreign)]
    ages_s = [wait.age_s for other in fellows for wait in other.waits if same_call(wait, edge.wait)]
    if min(ages_s) < graph.stall_after_s:
        return None
    group = edge.group
    if group is not None and group.is_foreign and len(graph.members(head, group)) < group.size:
        known = len(graph.members(head, group))
        headline = f"{head.name} waits in {call_text(edge.wait, group)}, which is of {group.size} processes in several "
        headline += f"worlds; of these {known} {'is' if known == 1 else 'are'} watched"
        return build_verdict(graph, "missing-member", headline, [], edge, advice=ADVICE["unwatched"])
    swapped = _swapped_queue(graph)
    if swapped:
        headline, edge = swapped
        return build_verdict(graph, "different-order", headline, [], edge, everybody=True)
    if edge.wait.kind == "rendezvous":
        together = [other.name for other in fellows if any(each.what == edge.wait.what for each in other.waits)]
        if edge.wait.what in MEETINGS and len(together) == len(edge.wait.peers or range(head.world_size)):
            return _met_in_vain(graph, edge, together)
        headline = f"{waiters(graph, edge)} in {call_text(edge.wait, None)}, and not everybody who is expected has come"
        return build_verdict(graph, "missing-member", headline, [], edge, advice=ADVICE["never-came"], everybody=True)
    headline = f"{call_text(edge.wait, edge.group)} does not finish, though every member is in it"
    return build_verdict(graph, "stuck-call", headline, [], edge, everybody=True)


def _met_in_vain(graph: WaitGraph, edge: Edge, names: Sequence[str]) -> Verdict:
    """Say that everybody is there and no group comes of it, as with addresses of an earlier start in the store."""
    headline = f"{join_names(in_order(names))} are all in {call_text(edge.wait, None)}, and do not reach each other"
    advice = ADVICE["met-in-vain"]
    return build_verdict(graph, "stuck-call", headline, [], edge, advice=advice, arrived=names, everybody=True)


def _swapped_queue(graph: WaitGraph) -> tuple[str, Edge] | None:
    """Two members that have queued the same pending collectives of two groups the other way round (nccl streams)."""
    orders = {head.name: _pending_order(head) for head in graph.heads}
    for one, mine in orders.items():
        for other, theirs in orders.items():
            shared = [each for each in mine if each in theirs]
            swapped = shared != [each for each in theirs if each in mine]
            if one < other and swapped and graph.by_name[one].world == graph.by_name[other].world:
                head = graph.by_name[one]
                wait = next((each for each in head.waits if each.kind == "collective"), None)
                if wait is not None:
                    text = f"{one} has queued {_order_text(shared)}; {other} has queued them in another order"
                    return text, Edge(waiter=one, target=other, wait=wait, reason="none", group=group_of(head, wait))
    return None


def _pending_order(head: ProcessSnapshot) -> list[tuple[object, ...]]:
    pending = [
        (each.created_ns, group.key, each.seq) for group in head.groups for each in group.recent if not each.done
    ]
    return [(key[0], key[1], seq) for _, key, seq in sorted(pending, key=lambda each: (each[0], each[2]))]


def _order_text(shared: Sequence[tuple[object, ...]]) -> str:
    return ", then ".join(f"collective {seq} of {name_of_group(str(name), ())}" for name, _, seq in shared[:4])


def _lasts(outside: OutsideWait) -> bool:
    return outside.timeout_s is None and outside.kind not in ("sleep", "terminal", "debugger", "import", "file")


def find_standstill(graph: WaitGraph) -> Verdict | None:
    """Find a standstill: no process is in a call of torch, and each waits in a queue, future, lock or socket."""
    standing = [
        (head, wait)
        for head in graph.heads
        for wait in head.waits
        if wait.age_s >= graph.stall_after_s and wait.outside is not None and _lasts(wait.outside)
    ]
    names = {head.name for head, _ in standing}
    ranks = [head for head in graph.heads if head.rank is not None]
    is_all = bool(ranks) and not graph.absent and all(head.name in names for head in graph.heads)
    is_new = any(head.still_s < graph.stall_after_s for head in graph.heads)
    if not is_all or is_new or any(graph.is_moving(head) for head in graph.heads):
        return None
    head, wait = max(standing, key=lambda each: each[1].age_s)
    chains = "; ".join(f"{name}{outside_chain(graph, name)}" for name in in_order(names)[:4])
    edge = Edge(waiter=head.name, target="", wait=wait, reason="none")
    cycle = find_cycle(graph.outside_edges)
    if cycle:
        return cycle_verdict(graph, cycle, is_proof=False)
    headline = f"nobody moves, and nobody is in a call of torch: {chains}"
    return build_verdict(graph, "standstill", headline, [], edge, everybody=True)


def _patience_s(graph: WaitGraph, wait: Wait) -> float:
    if wait.kind != "declared":
        return graph.stall_after_s
    return max(wait.deadline_s or COMPUTE_PATIENCE * graph.stall_after_s, graph.stall_after_s)
