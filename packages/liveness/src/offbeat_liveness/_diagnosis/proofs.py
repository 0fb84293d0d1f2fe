"""What cannot clear by waiting, whatever anybody does. Pure.

There are four kinds, and only these end a run before the timeout of what is waited in:

- a member is dead: its process has ended, or an exception is ending it, while others are in a wait for it;
- members have issued different operations, shapes or roots at one place of one group's sequence;
- a cycle of waits: everybody in it was heard, stands without a deadline of its own, and the thread that would have to
  act is the one that stands;
- a member has left for good: it has destroyed the group, or ended in order, and others are in a wait for it.
"""

from collections.abc import Sequence

from offbeat_liveness._diagnosis.build import build_verdict
from offbeat_liveness._diagnosis.cycles import find_cycle
from offbeat_liveness._diagnosis.failure import find_failure, first_fate
from offbeat_liveness._diagnosis.graph import ENDED, Edge, Scene
from offbeat_liveness._diagnosis.verdict import Verdict, VerdictKind, join_names, name_of_group
from offbeat_liveness._diagnosis.wording import (
    ADVICE,
    absent_party,
    advice_for,
    call_text,
    cycle_text,
    fate_text,
    group_of,
    in_order,
    name_order,
    votes,
    waiters,
)


def find_proof(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """The proof that explains a stall, None if there is none."""
    failed = any(head.state == "failed" for head in scene.heads)
    return (
        (find_failure(scene) if failed else None)
        or _ended(scene, edges)
        or _left_the_group(scene, edges)
        or _mismatch(scene, edges)
        or _other_root(scene, edges)
        or _cycle(scene, edges)
    )


def _ended(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """A process that others wait for has ended."""
    reached = {edge.target: edge for edge in edges if edge.is_binding and edge.target in scene.absent_by_name}
    ended = [each for each in scene.absent if each.name in reached and each.fate in ENDED]
    if not ended:
        return None
    first = first_fate(ended)
    edge = reached[first[0].name]
    return build_verdict(
        scene, "dead-peer", f"{fate_text(first)}; {waiters(scene, edge)} in {call_text(edge.wait, edge.group)}",
        edges, edge, certainty="proof", fate=first[0].fate, missing=[each.name for each in first],
        first=[absent_party(each) for each in first], advice=advice_for(first[0], scene),
    )  # fmt: skip


def _left_the_group(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """A process that others wait for runs, but has destroyed the group."""
    left = [edge for edge in edges if edge.reason == "left" and edge.is_binding and edge.target in scene.head_by_name]
    if not left:
        return None
    edge = max(left, key=lambda each: each.wait.age_s)
    names = in_order({each.target for each in left if each.wait.group == edge.wait.group})
    has = "has" if len(names) == 1 else "have"
    headline = f"{join_names(names)} {has} left the group (destroy_process_group); {waiters(scene, edge)} in "
    headline += call_text(edge.wait, edge.group)
    return build_verdict(
        scene, "dead-peer", headline, edges, edge, certainty="proof", missing=names, advice=ADVICE["left"]
    )


def _mismatch(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Members that stand at one place of the sequence with different calls; the earliest such place."""
    unlike = [edge for edge in edges if edge.reason in ("other-op", "other-shape") and edge.mine and edge.theirs]
    if not unlike:
        return None
    edge = min(unlike, key=lambda each: (each.wait.seq, each.reason))
    assert edge.group is not None
    kind: VerdictKind = "different-op" if edge.reason == "other-op" else "shape-mismatch"
    where = name_of_group(edge.group.name, edge.group.axes)
    headline = f"collective {edge.wait.seq} of {where} is {votes(scene, edge)}"
    involved = {name for each in unlike if each.group == edge.group for name in (each.waiter, each.target)}
    return build_verdict(scene, kind, headline, edges, edge, certainty="proof", advice=ADVICE[kind], involved=involved)


def _other_root(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Members that name different roots for one collective; told by their stacks: no recorder has roots."""
    for head, wait in scene.stalled:
        others = [
            (other, each)
            for other in scene.heads
            for each in other.waits
            if wait.root is not None
            and each.root is not None
            and wait.seq > 0  # else nothing tells that it is the same call
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
                scene, "different-op", headline, [*edges, edge], edge, certainty="proof", advice=advice
            )
    return None


def _cycle(scene: Scene, edges: Sequence[Edge]) -> Verdict | None:
    """Threads that wait for each other in a circle, each for the very one that has to act."""
    cycle = find_cycle([edge for edge in edges if edge.is_binding], of_threads=True)
    if not cycle or not all(_is_held(scene, edge, cycle[(place + 1) % len(cycle)]) for place, edge in enumerate(cycle)):
        return None
    return cycle_verdict(scene, cycle, is_proof=True)


def _is_held(scene: Scene, edge: Edge, following: Edge) -> bool:
    """Whether nobody but the thread that stands in the next wait of the cycle could do what an edge waits for."""
    head = scene.head_by_name[edge.target]
    return edge.actor == following.wait.thread or not head.free_threads


def cycle_verdict(scene: Scene, cycle: Sequence[Edge], *, is_proof: bool) -> Verdict:
    """What a cycle of waits is called, and who is in it; told from its lowest member on."""
    start = min(range(len(cycle)), key=lambda place: name_order(cycle[place].waiter))
    cycle = [*cycle[start:], *cycle[:start]]
    kinds, calls = {edge.wait.kind for edge in cycle}, {edge.wait.what for edge in cycle}
    kind: VerdictKind = "different-order" if kinds == {"collective"} else "wait-cycle"
    if kinds == {"rendezvous"} and len(calls) == 1:
        kind = "different-op"  # such as new_group with other ranks
    return build_verdict(
        scene, kind, cycle_text(cycle), cycle, cycle[0], certainty="proof" if is_proof else "suspicion",
        missing=in_order(scene.awaited(cycle[0])), advice=ADVICE[kind], involved={edge.waiter for edge in cycle},
    )  # fmt: skip
