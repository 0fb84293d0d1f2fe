"""Plans of incidents C and D, and what is said when there is none."""

import json
import math
import random

import pytest

from offbeat_core import ConfigError, PlacementError, RoleName
from offbeat_placement import (
    Allocation,
    ClusterView,
    Node,
    PlacedRank,
    RankGroup,
    ResourceRequest,
    draw_plan,
    fit_settings,
    grid_nodes,
    local_node,
    plan_blocks,
    plan_placement,
    read_nodes,
    verify_placed,
)
from offbeat_placement._shortfall import suggest_changes


def trainer(num_ranks, **more):
    return RankGroup(role="trainer", num_replicas=num_ranks, **more)


def rollout(num_engines, tp, **more):
    return RankGroup(
        role="rollout",
        num_replicas=num_engines,
        tensor_parallel=tp,
        process_per_replica=True,
        **more,
    )


def partly_free(*free, total=8):
    return [
        Node(name=f"node-{number}", free={"GPU": tuple(range(total - each, total))}, total={"GPU": total})
        for number, each in enumerate(free)
    ]


def nodes_of(plan, role):
    """Nodes of each replica."""
    num_replicas = 1 + max(rank.replica for rank in plan.ranks if rank.role == role)
    return [{rank.node for rank in plan.replica(role, replica)} for replica in range(num_replicas)]


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("colocated", [False, True], ids=["split", "colocated"])
def test_no_engine_straddles_nodes(num_nodes, tp, colocated):
    nodes = grid_nodes(num_nodes, 8)
    num_ranks = 8 * num_nodes if colocated else 8
    num_engines = 8 * (num_nodes - (0 if colocated else 1)) // tp
    groups = [trainer(num_ranks), rollout(num_engines, tp, shares_devices_with="trainer" if colocated else "")]
    plan = plan_placement(nodes, groups)
    assert all(len(each) == 1 for each in nodes_of(plan, "rollout"))
    used = [(rank.node, rank.device) for rank in plan.ranks]
    assert len(set(used)) == (num_ranks if colocated else len(used))
    for engine in range(num_engines):
        devices = [rank.device for rank in plan.replica("rollout", engine)]
        assert devices == list(range(devices[0] or 0, (devices[0] or 0) + tp))
        assert (devices[0] or 0) % tp == 0, "a group of 4 on devices 1 to 4 crosses what the hardware pairs"


@pytest.mark.parametrize("num_bundles", [17, 24, 32, 64])
def test_no_engine_straddles_nodes_that_others_use_too(num_bundles):
    # The numbers of bundles at which a cluster's own order scrambles, on nodes that are taken in part at random.
    rng = random.Random(num_bundles)
    for _ in range(20):
        free = [8, *(rng.randint(0, 8) for _ in range(num_bundles // 3))]
        nodes = partly_free(*free)
        for tp in (2, 4):
            fitting = sum(each // tp for each in free)
            plan = plan_placement(nodes, [rollout(fitting, tp)])
            assert all(len(each) == 1 for each in nodes_of(plan, "rollout"))
            with pytest.raises(PlacementError):
                plan_placement(nodes, [rollout(fitting + 1, tp)])


def test_six_and_two_free_hold_no_group_of_eight():
    with pytest.raises(PlacementError) as caught:
        plan_placement(partly_free(6, 2), [rollout(1, 8)])
    text = str(caught.value)
    assert "8 GPU wanted, 8 free, but not in such pieces" in text
    assert "node-0: 6 of 8 GPU free; room for 0 × rollout of 8, 2 short of one more" in text
    assert "node-1: 2 of 8 GPU free; room for 0 × rollout of 8, 6 short of one more" in text
    assert "rollout.tensor_parallel 8 -> 2, rollout.num_replicas 1 -> 4" in text
    assert "1 more node with 8 GPU free" in text


@pytest.mark.parametrize("lacking", range(1, 10))
def test_no_more_nodes_are_asked_for_than_it_takes(lacking):
    with pytest.raises(PlacementError, match=rf"or {lacking} more nodes? with 8 GPU free"):
        plan_placement(grid_nodes(1, 8), [rollout(1 + lacking, 8)])


def test_cpus_and_memory_that_are_short_are_named_and_not_the_devices():
    node = Node(name="node-0", free={"GPU": tuple(range(8))}, num_cpus=8, memory_bytes=64 * 2**30)
    with pytest.raises(PlacementError) as caught:
        plan_placement([node], [rollout(4, 1, cpus_per_rank=4)])
    assert "4 GPU wanted, 8 free; 16 CPUs wanted, 8 free" in str(caught.value)
    assert "in such pieces" not in str(caught.value)
    with pytest.raises(PlacementError) as caught:
        plan_placement([node], [rollout(4, 1, memory_bytes_per_rank=24 * 2**30)])
    assert "4 GPU wanted, 8 free; 96 GiB of memory wanted, 64 GiB free" in str(caught.value)
    assert "in such pieces" not in str(caught.value)


def test_a_group_wider_than_a_node_takes_whole_nodes_and_only_when_asked_to():
    nodes = [*grid_nodes(3, 8), Node(name="node-9", free={"GPU": tuple(range(7))}, total={"GPU": 8})]
    with pytest.raises(PlacementError, match=r"rollout\.spans_nodes False -> True"):
        plan_placement(nodes, [rollout(1, 16)])
    plan = plan_placement(nodes, [trainer(7), rollout(1, 16, spans_nodes=True)])
    assert nodes_of(plan, "rollout") == [{"node-1", "node-2"}]
    [wide] = [plan.replica("rollout", 0)]
    assert [(rank.node, rank.device) for rank in wide] == sorted((rank.node, rank.device) for rank in wide)
    with pytest.raises(PlacementError):  # node-9 is not free as a whole
        plan_placement(nodes, [trainer(8), rollout(1, 24, spans_nodes=True)])


def test_wide_groups_take_nodes_of_one_size():
    nodes = [Node(name=f"n{n}", free={"GPU": tuple(range(4 if n % 2 else 8))}) for n in range(6)]
    plan = plan_placement(nodes, [rollout(1, 16, spans_nodes=True), RankGroup(role="other", tensor_parallel=8)])
    assert nodes_of(plan, "rollout") == [{"n0", "n2"}]
    assert nodes_of(plan, "other") == [{"n4"}]
    plan = plan_placement(nodes[:5], [rollout(1, 16, spans_nodes=True), trainer(8), rollout(2, 4).__class__(role="x")])
    assert nodes_of(plan, "rollout") == [{"n0", "n2"}]


def test_stages_of_a_pipeline_share_a_node_where_they_can_and_never_straddle():
    together = plan_placement(grid_nodes(2, 8), [rollout(2, 4, pipeline_parallel=2)])
    assert nodes_of(together, "rollout") == [{"node-0"}, {"node-1"}]
    apart = plan_placement(partly_free(4, 4, 4, 4), [rollout(2, 4, pipeline_parallel=2)])
    assert nodes_of(apart, "rollout") == [{"node-0", "node-1"}, {"node-2", "node-3"}]
    for replica in range(2):
        assert [driver.node for driver in apart.drivers][replica] == apart.replica("rollout", replica)[0].node


def test_cpus_and_memory_are_kept_to():
    nodes = [Node(name=f"n{n}", free={"GPU": tuple(range(8))}, num_cpus=16, memory_bytes=2**30) for n in range(2)]
    fitting = [rollout(2, 4, cpus_per_rank=4)]
    assert nodes_of(plan_placement(nodes, fitting), "rollout") == [{"n0"}, {"n1"}]
    with pytest.raises(PlacementError, match=r"rollout.cpus_per_rank 4 -> 2"):
        plan_placement(nodes, [rollout(4, 4, cpus_per_rank=4)])
    with pytest.raises(PlacementError):
        plan_placement(nodes, [rollout(1, 4, memory_bytes_per_rank=2**29)])
    scorer = RankGroup(role="scorer", accelerator="", num_replicas=3, cpus_per_rank=10)
    with pytest.raises(PlacementError, match="scorer"):
        plan_placement(nodes, [scorer])


def test_sixteen_accelerators_on_nodes_of_eight_are_refused_with_the_shape_that_fits():
    groups = [trainer(16)]
    with pytest.raises(PlacementError, match=r"nodes have 8: ask for 2 nodes × 8 \(num_nodes = 2") as caught:
        plan_placement(grid_nodes(4, 8), groups, Allocation(num_nodes=1, accelerators_per_node=16))
    assert "node-0 … node-3 (4): 8 of 8 GPU free, 8 short" in str(caught.value)
    plan = plan_placement(grid_nodes(4, 8), groups, Allocation(num_nodes=2, accelerators_per_node=8))
    assert {rank.node for rank in plan.ranks} == {"node-0", "node-1"}
    both = [trainer(16), rollout(4, 4)]
    [changes] = suggest_changes(grid_nodes(4, 8), both, Allocation(num_nodes=2, accelerators_per_node=16))
    assert [(change.field, change.after) for change in changes] == [("num_nodes", 4), ("accelerators_per_node", 8)]


def test_an_allocation_leaves_the_rest_of_the_cluster_alone():
    plan = plan_placement(grid_nodes(4, 8), [trainer(4)], Allocation(num_nodes=2, accelerators_per_node=2))
    assert [(rank.node, rank.device) for rank in plan.ranks] == [
        ("node-0", 0),
        ("node-0", 1),
        ("node-1", 0),
        ("node-1", 1),
    ]


def test_what_a_cluster_really_did_is_checked():
    nodes, groups = grid_nodes(2, 4), [rollout(2, 4)]
    plan = plan_placement(nodes, groups)
    verify_placed(plan.ranks, plan.drivers, nodes, groups)
    # As with one placement group of eight bundles whose order has been scrambled.
    order = ["node-1", "node-1", "node-1", "node-0", "node-1", "node-0", "node-0", "node-0"]
    scrambled = [
        PlacedRank(role=rank.role, replica=rank.replica, rank=rank.rank, node=node, device=order[:number].count(node))
        for number, (rank, node) in enumerate(zip(plan.ranks, order, strict=True))
    ]
    with pytest.raises(PlacementError, match="straddles 2: 3 on node-1, 1 on node-0"):
        verify_placed(scrambled, plan.drivers, nodes, groups)


def test_blocks_are_what_must_be_reserved_together():
    split = [trainer(12), rollout(2, 2), RankGroup(role="environment", accelerator="", cpus_per_rank=1)]
    blocks = plan_blocks(plan_placement(grid_nodes(2, 8), split), split)
    assert [(block.name, block.node, block.num_devices) for block in blocks] == [
        ("trainer@0", "node-0", 8),
        ("trainer@1", "node-1", 4),
        ("rollout-0", "node-1", 2),
        ("rollout-1", "node-1", 2),
        ("environment-0", "node-0", 0),
    ]
    assert blocks[1].roles == {RoleName("trainer", 8 + n): (n,) for n in range(4)}
    assert blocks[2].roles == {RoleName("rollout"): (0, 1)}
    colocated = [trainer(16), rollout(4, 4, shares_devices_with="trainer")]
    blocks = plan_blocks(plan_placement(grid_nodes(2, 8), colocated), colocated)
    assert [block.num_devices for block in blocks] == [8, 8]
    assert blocks[1].roles[RoleName("rollout", 3)] == (4, 5, 6, 7)
    assert blocks[1].roles[RoleName("trainer", 15)] == (7,)
    wide = [rollout(1, 16, spans_nodes=True)]
    blocks = plan_blocks(plan_placement(grid_nodes(2, 8), wide), wide)
    assert [(block.name, block.roles) for block in blocks] == [
        (f"rollout-0@{n}", {RoleName("rollout"): tuple(range(8))}) for n in range(2)
    ]


def test_a_picture_shows_every_rank_in_its_place():
    groups = [trainer(4), rollout(1, 2), RankGroup(role="environment", accelerator="")]
    nodes = [*grid_nodes(1, 4), Node(name="node-1", free={"GPU": (1, 2, 3)}, total={"GPU": 4}), Node(name="node-2")]
    assert draw_plan(plan_placement(nodes, groups), nodes, groups).splitlines() == [
        "2 of 3 nodes used, 6 of 7 free GPU",
        "GPU     0    1    2    3",
        "node-0  T0   T1   T2   T3",
        "        CPU  E0",
        "node-1  x    R0.0 R0.1 .",
        "node-2",
        "T  trainer: 4 ranks on GPU",
        "R  rollout: 1 replica, each 2 GPU on one node",
        "E  environment: 1 rank on CPUs",
    ]


def test_a_picture_of_many_nodes_stays_narrow_and_short():
    groups = [trainer(256), rollout(64, 4, shares_devices_with="trainer")]
    nodes = [Node(name=f"cluster-machine-{n}", free={"GPU": tuple(range(16))}) for n in range(64)]
    drawn = draw_plan(plan_placement(nodes, groups), nodes, groups)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 20
    assert "14 nodes alike, ranks in order" in drawn
    for last in ("T255", "R63.3"):
        assert last in drawn


def test_nodes_come_from_words_and_files(tmp_path):
    assert [node.num_free("GPU") for node in read_nodes("3x4")] == [4, 4, 4]
    toml = tmp_path / "nodes.toml"
    toml.write_text("""
[[nodes]]
name = "big"
count = 2
accelerators = 8
num_cpus = 96
memory_gib = 512
accelerator_memory_gib = 80
[[nodes]]
name = "small"
accelerators = 4
free = [2, 3]
kind = "XPU"
""")
    nodes = read_nodes(str(toml))
    assert [node.name for node in nodes] == ["big-0", "big-1", "small"]
    assert (nodes[0].memory_bytes, nodes[0].accelerator_memory_bytes) == (512 * 2**30, 80 * 2**30)
    assert (nodes[2].free, nodes[2].num_total("XPU")) == ({"XPU": (2, 3)}, 4)
    as_json = tmp_path / "nodes.json"
    as_json.write_text(json.dumps({"nodes": [{"name": "n10"}, {"name": "n2", "accelerators": 1}]}))
    assert [node.name for node in read_nodes(str(as_json))] == ["n2", "n10"]
    assert local_node().num_cpus >= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[nodes]]\naccelerators = 3", "every node needs a name"),
        ('[[nodes]]\nname = "a"\ngpus = 3', "unknown key gpus"),
        ('[[nodes]]\nname = "a"\naccelerators = "3"', "accelerators cannot be '3'"),
        ('[[nodes]]\nname = "a"\n[[nodes]]\nname = "a"', "two nodes are named 'a'"),
        ('[[nodes]]\nname = "a"\naccelerators = 1\nfree = [1, 2]', "2 GPU cannot be free of 1"),
        ("nodes = 3", r"at least one \[\[nodes\]\]"),
        ("=", "cannot be read"),
    ],
)
def test_a_wrong_file_of_nodes_is_one_clear_error(tmp_path, text, said):
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_nodes(str(path))


def test_groups_that_contradict_themselves_are_refused():
    nodes = grid_nodes(1, 8)
    with pytest.raises(ConfigError, match="every group needs a role of its own"):
        plan_placement(nodes, [trainer(1), trainer(2)])
    with pytest.raises(ConfigError, match="shares devices with 'absent'"):
        plan_placement(nodes, [rollout(1, 1, shares_devices_with="absent")])
    with pytest.raises(ConfigError, match="accelerators of one kind"):
        plan_placement(nodes, [trainer(1, accelerator=""), rollout(1, 1, shares_devices_with="trainer")])
    with pytest.raises(ConfigError, match=r"rollout\.num_replicas must be at least 1"):
        rollout(0, 1)


def test_five_hundred_and_twelve_nodes_are_planned_whole():
    nodes = grid_nodes(512, 8)
    groups = [trainer(512, tensor_parallel=5), rollout(512, 3)]
    plan = plan_placement(nodes, groups)
    assert len({(rank.node, rank.device) for rank in plan.ranks}) == 4096
    with pytest.raises(PlacementError, match="4099 GPU wanted, 4096 free"):
        plan_placement(nodes, [groups[0], rollout(513, 3)])
    assert math.isinf(nodes[0].num_cpus)


@pytest.mark.parametrize(("device", "kind"), [("cuda", "GPU"), ("xpu:3", "XPU"), ("auto", "GPU"), ("cpu", "GPU")])
def test_the_recipe_gives_the_kind_of_accelerator_where_the_nodes_do_not(device, kind):
    view = ClusterView.named("2x4", [device])
    assert [dict(node.free) for node in view.nodes] == [{kind: (0, 1, 2, 3)}] * 2
    assert view.kind(device) == ("" if device == "cpu" else kind)


def test_nothing_is_given_out_where_nothing_is_reserved():
    assert ClusterView(nodes=ClusterView.named("1x8", []).nodes, reserves=False).kind("cuda") == ""


def test_what_no_setting_can_change_is_refused_with_the_reason():
    group = RankGroup(role="trainer", tensor_parallel=8, width_multiple=8, keys={"tensor_parallel": "engine.num_ranks"})
    with pytest.raises(PlacementError, match="8 GPU on one node"):
        fit_settings(ClusterView.named("4x4", ["cuda"]), lambda _: ResourceRequest(groups=(group,)))
