"""The one call: nodes and groups in, a checked plan or one error out."""

from collections.abc import Sequence

from offbeat_placement._allocate import Part, allocate
from offbeat_placement._check import check_plan
from offbeat_placement._groups import Allocation, RankGroup
from offbeat_placement._nodes import Node, sort_nodes
from offbeat_placement._plan import Plan
from offbeat_placement._planner import find_plan
from offbeat_placement._shortfall import allocation_error, misfit_error


def plan_placement(nodes: Sequence[Node], groups: Sequence[RankGroup], allocation: Allocation | None = None) -> Plan:
    """Give every rank its node and device.

    A tensor-parallel stage lies on one node; ranks go in (node, device) order; the driver of a replica is on the node
    of its rank 0; groups share devices only where they are asked to.

    Args:
        nodes: what is free, in any order: the plan is the same.
        groups: wanted; earlier ones take earlier nodes where there is a choice.
        allocation: the part of the cluster to use; None: all of it.

    Raises:
        PlacementError: it does not fit, with the shortfall of each node and the smallest changes that would fit.
        ConfigError: nodes or groups that contradict themselves.
    """
    nodes = sort_nodes(nodes)
    part = allocate(nodes, allocation, groups) if allocation is not None else Part(list(nodes))
    if part is None:
        assert allocation is not None  # only an allocation can fail
        raise allocation_error(nodes, groups, allocation)
    outcome = find_plan(part.nodes, groups)
    if outcome.plan is None:
        raise misfit_error(part.nodes, groups, proven=outcome.proven and part.proven)
    check_plan(outcome.plan, part.nodes, groups)
    return outcome.plan
