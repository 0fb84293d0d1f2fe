"""From what all processes say to one verdict. Pure: no clock, no torch, no sockets."""

from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.proofs import find_proof
from offbeat_liveness._diagnosis.suspicions import find_standstill, find_suspicion
from offbeat_liveness._diagnosis.verdict import Verdict


def find_verdict(scene: WaitGraph) -> Verdict | None:
    """The one verdict that explains the longest stall; None while no wait has lasted too long."""
    if not scene.stalled:
        return find_standstill(scene)
    edges = scene.reach(head.name for head, _ in scene.stalled)
    return find_proof(scene, edges) or find_suspicion(scene, edges)


def is_over(scene: WaitGraph, verdict: Verdict) -> bool:
    """Whether those who waited have been heard, and wait no more: a look that finds nothing may have missed them."""
    place = (verdict.op, verdict.group, verdict.seq)
    heads = [head for head in scene.heads if head.name in verdict.arrived]
    waits = [wait for head in heads for wait in head.waits if (wait.what, wait.group, wait.seq) == place]
    is_heard = not heads or any(head.is_heard for head in heads)
    return is_heard and all(wait.age_s < scene.stall_after_s for wait in waits)
