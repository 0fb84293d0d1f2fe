"""Fills in what every verdict has: who takes part, where each stands, and when a suspicion is acted upon. Pure."""

from collections.abc import Iterable, Sequence

from offbeat_liveness._diagnosis.graph import Edge, Scene
from offbeat_liveness._diagnosis.verdict import Certainty, Party, Verdict, VerdictKind, name_of_group
from offbeat_liveness._diagnosis.wording import companions, in_order, links_of, notes_of, party_of
from offbeat_liveness._process.head import GroupHead, Wait


def build_verdict(
    scene: Scene,
    kind: VerdictKind,
    headline: str,
    edges: Sequence[Edge],
    edge: Edge,
    *,
    certainty: Certainty = "suspicion",
    fate: str = "",
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
        edges: the part of the graph that matters.
        edge: the one that tells the group, the operation and who waits.
        certainty: whether it is proved.
        fate: of a dead peer.
        missing: names that are waited for.
        first: parties to tell first, made by the caller.
        advice: of the verdict.
        involved: names to tell beyond those of `edge`.
        everybody: tell of all processes.
    """
    group, wait = edge.group, edge.wait
    arrived = in_order({*companions(scene, edge), edge.waiter} - set(missing))
    told = {party.name for party in first}
    names = in_order({*missing, *involved, *({edge.target} - {""})}) + arrived
    names += [head.name for head in scene.heads if everybody]
    parties = [
        party_of(scene, scene.head_by_name[name], wait if name in arrived else None, edge.thread)
        for name in dict.fromkeys(names)
        if name not in told and name in scene.head_by_name
    ]
    due_in_s, due_to = _due(scene, kind, edges, edge, missing)
    return Verdict(
        kind=kind,
        certainty=certainty,
        fate=fate,
        headline=headline,
        stalled_s=max(each.wait.age_s for each in [edge, *edges]),
        time_s=scene.time_s,
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
        advice=advice,
        notes=notes_of(scene),
    )


def _due(
    scene: Scene, kind: VerdictKind, edges: Sequence[Edge], edge: Edge, missing: Sequence[str]
) -> tuple[float | None, str]:
    """Of a circle the first timeout in it; of another wait its own, or later where the missing one has declared so."""
    if kind in ("different-order", "wait-cycle"):
        known = [found for each in edges if (found := due(each.wait, each.group))[0] is not None]
        return min(known, default=due(edge.wait, edge.group), key=lambda found: found[0] or 0.0)
    own = due(edge.wait, edge.group)
    declared = [
        due(wait, None)
        for name in missing
        for wait in (scene.head_by_name[name].waits if name in scene.head_by_name else ())
        if wait.kind == "declared" and wait.deadline_s is not None
    ]
    return own if own[0] is None else max([own, *declared], key=lambda found: found[0] or 0.0)


def due(wait: Wait, group: GroupHead | None) -> tuple[float | None, str]:
    """When the timeout of what is waited in is over, in seconds from now, and whose timeout it is."""
    if wait.kind == "declared":
        return _left(wait, wait.deadline_s), f"when the deadline of {wait.what} is over"
    if wait.outside is not None:
        return _left(wait, wait.outside.timeout_s), "when its own timeout is over"
    whose = name_of_group(group.name, group.axes) if group and wait.kind in ("collective", "p2p") else wait.what
    own_s = wait.timeout_s if wait.timeout_s is not None or group is None else group.timeout_s
    return _left(wait, own_s), f"when the timeout of {whose} is over"


def _left(wait: Wait, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s - wait.age_s
