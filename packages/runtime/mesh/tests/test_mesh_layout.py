"""The arithmetic of axes, against brute force, torch's DeviceMesh and Megatron's documented rank order."""

import re
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import ConfigError
from offbeat_mesh import Layout
from offbeat_mesh._layout import AXES, GRID_AXES, describe_group, name_ranks

SIZES = st.sampled_from([1, 2, 3])
few = settings(max_examples=40)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp, tp, pp = (draw(SIZES) for _ in range(4))
    stage = dp * cp * tp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    return Layout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, order=tuple(draw(st.permutations(GRID_AXES))))


@few
@given(layouts())
def test_coordinates_and_ranks_are_one_to_one(layout):
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert len({tuple(place.items()) for place in places}) == layout.size
    for rank, place in enumerate(places):
        assert layout.rank_of(**{axis: place[axis] for axis in GRID_AXES}) == rank
        assert all(0 <= place[axis] < layout.axes[axis] for axis in AXES)


@few
@given(layouts())
def test_ep_and_edp_are_a_second_count_of_each_stage(layout):
    assert layout.ep * layout.edp == layout.dp * layout.cp * layout.tp
    seen = {(place["pp"], place["ep"], place["edp"]) for place in map(layout.coordinates, range(layout.size))}
    assert len(seen) == layout.size


@few
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_the_groups_of_any_axes_part_the_world(layout, axes):
    groups = [layout.members(axes, rank) for rank in range(layout.size)]
    assert sorted(rank for group in layout.groups(axes) for rank in group) == list(range(layout.size))
    for rank, group in enumerate(groups):
        assert rank in group
        assert list(group) == sorted(group)
        assert all(groups[member] == group for member in group)


@few
@given(layouts(), st.one_of(st.sets(st.sampled_from(GRID_AXES)), st.sets(st.sampled_from(["pp", "ep", "edp"]))))
def test_along_one_grid_members_agree_on_its_other_axes(layout, axes):
    grid = GRID_AXES if not axes & {"ep", "edp"} else ("pp", "ep", "edp")
    for rank in range(layout.size):
        own = layout.coordinates(rank)
        expected = [
            other
            for other in range(layout.size)
            if all(layout.coordinates(other)[axis] == own[axis] for axis in grid if axis not in axes)
        ]
        assert layout.members(axes, rank) == tuple(expected)
        assert len(expected) == prod(layout.axes[axis] for axis in axes)


@few
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_mixed_axes_join_what_their_moves_connect(layout, axes):
    reached = {0}
    frontier = [0]
    while frontier:
        rank = frontier.pop()
        for axis in axes:
            for other in layout.members([axis], rank):
                if other not in reached:
                    reached.add(other)
                    frontier.append(other)
    assert layout.members(axes, 0) == tuple(sorted(reached))


@few
@given(layouts())
def test_torch_s_device_mesh_has_the_same_groups(layout):
    dims = layout.order[::-1]
    grid = torch.arange(layout.size).view([layout.axes[axis] for axis in dims])
    for axis in GRID_AXES:
        # DeviceMesh: the groups of a dim are the rows of the mesh with that dim swapped to the end.
        rows = grid.swapdims(-1, dims.index(axis)).reshape(-1, layout.axes[axis])
        assert sorted(tuple(row) for row in rows.tolist()) == layout.groups([axis])


def test_megatron_s_documented_example():
    # Source: Megatron-LM, initialize_model_parallel: 16 GPUs, tensor 2, pipeline 4.
    layout = Layout(dp=2, tp=2, pp=4)
    assert layout.groups(["dp"]) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert layout.groups(["tp"]) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert layout.groups(["pp"]) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


@few
@given(layouts())
def test_megatron_s_rank_generator_has_the_same_groups(layout):
    # Source: Megatron-LM, RankGenerator and generate_masked_orthogonal_rank_groups, written out as nested loops:
    # order "tp-cp-ep-dp-pp", with ep 1 for the dense ranks, and cp 1, dp = edp for the expert ranks.
    dense = Layout(dp=layout.dp, cp=layout.cp, tp=layout.tp, pp=layout.pp, ep=layout.ep)
    tp, cp, dp, pp, ep, edp = (dense.axes[axis] for axis in ("tp", "cp", "dp", "pp", "ep", "edp"))

    def dense_rank(t, c, d, p):
        return t + tp * (c + cp * (d + dp * p))

    def expert_rank(e, d, p):
        return e + ep * (d + edp * p)

    assert dense.groups(["dp", "cp"]) == sorted(
        tuple(sorted(dense_rank(t, c, d, p) for c in range(cp) for d in range(dp)))
        for t, p in product(range(tp), range(pp))
    )
    assert dense.groups(["tp", "pp"]) == sorted(
        tuple(sorted(dense_rank(t, c, d, p) for t in range(tp) for p in range(pp)))
        for c, d in product(range(cp), range(dp))
    )
    assert dense.groups(["ep"]) == sorted(
        tuple(expert_rank(e, d, p) for e in range(ep)) for d, p in product(range(edp), range(pp))
    )
    assert dense.groups(["edp"]) == sorted(
        tuple(expert_rank(e, d, p) for d in range(edp)) for e, p in product(range(ep), range(pp))
    )


def test_labels_name_the_axes_in_use():
    assert Layout(dp=2, tp=2, ep=4).label(3) == "rank 3 (dp 1, tp 1)"
    assert Layout().label(0) == "rank 0"
    assert name_ranks([4]) == "rank 4"
    assert name_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, … 99 (100 in all)"
    assert describe_group(("dp", "cp"), (0, 1), "data") == "dp×cp of ranks 0, 1, channel data"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dp": 0}, "at least 1: got {'dp': 0}"),
        ({"tp": -2, "pp": 0}, "{'tp': -2, 'pp': 0}"),
        ({"dp": 2, "tp": 3, "ep": 4}, "ep must divide dp·cp·tp = 2·1·3 = 6: got ep=4; choose one of 1, 2, 3, 6"),
        ({"order": ("tp", "cp", "dp")}, "tp, cp, dp, pp once each"),
    ],
)
def test_wrong_sizes_are_refused_with_what_would_do(wrong, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Layout(**wrong)


def test_unknown_axes_ranks_and_places_are_refused():
    layout = Layout(dp=2)
    with pytest.raises(ConfigError, match="got etp"):
        layout.members(["dp", "etp"], 0)
    with pytest.raises(ConfigError, match="ranks 0 to 1: got 2"):
        layout.coordinates(2)
    with pytest.raises(ConfigError, match="ranks 0 to 1: got -1"):
        layout.members(["dp"], -1)
    with pytest.raises(ConfigError, match=re.escape("{'dp': 2}")):
        layout.rank_of(dp=2)
