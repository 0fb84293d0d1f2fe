"""The planner against all ways of placing: a plan exactly when there is one, and every plan keeps every promise."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat_core import PlacementError
from offbeat_placement import (
    Allocation,
    Node,
    PlacedDriver,
    PlacedRank,
    Plan,
    RankGroup,
    _packing,
    check_plan,
    grid_nodes,
    plan_placement,
)
from offbeat_placement._packing import Room, UnitType, pack
from offbeat_placement._planner import find_plan
from offbeat_placement._shortfall import apply_changes, suggest_changes

MANY = settings(max_examples=250)


@st.composite
def clusters(draw, most_nodes=4, most_free=6):
    def node(number):
        total = draw(st.integers(1, most_free))
        free = draw(st.sets(st.integers(0, total - 1)))
        return Node(
            name=f"n{number}",
            free={"GPU": tuple(free)},
            total={"GPU": total},
            num_cpus=draw(st.sampled_from([float("inf"), 1, 2, 4])),
        )

    return [node(number) for number in range(draw(st.integers(1, most_nodes)))]


@st.composite
def wanted(draw):
    groups = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["GPU", "GPU", "GPU", ""]))
        others = [group.role for group in groups if group.accelerator == kind == "GPU"]
        groups.append(
            RankGroup(
                role=f"g{number}",
                num_replicas=draw(st.integers(1, 3)),
                tensor_parallel=draw(st.integers(1, 4)),
                pipeline_parallel=draw(st.sampled_from([1, 1, 2])),
                accelerator=kind,
                cpus_per_rank=draw(st.sampled_from([0, 0, 0.5, 1])),
                shares_devices_with=draw(st.sampled_from(["", *others])),
            )
        )
    return groups


def can_be_placed(nodes, groups):
    """Try every node for every stage of every group; a stage that may span nodes is as good as ranks by themselves."""
    groups = [
        replace(group, tensor_parallel=1, num_replicas=group.num_replicas * group.tensor_parallel)
        if group.spans_nodes
        else group
        for group in groups
    ]
    stages = [place for place, group in enumerate(groups) for _ in range(group.num_replicas * group.pipeline_parallel)]
    pools = list(range(len(groups)))
    for place, group in enumerate(groups):
        if group.shares_devices_with:
            other = pools[[each.role for each in groups].index(group.shares_devices_with)]
            pools = [other if pool == pools[place] else pool for pool in pools]
    held = [[0] * len(groups) for _ in nodes]

    def fits(node, counts):
        ranks = [count * group.tensor_parallel for count, group in zip(counts, groups, strict=True)]
        devices = sum(
            max(ranks[i] for i in range(len(groups)) if pools[i] == pool and groups[i].accelerator)
            for pool in {pools[i] for i in range(len(groups)) if groups[i].accelerator}
        )
        cpus = sum(each * group.cpus_per_rank for each, group in zip(ranks, groups, strict=True))
        memory = sum(each * group.memory_bytes_per_rank for each, group in zip(ranks, groups, strict=True))
        return devices <= node.num_free("GPU") and cpus <= node.num_cpus and memory <= node.memory_bytes

    def place(index, first):
        if index == len(stages):
            return True
        group = stages[index]
        if index and stages[index - 1] != group:
            first = 0
        for node in range(first, len(nodes)):
            held[node][group] += 1
            if fits(nodes[node], held[node]) and place(index + 1, node):
                return True
            held[node][group] -= 1
        return False

    return place(0, 0)


@MANY
@given(clusters(), wanted())
def test_a_plan_is_found_whenever_there_is_one(nodes, groups):
    outcome = find_plan(nodes, groups)
    assert (outcome.plan is not None) == can_be_placed(nodes, groups)
    assert outcome.proven
    if outcome.plan is not None:
        check_plan(outcome.plan, nodes, groups)


def wide_can_be_placed(nodes, groups):
    """Try every node for every stage, and every set of whole nodes of one size for those wider than such a node."""
    stages = [group for group in groups for _ in range(group.num_replicas)]
    stages.sort(key=lambda group: -group.tensor_parallel)

    def choices(group, free):
        width = group.tensor_parallel
        yield from ({place: left - width} for place, left in enumerate(free) if left >= width)
        if group.spans_nodes:
            sizes = {node.num_total("GPU") for node in nodes}
            for size in (size for size in sizes if size < width and width % size == 0):
                whole = [n for n, node in enumerate(nodes) if free[n] == node.num_total("GPU") == size]
                for chosen in combinations(whole, width // size):
                    yield dict.fromkeys(chosen, 0)

    def place(index, free):
        return index == len(stages) or any(
            place(index + 1, [left.get(n, each) for n, each in enumerate(free)])
            for left in choices(stages[index], free)
        )

    return place(0, [node.num_free("GPU") for node in nodes])


@MANY
@given(
    st.lists(st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([0, 0, 0, 1, 8])), min_size=1, max_size=6),
    st.tuples(st.integers(1, 2), st.sampled_from([4, 6, 8, 12]), st.booleans()),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
def test_groups_over_whole_nodes_are_placed_whenever_they_can_be(sizes, wide, narrow):
    nodes = [
        Node(name=f"n{n}", free={"GPU": tuple(range(max(0, size - taken)))}, total={"GPU": size})
        for n, (size, taken) in enumerate(sizes)
    ]
    groups = [
        RankGroup(role="wide", num_replicas=wide[0], tensor_parallel=wide[1], spans_nodes=wide[2]),
        RankGroup(role="narrow", num_replicas=narrow[0], tensor_parallel=narrow[1]),
    ]
    outcome = find_plan(nodes, groups)
    assert (outcome.plan is not None) == wide_can_be_placed(nodes, groups)
    assert outcome.proven
    if outcome.plan is not None:
        check_plan(outcome.plan, nodes, groups)


def test_a_large_node_that_is_taken_does_not_forbid_two_free_ones_of_half_its_size():
    nodes = [Node(name="large", total={"GPU": 16}), *grid_nodes(2, 8)]
    wide = RankGroup(role="wide", tensor_parallel=16, spans_nodes=True)
    plan = plan_placement(nodes, [wide])
    assert {rank.node for rank in plan.ranks} == {"node-0", "node-1"}
    both = replace(wide, num_replicas=2)
    free = Node(name="large", free={"GPU": tuple(range(16))})
    assert {rank.node for rank in plan_placement([free, *nodes[1:]], [both]).ranks} == {"large", "node-0", "node-1"}


@st.composite
def clusters_with_lacks(draw):
    """Draw nodes, some of which lack CPUs or memory, or both."""
    return [
        Node(
            name=f"n{number}",
            free={"GPU": tuple(range(draw(st.sampled_from([4, 4, 3, 1]))))},
            total={"GPU": 4},
            num_cpus=draw(st.sampled_from([float("inf"), 0, 1, 2, 4])),
            memory_bytes=draw(st.sampled_from([3.0, 0, 1, 2])),
        )
        for number in range(draw(st.integers(2, 4)))
    ]


@MANY
@given(clusters_with_lacks(), st.integers(1, 2), st.integers(1, 3), wanted(), st.integers(0, 1))
def test_a_part_of_the_cluster_is_found_whenever_there_is_one(nodes, num_nodes, per_node, groups, memory):
    groups = [replace(group, memory_bytes_per_rank=memory) for group in groups]
    cut = [
        replace(node, free={"GPU": node.free["GPU"][:per_node]}, total={"GPU": per_node})
        for node in nodes
        if node.num_free("GPU") >= per_node
    ]
    allocation = Allocation(num_nodes=num_nodes, accelerators_per_node=per_node)
    if any(can_be_placed(part, groups) for part in combinations(cut, num_nodes)):
        plan = plan_placement(nodes, groups, allocation)
        assert len({rank.node for rank in plan.ranks}) <= num_nodes
        assert all(rank.device is None or rank.device < per_node for rank in plan.ranks)
    else:
        with pytest.raises(PlacementError) as caught:
            plan_placement(nodes, groups, allocation)
        assert "one may exist" not in str(caught.value)


def test_a_node_without_cpus_does_not_block_the_part_of_others():
    nodes = [replace(node, num_cpus=0 if node.name == "node-0" else 8) for node in grid_nodes(3, 8)]
    groups = [RankGroup(role="trainer", num_replicas=16, cpus_per_rank=1)]
    plan = plan_placement(nodes, groups, Allocation(num_nodes=2, accelerators_per_node=8))
    assert {rank.node for rank in plan.ranks} == {"node-1", "node-2"}


def test_nodes_of_which_each_differs_a_little_are_chosen_among_at_once():
    nodes = [
        replace(node, num_cpus=7 + n % 97 / 10, memory_bytes=2**30 + n * 4096)
        for n, node in enumerate(grid_nodes(512, 8))
    ]
    groups = [RankGroup(role="trainer", num_replicas=128 * 8, cpus_per_rank=1, memory_bytes_per_rank=1000)]
    plan = plan_placement(nodes, groups, Allocation(num_nodes=128, accelerators_per_node=8))
    assert min(int(rank.node.partition("-")[2]) % 97 for rank in plan.ranks) >= 10


@MANY
@given(clusters(), wanted())
def test_the_search_alone_decides_as_well(nodes, groups):
    # The simple orders of filling find nearly every plan; without them the fractional packing and the search must.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packing, "_filling_orders", lambda types, rooms: [])
        patch.setattr(_packing, "cannot_hold", lambda classes, wanted, weights: False)
        outcome = find_plan(nodes, groups)
    assert (outcome.plan is not None) == can_be_placed(nodes, groups)
    assert outcome.proven


@MANY
@given(clusters(), wanted(), st.randoms(use_true_random=False))
def test_the_order_of_nodes_changes_nothing(nodes, groups, shuffle):
    plan = find_plan(nodes, groups).plan
    shuffled = list(nodes)
    shuffle.shuffle(shuffled)
    assert find_plan(shuffled, groups).plan == plan


TWO_NODES_OF_ONE = [Node(name=f"n{number}", free={"GPU": (0,)}, total={"GPU": 1}) for number in range(2)]


@settings(max_examples=60)
@given(clusters(), wanted())
@example(TWO_NODES_OF_ONE, [RankGroup(role="g0", num_replicas=1, tensor_parallel=2, accelerator="GPU")])
def test_a_misfit_names_changes_that_fit(nodes, groups):
    if find_plan(nodes, groups).plan is not None:
        return
    for changes in suggest_changes(nodes, groups):
        more = [change.after - change.before for change in changes if change.field == "nodes"]
        largest = max(nodes, key=lambda node: node.num_total("GPU"))
        free = {"GPU": tuple(range(largest.num_total("GPU")))}
        added = [Node(name=f"more{n}", free=free, num_cpus=largest.num_cpus) for n in range(sum(more))]
        assert can_be_placed([*nodes, *added], apply_changes(groups, changes)), changes


@settings(max_examples=100)
@given(
    st.integers(1, 16),
    st.lists(st.sampled_from([1, 2, 3, 5, 6, 7, 8]), min_size=2, max_size=3, unique=True),
    st.integers(0, 1000),
)
def test_nodes_that_were_cut_into_pieces_can_be_cut_so_again(num_nodes, widths, seed):
    # Perfect packings are the hardest that exist: nothing is left over, and mixed widths such as 3 + 5 must pair up.
    rng = random.Random(seed)
    counts = dict.fromkeys(widths, 0)
    sizes = []
    for _ in range(num_nodes):
        size = 0
        while True:
            fitting = [width for width in widths if size + width <= 8]
            if not fitting:
                break
            width = rng.choice(fitting)
            counts[width] += 1
            size += width
        sizes.append(size)
    nodes = [Node(name=f"n{i}", free={"GPU": tuple(range(size))}) for i, size in enumerate(sizes)]
    groups = [
        RankGroup(role=f"w{width}", num_replicas=count, tensor_parallel=width)
        for width, count in counts.items()
        if count
    ]
    assert find_plan(nodes, groups).plan is not None


def hand_made_misfits():
    def types(*widths_and_counts):
        return [
            UnitType(group=i, pool=str(i), kind=0, width=width, count=count)
            for i, (width, count) in enumerate(widths_and_counts)
        ]

    def rooms(*free):
        return [Room((each,), (each,), float("inf"), float("inf")) for each in free]

    yield types((5, 100), (3, 100)), rooms(*[8] * 100), True
    yield types((5, 100), (3, 101)), rooms(*[8] * 100), False
    yield types((5, 60), (3, 140)), rooms(*[8] * 100), True
    yield types((5, 60), (3, 141)), rooms(*[8] * 100), False
    # 4 + 3 leaves one of eight: the sum of the free devices would be enough for the last, their pieces are not.
    yield types((4, 50), (3, 51)), rooms(*[8] * 51), True
    yield types((6, 3), (2, 4)), rooms(8, 8, 8, 2), True
    yield types((6, 3), (2, 5)), rooms(8, 8, 8, 2), False
    # Half of a pattern is no pattern: fractions of nodes would do.
    yield types((3, 3), (4, 1)), rooms(6, 4, 3), True
    yield types((5, 1), (4, 1)), rooms(8), False


def test_mixed_widths_are_decided_at_hand_made_edges():
    for types, rooms, expected in hand_made_misfits():
        packing = pack(types, rooms)
        assert (packing.counts is not None) == expected, (types, rooms)
        assert packing.proven


def test_a_checker_sees_what_a_planner_could_do_wrong():
    nodes = grid_nodes(2, 4)
    groups = [
        RankGroup(role="rollout", num_replicas=2, tensor_parallel=2, cpus_per_rank=1),
        RankGroup(role="trainer", num_replicas=2),
    ]
    good = plan_placement(nodes, groups)

    def moved(role, rank, node, device):
        ranks = [
            PlacedRank(role=each.role, replica=each.replica, rank=each.rank, node=node, device=device)
            if (each.role, each.rank) == (role, rank)
            else each
            for each in good.ranks
        ]
        return Plan(ranks=tuple(ranks), drivers=good.drivers)

    def complaint(plan, nodes=nodes):
        try:
            check_plan(plan, nodes, groups)
        except PlacementError as error:
            return str(error)
        return ""

    assert complaint(good) == ""
    assert "straddles 2: 1 on node-0, 1 on node-1" in complaint(moved("rollout", 1, "node-1", 3))
    assert "is used by rollout rank 0 and trainer rank 0" in complaint(moved("trainer", 0, "node-0", 0))
    assert "not in the order" in complaint(moved("rollout", 0, "node-0", 3))
    assert "is not free" in complaint(moved("trainer", 1, "node-1", 4))
    assert "no such node: node-7" in complaint(moved("trainer", 1, "node-7", 0))
    far = [PlacedDriver(role=each.role, replica=each.replica, node="node-1") for each in good.drivers]
    assert "replica 0: its one driver must be on node-0, with its rank 0: it is on node-1" in complaint(
        Plan(ranks=good.ranks, drivers=tuple(far))
    )
    assert "ranks 0 to 3, each once, and has 3" in complaint(Plan(ranks=good.ranks[1:], drivers=good.drivers))
    few_cpus = [Node(name=node.name, free=node.free, num_cpus=3) for node in nodes]
    assert "need 4 CPUs and 3 are free" in complaint(good, few_cpus)
