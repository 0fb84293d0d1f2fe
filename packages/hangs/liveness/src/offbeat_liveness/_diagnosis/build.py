"""Builder of what every verdict has: its parties, their texts, and when a suspicion is acted upon. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from offbeat_liveness._diagnosis.graph import SETTLED, AbsentProcess, Edge, WaitGraph
from offbeat_liveness._diagnosis.verdict import Certainty, Link, Party, Verdict, VerdictKind, join_names, name_of_group
from offbeat_liveness._process.snapshot import Collective, GroupSnapshot, OutsideWait, ProcessSnapshot, Wait, leading

MAX_LINKS: Final = 8
MAKES_GROUPS: Final = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")

FATES: Final = {
    "raised": "out: an exception ended it",
    "killed": "dead: its process is gone and said nothing (SIGKILL, out of memory, a crash)",
    "crashed": "dead: native code ended it",
    "stopped": "stopped (SIGSTOP, or a debugger): its pid exists and does not run",
    "exited": "gone: it left without an error",
    "left": "out of the group: it called destroy_process_group",
    "silent": "silent though its pid exists: something in it holds the GIL",
    "unreachable": "out of reach: no answer from it, nor from any process of its host",
    "never-came": "not there: never reached init_process_group",
    "unwatched": "not watched, so nothing is known of it",
}
GLOO_ABORTS: Final = "gloo aborts a process that gets more bytes than it expects: compare sizes and dtypes"
ADVICE: Final[dict[str, str]] = {
    "raised": "mend the error of the process that raised; the others only waited for it",
    "killed": "look for the reason of the kill on that host (out of memory: dmesg, the scheduler's log), then restart",
    "crashed": "see the last lines of its stderr for what native code said",
    "stopped": "let it go on (kill -CONT PID), or restart the run without it",
    "silent": "see what its native code does (py-spy dump --native --pid PID), then restart",
    "silent-so-far": "see what its native code does (py-spy dump --native --pid PID): it may compute, or hang there",
    "left": "let every member make the same calls before any of them destroys the group",
    "exited": "make every member run the same number of collectives: it left its loop earlier (uneven data?)",
    "unreachable": "look at that host and at the network between the hosts",
    "unwatched": "call liveness.watch() on every rank, or start them all through python -m offbeat_liveness run",
    "never-came": "start it, or correct the world size; see its log for an error before init_process_group",
    "met-in-vain": "look for addresses of an earlier start: a store that outlives its ranks (torchrun, at a restart, "
    "a file) may hold them, so give each start a store or a prefix of its own; then look at the network between the "
    "ranks (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, a firewall)",
    "groups": "make the groups in the same order on every rank of the world: a group that is made in another place of "
    "that order gets another name, and its members look for each other in vain",
    "missing-member": "every member of a group must make the call: take it out of the condition that kept these away, "
    "or narrow the group",
    "different-op": "all members of a group must make the same calls in the same order: compare the two lines above",
    "different-order": "call the groups in one order on all ranks; "
    "if a rank was never meant to make the call, narrow the group or lift the guard",
    "shape-mismatch": "give the operation equal shapes and dtypes on all members: pad, or exchange the sizes first",
    "wait-cycle": "break the circle: let one side finish its call before it waits for the other, "
    "or give one of the waits a deadline",
    "starved": "the producer has nothing to do or waits unseen: see its stack; "
    "check that it was started and given work",
    "straggler": "nothing is dead: even out the work of the slow one; if this is expected, raise stall_after_s, and "
    "give the group a longer timeout if it may last beyond the group's",
    "blocked-loop": "take what computes there out of the event loop (asyncio.to_thread, a process), or bound it; "
    "until it ends, no answer, signal or deadline of that process is heard",
    "standstill": "see what each waits for; whoever should have filled the queue, or answered, did not",
    "stuck-call": "all members are in it, alike: compare what no recorder sees (root rank, reduce op, tags), "
    "then the network or the device",
}


ADVICE_OUTSIDE: Final[dict[str, str]] = {
    "store": "let who is to set that key do so before it waits for this rank",
    "http": "look at the server that was asked: its log, and where its threads stand (py-spy dump --pid PID)",
    "socket": "look at the other side of that connection: its log, and where it stands (py-spy dump --pid PID)",
    "ray": "look at the actor or task that is to give the object (ray list tasks, ray stack): it waits, or was never "
    "scheduled",
    "queue": "see why nothing is put in or taken out: the thread or process on the other side has ended, or waits too",
    "future": "see why it is not fulfilled: what was to do so has ended, or waits too",
    "lock": "see who holds it, or was to set it, and why that one does not go on",
    "asyncio": "see why what the task awaits does not happen: the task on the other side has failed, or waits too",
    "thread": "see what that thread waits for, and why it does not end",
    "process": "look at that process: whether it lives, its log, and where it stands (py-spy dump --pid PID)",
    "subprocess": "look at that process: whether it lives, its log, and what it waits for",
    "file": "look at that file system (df, mount, its server's log); if it is only slow, the run goes on by itself",
    "import": "look at the file system that it imports from; if it is only slow, the run goes on by itself",
    "terminal": "answer at that terminal, or do not ask where no person sits",
    "debugger": "let it go on in the debugger",
    "signal": "see who was to send that signal, and whether it came before this rank waited for it",
    "sleep": "it goes on by itself when the sleep is over; where it sleeps again and again, it polls: see what for",
}


def companions(graph: WaitGraph, edge: Edge) -> set[str]:
    return {each.waiter for each in graph.edges if same_wait(graph, each, edge)}


def same_wait(graph: WaitGraph, one: Edge, other: Edge) -> bool:
    """Return whether two processes stand in one call of one group: several worlds may have groups of one name."""
    if not same_call(one.wait, other.wait):
        return False
    if one.group is None or other.group is None:
        return one.group is other.group
    worlds = {graph.by_name[each.waiter].world for each in (one, other)}
    return one.group.key == other.group.key and (len(worlds) == 1 or one.group.is_foreign)


def same_call(one: Wait, other: Wait) -> bool:
    return _place(one) == _place(other)


def _place(wait: Wait) -> tuple[object, ...]:
    return wait.kind, wait.what, wait.group, wait.seq, wait.peers, wait.on


def waiters(graph: WaitGraph, edge: Edge) -> str:
    names = in_order({*companions(graph, edge), edge.waiter})
    return f"{join_names(names)} {'wait' if len(names) > 1 else 'waits'}"


def are(names: Sequence[str], what: str) -> str:
    return f"{join_names(names)} {'is' if len(names) == 1 else 'are'} {what}"


def parties_of(graph: WaitGraph, head: ProcessSnapshot, wait: Wait | None, thread: str = "") -> list[Party]:
    """Say what a process does: in `wait`, else in its oldest wait, else in none; `thread` is the one that has to act.

    Then what others of its threads wait for: one may be what the first one's other side waits for.
    """
    if head.state == "failed":
        doing = f"out with {head.error}"
        return [Party(name=head.name, rank=head.rank, part="dead", doing=doing, stack=head.error_stack)]
    mine = _reported_wait(graph, head, wait)
    if mine is not None:
        doing = f"in {call_text(mine, group_of(head, mine))}{_in_flight(head, mine.thread)}"
        first = Party(name=head.name, rank=head.rank, part="waits", doing=doing, for_s=mine.age_s, stack=mine.stack)
        return [first, *_beside(graph, head, mine.thread)]
    first_name = head.threads[0].name if head.threads else ""
    return [_outside_party(graph, head, thread), *_beside(graph, head, first_name)]


def _reported_wait(graph: WaitGraph, head: ProcessSnapshot, wait: Wait | None) -> Wait | None:
    waits = [each for each in head.waits if _is_sure(each) or (wait is not None and not _is_sure(wait))]
    settled = [each for each in waits if each.age_s >= SETTLED * graph.stall_after_s]
    same = [each for each in waits if wait and (each.what, each.group) == (wait.what, wait.group)]
    return next(iter(same or settled or waits), None)


def _outside_party(graph: WaitGraph, head: ProcessSnapshot, thread: str) -> Party:
    stack = head.threads[0].stack if head.threads else ()
    why = outside_chain(graph, head.name)
    why += _in_flight(head, head.threads[0].name) if head.threads else ""
    if not head.has_answered:
        return Party(name=head.name, rank=head.rank, part="moving", doing="silent so far", stack=stack)
    if graph.is_moving(head, thread):
        doing = f"in no collective, moving{why}{_last_entered(head)}"
        return Party(name=head.name, rank=head.rank, part="moving", doing=doing, stack=stack)
    doing = f"in no collective and no declared wait{why}{_last_entered(head)}, standing"
    return Party(name=head.name, rank=head.rank, part="missing", doing=doing, for_s=head.still_s, stack=stack)


def _beside(graph: WaitGraph, head: ProcessSnapshot, reported: str) -> Iterator[Party]:
    """Yield the threads of a process that stand in something, but the one that is reported already."""
    for thread in head.threads:
        if thread.name == reported or thread.still_s < SETTLED * graph.stall_after_s:
            continue
        inner = next((each for each in head.waits if each.thread == thread.name and each.outside is None), None)
        what = f"is in {call_text(inner, group_of(head, inner))}" if inner is not None else ""
        what = what or (f"waits for {thread.outside.text}" if thread.outside is not None else "")
        if what:
            doing = f"its thread {thread.name!r} {what}"
            yield Party(
                name=head.name, rank=head.rank, part="waits", doing=doing, for_s=thread.still_s, stack=thread.stack
            )


def _is_sure(wait: Wait) -> bool:
    return wait.kind != "outside" and not wait.is_posted


def why_in_flight(head: ProcessSnapshot) -> str:
    return next((f"after {each.in_flight}" for each in head.threads if each.in_flight), "")


def _in_flight(head: ProcessSnapshot, thread: str) -> str:
    """Return the exception after which a thread cleans up: it explains the wait, and is printed only after it."""
    text = next((each.in_flight for each in head.threads if each.name == thread), "")
    return f", after {text}" if text else ""


def absent_party(absent: AbsentProcess) -> Party:
    doing = FATES[absent.fate] + (f": {absent.text}" if absent.text else "")
    stack = absent.head.error_stack if absent.head else ()
    if absent.fate == "left" and absent.head and absent.head.threads:
        stack = absent.head.threads[0].stack
    if absent.head:
        doing += _last_entered(absent.head)
    return Party(name=absent.name, rank=absent.rank, part="dead", doing=doing, stack=stack)


def _last_entered(head: ProcessSnapshot) -> str:
    entered = [each for group in head.groups for each in group.recent]
    if not entered:
        return ""
    last = max(entered, key=lambda each: each.created_ns)
    group = next(each for each in head.groups if each.name == last.group)
    return f" (its last call: {collective_text(last)}, number {last.seq} of {name_of_group(group.name, group.axes)})"


def call_text(wait: Wait, group: GroupSnapshot | None) -> str:
    """Return the text for a wait."""
    if wait.outside is not None:
        return f"a wait for {wait.outside.text}"
    if wait.kind == "rendezvous" and wait.on:
        return f"{wait.what} ({wait.on})"
    if wait.kind == "store":
        return f"{wait.what} for key {wait.on!r}"
    if wait.kind == "declared":
        return wait.what + (f" on {wait.on}" if wait.on else "")
    if wait.kind == "p2p":
        side = "to" if "send" in wait.what else "from"
        return f"{wait.what} {side} rank {wait.peers[0]}" if wait.peers else f"{wait.what} from any rank"
    if group is None:
        return wait.what
    entry = group.at(wait.seq) if wait.seq else None
    what = str(entry) if entry and entry.op == wait.what else wait.what
    return f"{what} on {name_of_group(group.name, group.axes)}"


def collective_text(collective: Collective) -> str:
    site = f" at {collective.call_site}" if collective.call_site else ""
    return f"{collective}{site}"


def cycle_text(cycle: Sequence[Edge]) -> str:
    return "; ".join(
        f"{edge.waiter} waits for {edge.target} in {call_text(edge.wait, edge.group)}" for edge in cycle[:4]
    )


def outside_chain(graph: WaitGraph, name: str, *, among: Sequence[str] = ()) -> str:
    """Say what a process waits for outside torch, and what that process does, as the rest of a sentence.

    It is named where the sentence is about several, `among` which it is.
    """
    parts: list[str] = []
    first = f": {name}" if len(among) > 1 else ": it"
    seen: set[str] = set()
    while name not in seen and (head := graph.by_name.get(name)) is not None:
        seen.add(name)
        store, outside = store_wait_of(head), outside_of(head)
        others = graph.other_side(head, outside) if outside is not None else []
        subject = ", which" if parts else first
        if store is not None:  # the process with the store need not be the one that is to set the key
            place = f", a key of the store in {others[0]}" if others else ""
            parts.append(f"{subject} is in {call_text(store, None)}{place}")
            break
        if outside is None:
            break
        parts.append(f"{subject} waits for {outside.text}" + (f", which is {others[0]}" if others else ""))
        if not others:
            break
        name = others[0]
    return "".join(parts)


def store_wait_of(head: ProcessSnapshot) -> Wait | None:
    """Find a wait of its main thread for a key; the kernel only knows that it waits for the socket to the store."""
    threads = {each.name for each in leading(head.threads)}
    return next((each for each in head.waits if each.kind == "store" and each.thread in threads), None)


def outside_of(head: ProcessSnapshot) -> OutsideWait | None:
    """Return what the worker of a process waits for outside torch, else its main thread."""
    waits = (each.outside for each in head.waits if each.outside is not None)
    return next(waits, None) or next((each.outside for each in leading(head.threads) if each.outside is not None), None)


def advice_on(head: ProcessSnapshot) -> str:
    """Say what to do about a rank that stands in something outside torch: by what that is."""
    outside = outside_of(head)
    kind = "store" if store_wait_of(head) is not None else outside.kind if outside is not None else ""
    if not kind and any(each.kind == "rendezvous" and each.what in MAKES_GROUPS for each in head.waits):
        return ADVICE["groups"]
    return ADVICE_OUTSIDE.get(kind, ADVICE["missing-member"])


def votes(graph: WaitGraph, edge: Edge) -> str:
    assert edge.group is not None
    votes: dict[str, list[str]] = {}
    everybody = [*graph.heads, *(each.head for each in graph.absent if each.head)]
    for head in everybody:
        group = head.group(edge.group.key)
        entry = group.at(edge.wait.seq) if group else None
        if entry:
            votes.setdefault(collective_text(entry), []).append(head.name)
    return ", but ".join(f"{what} on {join_names(names)}" for what, names in votes.items())


def group_of(head: ProcessSnapshot, wait: Wait) -> GroupSnapshot | None:
    return next((each for each in head.groups if each.name == wait.group), None)


def links_of(edges: Sequence[Edge]) -> tuple[Link, ...]:
    links = [
        Link(
            waiter=edge.waiter,
            on=edge.target,
            what=call_text(edge.wait, edge.group),
            group=edge.wait.group,
            axes=edge.group.axes if edge.group else (),
        )
        for edge in edges
    ]
    return tuple(dict.fromkeys(links))[:MAX_LINKS]


def notes_of(graph: WaitGraph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for head in graph.heads for note in head.notes))


def fate_text(gone: Sequence[AbsentProcess]) -> str:
    """Return what has become of some processes that share a fate; one alone with its exception."""
    if len(gone) == 1 and gone[0].fate == "raised":
        return f"{gone[0].name} raised {gone[0].text}"
    return are([each.name for each in gone], FATES[gone[0].fate])


def advice_for(absent: AbsentProcess, graph: WaitGraph) -> str:
    advice = ADVICE[absent.fate].replace("PID", str(absent.pid or "PID"))
    entry = _gloo_collective(graph) if absent.fate == "crashed" else None
    if entry is None:
        return advice
    return f"{GLOO_ABORTS} in {collective_text(entry)}, number {entry.seq} of group {entry.group!r}; else {advice}"


def _gloo_collective(graph: WaitGraph) -> Collective | None:
    entries = [each for head in graph.heads for group in head.groups for each in group.recent if each.backend == "gloo"]
    return max(entries, key=lambda each: each.created_ns, default=None)


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=name_order)


def name_order(name: str) -> tuple[int, str]:
    word, _, number = name.rpartition(" ")
    return (int(number), word) if number.isdecimal() else (1 << 30, name)


def build_verdict(
    graph: WaitGraph,
    kind: VerdictKind,
    headline: str,
    edges: Sequence[Edge],
    edge: Edge,
    *,
    certainty: Certainty = "suspicion",
    fate: str = "",
    missing: Sequence[str] = (),
    first: Sequence[Party] = (),
    advice: str = "",
    involved: Iterable[str] = (),
    arrived: Iterable[str] = (),
    everybody: bool = False,
) -> Verdict:
    """Fill in what every kind of verdict has.

    `edges` are the part of the graph that matters, `edge` the one with the group, the operation and the waiter. Parties
    are listed in this order: `first`, made by the caller, `missing`, `involved`, the arrived ones, `everybody`.
    """
    group, wait = edge.group, edge.wait
    arrived = in_order({*companions(graph, edge), edge.waiter, *arrived} - set(missing))
    listed = {party.name for party in first}
    names = in_order({*missing, *involved, *({edge.target} - {""})}) + arrived
    names += [head.name for head in graph.heads if everybody]
    parties = [
        party
        for name in dict.fromkeys(names)
        if name not in listed and name in graph.by_name
        for party in parties_of(graph, graph.by_name[name], wait if name in arrived else None, edge.thread)
    ]
    due_in_s, due_to = _due(graph, kind, edges, edge, missing)
    return Verdict(
        kind=kind,
        certainty=certainty,
        fate=fate,
        headline=headline,
        stalled_s=max(each.wait.age_s for each in [edge, *edges]),
        time_s=graph.time_s,
        due_in_s=due_in_s,
        due_to=due_to,
        group=wait.group,
        axes=group.axes if group else (),
        members=group.ranks if group else (),
        op=wait.what,
        seq=wait.seq,
        arrived=tuple(each for each in arrived if each not in missing),
        missing=tuple(missing),
        parties=(*first, *parties),
        links=links_of(edges) if kind in ("different-order", "wait-cycle") else (),
        advice=advice or ADVICE[kind],
        notes=notes_of(graph),
    )


def _due(
    graph: WaitGraph, kind: VerdictKind, edges: Sequence[Edge], edge: Edge, missing: Sequence[str]
) -> tuple[float | None, str]:
    """Return when a wait is due: a cycle's by its first timeout, another by its own, or later where declared."""
    if kind in ("different-order", "wait-cycle"):
        known = [found for each in edges if (found := due(each.wait, each.group))[0] is not None]
        return min(known, default=due(edge.wait, edge.group), key=lambda found: found[0] or 0.0)
    own = due(edge.wait, edge.group)
    declared = [
        due(wait, None)
        for name in missing
        for wait in (graph.by_name[name].waits if name in graph.by_name else ())
        if wait.kind == "declared" and wait.deadline_s is not None
    ]
    return own if own[0] is None else max([own, *declared], key=lambda found: found[0] or 0.0)


def due(wait: Wait, group: GroupSnapshot | None) -> tuple[float | None, str]:
    """Return when the timeout of what is waited in is over, in seconds from now, and whose timeout it is."""
    if wait.kind == "declared":
        return _left_s(wait, wait.deadline_s), f"when the deadline of {wait.what} is over"
    if wait.outside is not None:
        return _left_s(wait, wait.outside.timeout_s), "when its own timeout is over"
    whose = name_of_group(group.name, group.axes) if group and wait.kind in ("collective", "p2p") else wait.what
    own_s = wait.timeout_s if wait.timeout_s is not None or group is None else group.timeout_s
    return _left_s(wait, own_s), f"when the timeout of {whose} is over"


def _left_s(wait: Wait, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s - wait.age_s
