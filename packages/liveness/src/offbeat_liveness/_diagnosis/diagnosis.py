"""From the wait-for graph to one verdict. Pure, like the graph."""

from collections.abc import Iterable, Sequence

from offbeat_liveness._diagnosis.failure import NEVER_CAME, find_failure, first_fate
from offbeat_liveness._diagnosis.graph import (
    COMPUTE_PATIENCE,
    Edge,
    Scene,
    find_cycle,
)
from offbeat_liveness._diagnosis.verdict import Party, Verdict, VerdictKind, join_names, name_of_group
from offbeat_liveness._diagnosis.wording import (
    ADVICE,
    FATES,
    absent_party,
    advice_for,
    are,
    call_text,
    companions,
    fate_text,
    group_of,
    in_order,
    links_of,
    name_order,
    notes_of,
    party_of,
    same_call,
    votes,
    waiters,
)
from offbeat_liveness._process.head import Head, Wait


def find_verdict(scene: Scene) -> Verdict | None:
    """The one verdict that explains the longest stall; None while no wait has lasted too long."""
    if not scene.stalled:
        return None
    edges = scene.reach(head.name for head, _ in scene.stalled)
    found = _failure(scene) or _absence(scene, edges) or _mismatch(scene, edges) or _cycle(scene, edges)
    if found is not None:
        return found
    waiting = {edge.waiter for edge in edges}
    ends = [edge for edge in edges if edge.target not in waiting and edge.target in scene.head_by_name]
    return (_idle_end(scene, edges, ends) if ends else None) or _no_end(scene)


def _failure(scene: Scene) -> Verdict | None:
    """Somebody is on its way out with an exception, and others depend on it."""
    return find_failure(scene) if any(head.state == "failed" for head in scene.heads) else None


def _absence(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Somebody in the way is not there at all."""
    reached = {edge.target: edge for edge in edges}
    gone = [each for each in scene.absent if each.name in reached]
    strangers = [edge for edge in edges if edge.target not in scene.head_by_name | scene.absent_by_name]
    if not gone and not strangers:
        return None
    dead = [each for each in gone if each.fate not in NEVER_CAME]
    if dead:
        first = first_fate(dead)
        edge = reached[first[0].name]
        headline = f"{fate_text(first)}; {waiters(scene, edge)} in {call_text(edge.wait, edge.group)}"
        return _verdict(
            scene, "dead-peer", headline, edges, edge, missing=[each.name for each in first],
            first=[absent_party(each) for each in first], advice=advice_for(first[0], scene),
        )  # fmt: skip
    if strangers and strangers[0].reason == "producer":
        edge = strangers[0]
        headline = f"{edge.waiter} waits in {edge.wait.what} for {edge.target!r}; nothing of that name is watched"
        advice = f"start {edge.target!r} and let it call liveness.watch(name=...), or correct on={edge.wait.on!r}"
        return _verdict(scene, "starved", headline, edges, edge, missing=[edge.target], advice=advice)
    names = list(dict.fromkeys([each.name for each in gone] + [edge.target for edge in strangers]))
    edge = reached[names[0]]
    fate = gone[0].fate if gone else "never-came"
    headline = f"{are(names, FATES[fate])}; {waiters(scene, edge)} in {call_text(edge.wait, edge.group)}"
    return _verdict(scene, "missing-member", headline, edges, edge, missing=names, advice=ADVICE[fate])


def _mismatch(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Members that stand at one place of the sequence with different calls; the earliest such place."""
    unlike = [edge for edge in edges if edge.reason in ("other-op", "other-shape") and edge.mine and edge.theirs]
    if not unlike:
        return _mismatched_root(scene, edges)
    edge = min(unlike, key=lambda each: (each.wait.seq, each.reason))
    assert edge.group is not None
    kind: VerdictKind = "different-op" if edge.reason == "other-op" else "shape-mismatch"
    where = name_of_group(edge.group.name, edge.group.axes)
    headline = f"collective {edge.wait.seq} of {where} is {votes(scene, edge)}"
    involved = {name for each in unlike if each.group == edge.group for name in (each.waiter, each.target)}
    return _verdict(scene, kind, headline, edges, edge, advice=ADVICE[kind], involved=involved)


def _mismatched_root(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Members that name different roots for one collective; told by their stacks: no recorder has roots."""
    for head, wait in scene.stalled:
        others = [
            (other, each)
            for other in scene.heads
            for each in other.waits
            if wait.root is not None
            and each.root is not None
            and (each.group, each.seq) == (wait.group, wait.seq)
            and each.root != wait.root
            and wait.kind == each.kind == "collective"
        ]
        if others:
            other, theirs = others[0]
            headline = f"{wait.what} has root {wait.root} on {head.name} and root {theirs.root} on {other.name}"
            edge = Edge(waiter=head.name, target=other.name, wait=wait, reason="other-op", group=group_of(head, wait))
            advice = "give one root to all members; in a sub-group it is a global rank: dist.get_global_rank(group, 0)"
            return _verdict(scene, "different-op", headline, [*edges, edge], edge, advice=advice)
    return None


def _cycle(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Processes that wait for each other in a circle."""
    cycle = find_cycle(edges)
    if not cycle:
        return None
    collectives_only = all(edge.wait.kind == "collective" for edge in cycle)
    kind: VerdictKind = "different-order" if collectives_only else "wait-cycle"
    steps = "; ".join(
        f"{edge.waiter} waits for {edge.target} in {call_text(edge.wait, edge.group)}" for edge in cycle[:4]
    )
    involved = {edge.waiter for edge in cycle}
    first = max(cycle, key=lambda edge: edge.wait.age_s)
    missing = in_order(scene.awaited(first))
    return _verdict(scene, kind, steps, cycle, first, missing=missing, advice=ADVICE[kind], involved=involved)


def _idle_end(scene: Scene, edges: Sequence[Edge], ends: Sequence[Edge]) -> Verdict | None:
    """Somebody in the way stands in no wait: idle, or slow (which may be as it should be: then no verdict)."""
    quiet = [edge for edge in ends if not scene.is_moving(scene.head_by_name[edge.target])]
    if not quiet:
        return _straggler(scene, edges, ends)
    edge = max(quiet, key=lambda each: each.wait.age_s)
    idle = {each.target for each in quiet if each.wait.what == edge.wait.what}
    awaited = scene.awaited(edge)
    idle |= {name for name in awaited if name in scene.head_by_name and _is_idle(scene, scene.head_by_name[name])}
    names = in_order(idle)
    if edge.wait.kind == "declared":
        headline = f"{waiters(scene, edge)} in {edge.wait.what}; {are(names, 'idle')}"
        return _verdict(scene, "starved", headline, edges, edge, missing=names, advice=ADVICE["starved"])
    headline = f"{join_names(names)} never came to {call_text(edge.wait, edge.group)}; {waiters(scene, edge)} in it"
    return _verdict(scene, "missing-member", headline, edges, edge, missing=names, advice=ADVICE["missing-member"])


def _is_idle(scene: Scene, head: Head) -> bool:
    return not head.waits and not scene.is_moving(head)


def _straggler(scene: Scene, edges: Sequence[Edge], ends: Sequence[Edge]) -> Verdict | None:
    """Slow but moving. A declared wait may last as long as its deadline says while its producer moves."""
    late = [edge for edge in ends if edge.wait.age_s >= _patience_s(scene, edge.wait)]
    if not late:
        return None
    edge = max(late, key=lambda each: each.wait.age_s)
    names = sorted({each.target for each in late}, key=name_order)
    headline = f"{are(names, 'slow, and moving')}; {waiters(scene, edge)} in {call_text(edge.wait, edge.group)}"
    return _verdict(scene, "straggler", headline, edges, edge, missing=names, advice=ADVICE["straggler"])


def _no_end(scene: Scene) -> Verdict | None:
    """Stalled waits that lead nowhere: nobody is missing, or nobody knows who should act."""
    leading = {(edge.waiter, edge.wait) for edge in scene.edges}
    for head, wait in scene.stalled:
        if (head.name, wait) not in leading:
            edge = Edge(waiter=head.name, target="", wait=wait, reason="nobody", group=group_of(head, wait))
            unsure = wait.kind in ("store", "declared")
            found = _nobodys_turn(scene, head, edge) if unsure else _unending(scene, edge)
            if found is not None:
                return found
    return None


def _nobodys_turn(scene: Scene, head: Head, edge: Edge) -> Verdict | None:
    """A wait that does not name who has to act: whoever moves may be about to."""
    wait = edge.wait
    what = (
        f"key {wait.on!r}, which nobody has set" if wait.kind == "store" else (wait.on or "a producer it does not name")
    )
    headline = f"{head.name} waits in {wait.what} for {what}"
    moving = [each.name for each in scene.heads if each is not head and scene.is_moving(each)]
    if not moving:
        return _verdict(scene, "starved", headline, [], edge, advice=ADVICE["starved"], everybody=True)
    if wait.age_s < _patience_s(scene, wait):
        return None
    headline += f"; {join_names(moving)} {'moves' if len(moving) == 1 else 'move'}"
    return _verdict(scene, "straggler", headline, [], edge, advice=ADVICE["straggler"], everybody=True)


def _unending(scene: Scene, edge: Edge) -> Verdict | None:
    """A call of torch that everybody is in, and that the last to come has been in for long as well."""
    ages_s = [wait.age_s for head in scene.heads for wait in head.waits if same_call(wait, edge.wait)]
    if min(ages_s) < scene.stall_after_s:
        return None
    swapped = _swapped_queue(scene)
    if swapped:
        headline, edge = swapped
        return _verdict(scene, "different-order", headline, [], edge, advice=ADVICE["different-order"], everybody=True)
    headline = f"{call_text(edge.wait, edge.group)} does not finish, though every member is in it"
    return _verdict(scene, "stuck-call", headline, [], edge, advice=ADVICE["stuck-call"], everybody=True)


def _swapped_queue(scene: Scene) -> tuple[str, Edge] | None:
    """Two members that have queued the same pending collectives of two groups the other way round (nccl streams)."""
    orders = {head.name: _pending_order(head) for head in scene.heads}
    for one, mine in orders.items():
        for other, theirs in orders.items():
            shared = [each for each in mine if each in theirs]
            swapped = shared != [each for each in theirs if each in mine]
            if one < other and swapped:
                head = scene.head_by_name[one]
                wait = next((each for each in head.waits if each.kind == "collective"), None)
                if wait is not None:
                    text = f"{one} has queued {_order_text(shared)}; {other} has queued them in another order"
                    return text, Edge(waiter=one, target=other, wait=wait, reason="nobody", group=group_of(head, wait))
    return None


def _pending_order(head: Head) -> list[tuple[str, tuple[int, ...], int]]:
    pending = [
        (each.created_ns, group.key, each.seq) for group in head.groups for each in group.recent if not each.done
    ]
    return [(key[0], key[1], seq) for _, key, seq in sorted(pending)]


def _order_text(shared: Sequence[tuple[str, tuple[int, ...], int]]) -> str:
    return ", then ".join(f"collective {seq} of group {name!r}" for name, _, seq in shared[:4])


def _verdict(
    scene: Scene,
    kind: VerdictKind,
    headline: str,
    edges: Sequence[Edge],
    edge: Edge,
    *,
    missing: Sequence[str] = (),
    first: Sequence[Party] = (),
    advice: str,
    involved: Iterable[str] = (),
    everybody: bool = False,
) -> Verdict:
    """Fill in what every kind of verdict has.

    Args:
        scene: all that is known.
        kind: of the verdict.
        headline: of the verdict.
        advice: of the verdict.
        edges: the part of the graph that matters.
        edge: the one that tells the group, the operation and who waits.
        missing: names that are waited for.
        first: parties to tell first, made by the caller.
        involved: names to tell beyond those of `edge`.
        everybody: tell of all processes.
    """
    group, wait = edge.group, edge.wait
    arrived = in_order({*companions(scene, edge), edge.waiter} - set(missing))
    told = {party.name for party in first}
    names = in_order({*missing, *involved, *({edge.target} - {""})}) + arrived
    names += [head.name for head in scene.heads if everybody]
    parties = [
        party_of(scene, scene.head_by_name[name], wait if name in arrived else None)
        for name in dict.fromkeys(names)
        if name not in told and name in scene.head_by_name
    ]
    return Verdict(
        kind=kind,
        headline=headline,
        stalled_s=max(each.wait.age_s for each in [edge, *edges]),
        time_s=scene.time_s,
        group=wait.group,
        axes=group.axes if group else (),
        members=group.ranks if group else (),
        op=wait.what,
        seq=wait.seq,
        arrived=tuple(each for each in arrived if each not in missing),
        missing=tuple(missing),
        parties=(*first, *parties),
        links=links_of(edges) if kind in ("different-order", "wait-cycle") else (),
        advice=advice,
        notes=notes_of(scene),
    )


def _patience_s(scene: Scene, wait: Wait) -> float:
    if wait.kind != "declared":
        return scene.stall_after_s
    return max(wait.deadline_s or COMPUTE_PATIENCE * scene.stall_after_s, scene.stall_after_s)
