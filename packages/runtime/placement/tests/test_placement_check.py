"""`check_plan` names each broken promise of a plan that another planner has made."""

import dataclasses

import pytest

from offbeat_core import PlacementError
from offbeat_placement import Node, PlacedDriver, Plan, RankGroup, check_plan, plan_placement


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


SCORERS = RankGroup(role="scorer", num_replicas=2, accelerator="", cpus_per_rank=1)


def changed(plan, role, number, **changes):
    """The plan with one rank otherwise."""
    ranks = [
        dataclasses.replace(each, **changes) if (each.role, each.rank) == (role, number) else each
        for each in plan.ranks
    ]
    return dataclasses.replace(plan, ranks=tuple(ranks))


def swapped(plan):
    """The plan with the devices of the first two ranks, and of the two after them, the other way round."""
    places = [2, 3, 0, 1]
    for rank, device in enumerate(places):
        plan = changed(plan, "rollout", rank, device=device)
    return plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: changed(plan, "rollout", 2, replica=0), "rollout rank 2 belongs to replica 1"),
        (
            lambda plan: changed(changed(plan, "rollout", 2, device=3), "rollout", 3, device=2),
            "rollout ranks 2 to 3 are not in the order of node and device",
        ),
        (swapped, "rollout: its tensor-parallel groups are not in the order of node and device"),
        (lambda plan: changed(plan, "scorer", 1, device=0), "scorer rank 1 needs no device and has 0 on node-0"),
        (lambda plan: changed(plan, "rollout", 0, device=None), "rollout rank 0: GPU None of node-0 is not free"),
        (lambda plan: changed(plan, "scorer", 1, rank=0), "scorer: needs ranks 0 to 1, each once, and has 2"),
        (
            lambda plan: dataclasses.replace(
                plan, ranks=(*plan.ranks, dataclasses.replace(plan.ranks[0], role="teacher"))
            ),
            "no such group: teacher",
        ),
    ],
)
def test_each_rank_is_who_it_should_be_where_it_should_be(change, words):
    nodes, groups = nodes_of(1, num_cpus=8), [engines(num_replicas=2, tensor_parallel=2), SCORERS]
    plan = plan_placement(nodes, groups)
    check_plan(plan, nodes, groups)
    with pytest.raises(PlacementError, match=words):
        check_plan(change(plan), nodes, groups)
