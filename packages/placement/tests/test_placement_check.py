"""`check_plan` names each broken promise of a plan that another planner has made."""

import dataclasses

import pytest

from offbeat_placement import Node, PlacedDriver, Plan, RankGroup, check_plan, plan_placement
from offbeat_types import PlacementError


def nodes_of(num_nodes, *, devices=4, **more):
    return [Node(name=f"node-{n}", free={"GPU": tuple(range(devices))}, **more) for n in range(num_nodes)]


def engines(num_replicas=1, tensor_parallel=4, **more):
    return RankGroup(role="rollout", num_replicas=num_replicas, tensor_parallel=tensor_parallel, **more)


def test_a_group_over_several_nodes_takes_each_whole():
    nodes, groups = nodes_of(3), [engines(tensor_parallel=8, spans_nodes=True)]
    plan = plan_placement(nodes, groups)
    check_plan(plan, nodes, groups)
    ranks = [dataclasses.replace(rank, node="node-2", device=0) if rank.rank == 7 else rank for rank in plan.ranks]
    with pytest.raises(PlacementError, match="must take each whole: 4 on node-0, 3 on node-1, 1 on node-2"):
        check_plan(dataclasses.replace(plan, ranks=tuple(ranks)), nodes, groups)


@pytest.mark.parametrize("second", ["node-0", "node-1"])
def test_a_replica_has_one_driver(second):
    nodes, groups = nodes_of(2), [engines()]
    plan = plan_placement(nodes, groups)
    drivers = (*plan.drivers, PlacedDriver(role="rollout", replica=0, node=second))
    with pytest.raises(PlacementError, match="rollout replica 0: its one driver must be on node-0, with its rank 0"):
        check_plan(Plan(ranks=plan.ranks, drivers=drivers), nodes, groups)


def test_ranks_need_no_more_memory_than_their_node_has_free():
    group = engines(memory_bytes_per_rank=2**30)
    plan = plan_placement(nodes_of(1, memory_bytes=4 * 2**30), [group])
    check_plan(plan, nodes_of(1, memory_bytes=4 * 2**30), [group])
    with pytest.raises(
        PlacementError, match="node-0: its ranks need 4294967296 bytes of memory and 4294967295 are free"
    ):
        check_plan(plan, nodes_of(1, memory_bytes=4 * 2**30 - 1), [group])
