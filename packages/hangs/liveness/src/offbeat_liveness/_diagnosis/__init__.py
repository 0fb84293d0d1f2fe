"""From what all processes say to one verdict. Pure: no clock, no torch, no sockets."""

from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.proofs import find_proof
from offbeat_liveness._diagnosis.suspicions import find_blocked_loop, find_standstill, find_suspicion
from offbeat_liveness._diagnosis.verdict import Verdict


def find_verdict(graph: WaitGraph) -> Verdict | None:
    """The one verdict that explains the longest stall; None while no wait has lasted too long."""
    if not graph.stalled:
        return find_standstill(graph)
    edges = graph.reach(head.name for head, _ in graph.stalled)
    return find_proof(graph, edges) or find_blocked_loop(graph) or find_suspicion(graph, edges)


def is_over(graph: WaitGraph, verdict: Verdict) -> bool:
    """Whether those who waited have been heard, and wait no more: a look that finds nothing may have missed them."""
    place = (verdict.op, verdict.group, verdict.seq)
    heads = [head for head in graph.heads if head.name in verdict.arrived]
    waits = [wait for head in heads for wait in head.waits if (wait.what, wait.group, wait.seq) == place]
    is_heard = not heads or any(head.is_heard for head in heads)
    return is_heard and all(wait.age_s < graph.stall_after_s for wait in waits)
