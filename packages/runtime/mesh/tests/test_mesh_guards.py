"""The axis rule, against brute force over the members, and on real ranks with incidents A and B."""

import re
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat_core import ConfigError, GuardError, PeerFailedError
from offbeat_mesh import Guard, Layout, Mesh, join_world
from offbeat_mesh._guard import check_guards
from offbeat_mesh._layout import AXES

SIZES = st.sampled_from([1, 2, 3])


@st.composite
def guarded_groups(draw):
    """A layout, a guard in it, and one group of it."""
    dp, cp, tp, pp = (draw(SIZES) for _ in range(4))
    stage = dp * cp * tp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    layout = Layout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep)
    axes = draw(st.sets(st.sampled_from(AXES), min_size=1, max_size=2))
    places = {}
    for axis in axes:
        index = st.integers(0, layout.axes[axis] - 1)
        places[axis] = draw(index | st.sampled_from(["first", "last"]) | st.sets(index, min_size=1))
    rank = draw(st.integers(0, layout.size - 1))
    return layout, Guard(layout, rank, places), places, layout.members(draw(st.sets(st.sampled_from(AXES))), rank)


def passes(layout, places, rank):
    """The meaning of a guard, spelled out."""
    for axis, place in places.items():
        own = layout.coordinates(rank)[axis]
        wanted = {"first": 0, "last": layout.axes[axis] - 1}.get(place, place) if isinstance(place, str) else place
        if own not in ({wanted} if isinstance(wanted, int) else wanted):
            return False
    return True


@settings(max_examples=150)
@given(guarded_groups())
def test_the_rule_is_that_all_members_pass(case):
    layout, guard, places, ranks = case
    assert bool(guard) == passes(layout, places, guard.rank)
    outside = tuple(rank for rank in ranks if not passes(layout, places, rank))
    with guard as here:
        assert here == bool(guard)
        if outside and len(ranks) > 1:
            with pytest.raises(GuardError) as caught:
                check_guards("all_reduce", "the group", ranks)
            assert caught.value.outside == outside
            assert set(caught.value.shared_axes) <= set(places)
            if len(outside) < len(ranks):  # some pass and some do not: they differ along an axis of the guard
                assert caught.value.shared_axes
        else:
            check_guards("all_reduce", "the group", ranks)
    check_guards("all_reduce", "the group", ranks)


@settings(max_examples=100)
@given(guarded_groups())
def test_axes_without_a_common_one_are_always_safe(case):
    # The rule as it is written in the design, for one grid: A ∩ C = ∅ is safe, whatever the sizes.
    layout, guard, _, _ = case
    assume(bool(guard) and not {"ep", "edp"} & set(guard.axes))
    axes = {"dp", "cp", "tp", "pp"} - set(guard.axes)
    with guard:
        check_guards("all_reduce", "the group", layout.members(axes, guard.rank))


def test_guards_nest_and_close_in_their_thread():
    layout = Layout(dp=2, tp=2)
    ranks = layout.members(["dp"], 0)
    with Guard(layout, 0, {"tp": 0}):
        check_guards("all_reduce", "dp", ranks)
        with Guard(layout, 0, {"dp": 0}):
            with pytest.raises(GuardError, match=re.escape("where(dp=0)")):
                check_guards("all_reduce", "dp", ranks)
            other = []
            thread = threading.Thread(target=lambda: other.append(check_guards("all_reduce", "dp", ranks)))
            thread.start()
            thread.join()
            assert other == [None]
        check_guards("all_reduce", "dp", ranks)


def test_an_outer_guard_counts_where_the_inner_one_passes():
    layout = Layout(dp=2, tp=2)
    ranks = layout.members(["dp"], 0)
    with Guard(layout, 0, {"dp": 0}), Guard(layout, 0, {"tp": 0}):
        with pytest.raises(GuardError, match=re.escape("where(dp=0)")):
            check_guards("all_reduce", "dp", ranks)
        check_guards("all_reduce", "one rank", (0,))


def test_the_error_says_what_to_do():
    layout = Layout(dp=2, cp=2)
    with Guard(layout, 0, {"cp": 0}), pytest.raises(GuardError) as caught:
        check_guards("all_reduce", "dp×cp of ranks 0, 1, 2, 3", (0, 1, 2, 3))
    assert str(caught.value) == (
        "all_reduce over dp×cp of ranks 0, 1, 2, 3 stands under where(cp=0), which rank 1, 3 of that group does not "
        "pass, so it would wait for ever; the group and the guard share cp: call it outside the guard and keep only "
        "the reporting inside"
    )


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({}, "needs an axis"),
        ({"etp": 0}, "got etp"),
        ({"dp": 2}, "dp has the places 0 to 1: got 2"),
        ({"dp": -1}, "got -1"),
        ({"dp": "middle"}, "first, last: got 'middle'"),
        ({"dp": []}, r"got \[\]"),
        ({"dp": True}, "got True"),
        ({"dp": [0, "1"]}, "first, last"),
    ],
)
def test_a_guard_that_means_nothing_is_refused(places, text):
    with pytest.raises(ConfigError, match=text):
        Mesh().where(**places) if places in ({}, {"etp": 0}) else Guard(Layout(dp=2), 0, places)


@pytest.mark.mesh(dp=1, cp=2, pp=2)
def test_incident_b_is_refused_at_once_on_every_rank_that_enters(mesh):
    """The MTP loss is reduced over dp×cp under a guard that needs cp == 0."""
    group = mesh.group("dp", "cp")
    loss = torch.tensor([1.0 + mesh.rank])
    with mesh.where(pp="last", cp=0) as reports:
        if reports:
            with pytest.raises(GuardError, match="the group and the guard share cp") as caught:
                group.all_reduce(loss)
            assert caught.value.outside == (3,)
            with pytest.raises(GuardError, match=r"c10d\.allreduce over dp×cp of ranks 2, 3"):
                dist.all_reduce(loss, group=group.process_group)  # as Megatron itself calls it
    with mesh.where(pp="last") as takes_part:  # the right form: all ranks of the last stage take part, one reports
        if takes_part:
            group.all_reduce(loss, "mean")
            dist.all_reduce(loss, group=group.process_group)
            assert loss.item() == 7.0
    group.barrier()  # no rank is out of step


@pytest.mark.mesh(dp=2, cp=2)
def test_third_parties_obey_too(mesh):
    from torch.distributed import _functional_collectives as functional
    from torch.nn.parallel import DistributedDataParallel

    group = mesh.group("dp", "cp")
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mesh.group("cp").process_group)
    own = mesh.coordinates["cp"]
    with mesh.where(cp=own):
        with pytest.raises(GuardError, match="share cp"):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(GuardError, match="share cp"):
            functional.all_reduce(torch.ones(1), "sum", group.process_group)
        with pytest.raises(GuardError, match="share cp"):
            dist.barrier()
        with pytest.raises(GuardError, match="share cp"):
            dist.all_gather_object([None] * 4, 1, group=group.process_group)
        with pytest.raises(GuardError, match=r"mesh\.group over dp×cp"):
            mesh.group("dp", "cp", channel="x")
        dist.all_reduce(torch.ones(1), group=mesh.group("dp").process_group)
        if mesh.rank == 0:
            dist.send(torch.ones(1), 3)  # between two ranks: not a collective
        if mesh.rank == 3:
            dist.recv(torch.ones(1), 0)


@pytest.mark.mesh(dp=2, tp=2, ep=2)
def test_axes_of_the_other_grid_meet_under_other_names(mesh):
    # ep counts the ranks that tp counts here: no name in common, and yet the same ranks
    with mesh.where(tp=mesh.coordinates["tp"]), pytest.raises(GuardError, match="share tp"):
        mesh.group("ep").barrier()
    with mesh.where(dp=mesh.coordinates["dp"]):
        mesh.group("ep").barrier()


LEADER = "no such engine"


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        pytest.param(dp, tp, marks=[] if (dp, tp) == (2, 2) else pytest.mark.nightly)
        for dp in (1, 2, 4)
        for tp in (1, 2, 4)
    ],
)
def test_incident_a_each_replica_asks_its_own_leader(run_ranks, dp, tp):
    """Whether parts can be loaded is decided per replica; group-relative 0 is every replica's own first rank."""

    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=40):
            mesh = Mesh(dp=dp, tp=tp)
            replica = mesh.group_except("dp")
            flushes = []
            in_parts = replica.decide(lambda: f"asked by {rank}")
            answer = torch.full((1,), float(rank))
            replica.broadcast(answer, source=0)
            for _ in range(3 if in_parts else 1):  # every rank runs the same flushes
                replica.gather_data(rank)
                flushes.append(rank)
                replica.barrier()

            def fail():
                raise ConnectionError(LEADER)

            said = ""
            if mesh.coordinates["dp"] == 0:
                with pytest.raises(PeerFailedError) as caught:
                    replica.decide(fail)
                said = str(caught.value)
            return [in_parts, answer.item(), len(flushes), said]

    for rank, one in enumerate(run_ranks(dp * tp, body)):
        assert not one.error, one.text
        leader = rank // tp * tp
        assert one.value[:3] == [f"asked by {leader}", leader, 3]
        named = f"{Layout(dp=dp, tp=tp).label(leader)} failed: ConnectionError: {LEADER}"
        assert one.value[3] == (named if rank < tp else "")
