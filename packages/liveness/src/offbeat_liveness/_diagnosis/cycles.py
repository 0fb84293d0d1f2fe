"""Circles in the wait-for graph. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from offbeat_liveness._diagnosis.graph import Edge

MAX_STARTS: Final = 16
Node = tuple[str, str]
Steps = dict[Node, list[tuple[Node, Edge]]]


def find_cycle(edges: Sequence[Edge], *, of_threads: bool = False) -> list[Edge]:
    """A cycle among some edges, [] if there is none: the shortest of those that pass one found first.

    Args:
        edges: of the graph.
        of_threads: follow an edge only to the thread that has to act, where that is known: two threads of one process
            may each wait for something that the other side's other thread will do.
    """
    steps = _steps(edges, of_threads=of_threads)
    cycles = [_way_back(node, steps) for node in _walk_in_circle(steps)[:MAX_STARTS]]
    return min(cycles, key=len, default=[])


def _steps(edges: Sequence[Edge], *, of_threads: bool) -> Steps:
    """Where each process, or thread, that waits leads to among those that wait."""
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
    """Nodes on some cycle; found by walking on until a node comes again, and leaving nodes that lead nowhere."""
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
    """The shortest way from a node to itself, breadth first."""
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
