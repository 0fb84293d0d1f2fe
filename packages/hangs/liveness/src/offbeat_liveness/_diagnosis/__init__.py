"""From what all processes say to one verdict. Pure: no clock, no torch, no sockets."""

from offbeat_liveness._diagnosis.endings import Ending, how_it_ended, is_over
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.proofs import find_proof
from offbeat_liveness._diagnosis.suspicions import find_blocked_loop, find_standstill, find_suspicion
from offbeat_liveness._diagnosis.verdict import Verdict

__all__ = ["Ending", "find_verdict", "how_it_ended", "is_over"]


def find_verdict(graph: WaitGraph) -> Verdict | None:
    """Return the one verdict that explains the longest stall; None while no wait has lasted too long."""
    if not graph.stalled:
        return find_standstill(graph)
    edges = graph.reach(head.name for head, _ in graph.stalled)
    return find_proof(graph, edges) or find_blocked_loop(graph) or find_suspicion(graph, edges)
