"""The graph and the diagnosis, without processes: heads in, verdict out."""

import dataclasses
import json
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import AbsentProcess, Edge, Fate, WaitGraph
from offbeat_liveness._diagnosis.mismatch import difference
from offbeat_liveness._diagnosis.proofs import find_cycle, find_failure, is_secondary
from offbeat_liveness._diagnosis.verdict import Verdict, join_names, join_ranks
from offbeat_liveness._process.snapshot import (
    CallSite,
    Collective,
    GroupSnapshot,
    LeftGroup,
    OutsideWait,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
    from_data,
    to_data,
)

STALL_S = 60.0
LINE = CallSite(file="/home/me/train.py", line=88, function="reduce_metrics")


def entry(
    seq: int, op: str = "all_reduce", *, group: str = "0", shape: str = "Float[4]", done: bool = False
) -> Collective:
    return Collective(group=group, seq=seq, op=op, inputs=(shape,), outputs=(shape,), done=done, created_ns=seq)


def member(
    name: str, ranks: tuple[int, ...], *entries: Collective, axes: tuple[str, ...] = (), entered: int | None = None
) -> GroupSnapshot:
    last = max((each.seq for each in entries), default=0)
    return GroupSnapshot(
        name=name, ranks=ranks, axes=axes, entered=last if entered is None else entered, recent=entries
    )


def head(
    rank: int, *groups: GroupSnapshot, waits: tuple[Wait, ...] = (), still_s: float = 70.0, **more: object
) -> ProcessSnapshot:
    base = ProcessSnapshot(
        key=f"vm:{rank}", name=f"rank {rank}", rank=rank, world="w", world_size=4, pid=rank, host="vm", groups=groups,
        waits=waits, still_s=still_s, threads=(ThreadSnapshot(name="MainThread", still_s=still_s, stack=(LINE,)),),
    )  # fmt: skip
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def in_collective(group: str, seq: int, op: str = "all_reduce", age_s: float = 70.0, **more: object) -> Wait:
    base = Wait(kind="collective", what=op, age_s=age_s, group=group, seq=seq, stack=(LINE,))
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def declared(what: str, on: str, age_s: float = 70.0, deadline_s: float | None = None) -> Wait:
    return Wait(kind="declared", what=what, on=on, age_s=age_s, deadline_s=deadline_s)


def decide(*heads: ProcessSnapshot, absent: tuple[AbsentProcess, ...] = ()) -> Verdict | None:
    return find_verdict(WaitGraph(heads=heads, absent=absent, stall_after_s=STALL_S))


def found(*heads: ProcessSnapshot, absent: tuple[AbsentProcess, ...] = ()) -> Verdict:
    verdict = decide(*heads, absent=absent)
    assert verdict is not None
    return verdict


def test_a_wait_shorter_than_the_stall_is_no_matter() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1, age_s=59.0),))
    assert decide(waits, head(1, member("0", world))) is None


def test_a_member_in_no_call_is_missing() -> None:
    world = (0, 1, 2)
    here = member("0", world, entry(1, done=True), entry(2), axes=("dp", "cp"))
    verdict = found(
        head(0, here, waits=(in_collective("0", 2),)),
        head(1, member("0", world, entry(1, done=True), axes=("dp", "cp"))),
        head(2, here, waits=(in_collective("0", 2, age_s=40.0),)),
    )
    assert (verdict.kind, verdict.missing, verdict.arrived) == ("missing-member", ("rank 1",), ("rank 0", "rank 2"))
    assert (verdict.axes, verdict.members, verdict.seq, verdict.op) == (("dp", "cp"), world, 2, "all_reduce")
    assert "train.py:88 in reduce_metrics" in verdict.text
    assert "dp×cp" in verdict.text


def test_different_operations_at_one_place_are_named_with_their_ranks() -> None:
    world = (0, 1, 2)
    gather = member("0", world, entry(7, "gather"))
    verdict = found(
        head(0, gather, waits=(in_collective("0", 7, "gather"),)),
        head(1, member("0", world, entry(7, "barrier")), waits=(in_collective("0", 7, "barrier"),)),
        head(2, gather, waits=(in_collective("0", 7, "gather"),)),
    )
    assert verdict.kind == "different-op"
    assert "gather Float[4] on ranks 0, 2, but barrier Float[4] on rank 1" in verdict.headline


def test_a_mismatch_is_found_where_it_began_even_if_one_side_has_gone_on() -> None:
    world = (0, 1)
    past = member("0", world, entry(4, "broadcast", done=True), entry(5))
    verdict = found(
        head(0, past, waits=(in_collective("0", 5),)),
        head(1, member("0", world, entry(4)), waits=(in_collective("0", 4),)),
    )
    assert (verdict.kind, verdict.seq) == ("different-op", 4)


def test_of_several_mismatches_the_earliest_is_reported() -> None:
    world, begun = (0, 1, 2), entry(5, "broadcast", done=True)
    verdict = found(
        head(0, member("0", world, begun, entry(7, "gather")), waits=(in_collective("0", 7, "gather"),)),
        head(1, member("0", world, begun, entry(7, "reduce")), waits=(in_collective("0", 7, "reduce"),)),
        head(2, member("0", world, entry(5, "barrier")), waits=(in_collective("0", 5, "barrier"),)),
    )
    assert (verdict.kind, verdict.seq) == ("different-op", 5)
    assert "barrier Float[4] on rank 2" in verdict.headline


def test_shapes_that_must_be_alike_and_are_not() -> None:
    world = (0, 1)
    verdict = found(
        head(0, member("0", world, entry(3, shape="Float[4]")), waits=(in_collective("0", 3),)),
        head(1, member("0", world, entry(3, shape="Float[5]")), waits=(in_collective("0", 3),)),
    )
    assert verdict.kind == "shape-mismatch"
    assert "Float[4]" in verdict.text
    assert "Float[5]" in verdict.text


def test_uneven_all_to_all_is_no_fault() -> None:
    world = (0, 1, 2)
    one = member("0", world, entry(3, "all_to_all", shape="Float[4]"))
    other = member("0", world, entry(3, "all_to_all", shape="Float[9]"))
    verdict = found(
        head(0, one, waits=(in_collective("0", 3, "all_to_all"),)),
        head(1, other, waits=(in_collective("0", 3, "all_to_all"),)),
        head(2, member("0", world)),
    )
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 2",))


def test_two_groups_in_another_order_are_a_cycle_of_collectives() -> None:
    world = (0, 1)
    verdict = found(
        head(0, member("a", world, entry(1, group="a")), member("b", world), waits=(in_collective("a", 1),)),
        head(1, member("a", world), member("b", world, entry(1, group="b")), waits=(in_collective("b", 1),)),
    )
    assert verdict.kind == "different-order"
    assert {(link.waiter, link.on, link.group) for link in verdict.links} == {
        ("rank 0", "rank 1", "a"),
        ("rank 1", "rank 0", "b"),
    }


def test_a_cycle_over_a_queue_is_a_wait_cycle() -> None:
    world = (0, 1)
    verdict = found(
        head(0, member("0", world), waits=(declared("sample_queue.get", "rank 1"),)),
        head(1, member("0", world, entry(1)), waits=(in_collective("0", 1),)),
    )
    assert verdict.kind == "wait-cycle"
    assert "sample_queue.get" in verdict.text


def test_a_declared_wait_means_all_processes_of_a_role() -> None:
    trainer = head(0, waits=(declared("samples.get", "rollouter"),))
    idle = head(5, name="rollouter-0")
    verdict = found(trainer, idle, head(6, name="rollouterish"))
    assert (verdict.kind, verdict.missing) == ("starved", ("rollouter-0",))


def test_a_producer_that_moves_may_take_until_the_deadline() -> None:
    moving = head(5, name="rollouter", still_s=1.0)
    assert decide(head(0, waits=(declared("get", "rollouter", age_s=70.0, deadline_s=300.0),)), moving) is None
    late = found(head(0, waits=(declared("get", "rollouter", age_s=301.0, deadline_s=300.0),)), moving)
    assert late.kind == "straggler"


def test_an_unknown_producer_is_named() -> None:
    verdict = found(head(0, waits=(declared("get", "rolouter"),)))
    assert verdict.kind == "starved"
    assert "'rolouter'" in verdict.headline


def test_a_member_that_moves_is_a_straggler_and_never_fatal() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    verdict = found(waits, head(1, member("0", world), still_s=2.0))
    assert (verdict.kind, verdict.is_proof, verdict.may_end) == ("straggler", False, False)


def test_a_member_that_computes_has_ten_times_the_patience() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1, age_s=599.0),))
    assert found(waits, head(1, member("0", world), still_s=599.0, busy=0.9)).kind == "straggler"
    assert found(waits, head(1, member("0", world), still_s=601.0, busy=0.9)).kind == "missing-member"


def test_the_dead_are_named_through_those_that_wait_for_them() -> None:
    """rank 0 waits for rank 1, which waits for rank 2, which is gone."""
    gone = AbsentProcess(name="rank 2", rank=2, world="w", fate="killed", text="pid 99 on vm")
    verdict = found(
        head(0, member("a", (0, 1), entry(1, group="a")), waits=(in_collective("a", 1),)),
        head(1, member("a", (0, 1)), member("b", (1, 2), entry(1, group="b")), waits=(in_collective("b", 1),)),
        absent=(gone,),
    )
    assert (verdict.kind, verdict.missing) == ("dead-peer", ("rank 2",))


def test_a_process_that_can_be_continued_is_named_by_its_pid() -> None:
    waits = head(0, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),))
    stopped = AbsentProcess(name="rank 1", rank=1, world="w", fate="stopped", text="pid 99 on vm", pid=99)
    assert "kill -CONT 99" in found(waits, absent=(stopped,)).text


def test_an_exception_explains_the_deaths_that_follow_it() -> None:
    world = (0, 1, 2)
    raised = AbsentProcess(name="rank 2", rank=2, world="w", fate="raised", text="ValueError: bad batch", head=head(2))
    killed = AbsentProcess(name="rank 1", rank=1, world="w", fate="killed")
    verdict = found(head(0, member("0", world, entry(1)), waits=(in_collective("0", 1),)), absent=(killed, raised))
    assert verdict.missing == ("rank 2",)
    assert "ValueError: bad batch" in verdict.text


def test_an_exception_that_only_says_that_a_peer_is_gone_explains_no_death() -> None:
    error = "RuntimeError: Read error: Connection reset by peer"
    cut_off = AbsentProcess(name="rank 2", rank=2, world="w", fate="raised", text=error)
    killed = AbsentProcess(name="rank 1", rank=1, world="w", fate="killed")
    waits = head(0, member("0", (0, 1, 2), entry(1)), waits=(in_collective("0", 1),))
    verdict = found(waits, absent=(cut_off, killed))
    assert (verdict.missing, verdict.fate) == (("rank 1",), "killed")


def test_processes_that_all_wait_outside_are_stalled_unless_one_computes() -> None:
    """Whatever it computes, its lines do not change: a kernel of NumPy, or a process that it has started."""
    asks = Wait(kind="outside", what="queue.get", age_s=70.0, outside=OutsideWait(kind="queue", text="an empty queue"))
    standing = head(0, waits=(asks,))
    assert decide(standing, head(1, waits=(asks,))) is not None
    for computes in ({"busy": 0.9}, {"tree_busy": 0.9}):
        assert decide(standing, head(1, waits=(asks,), **computes)) is None


def test_one_that_left_after_its_part_was_over_is_not_to_blame() -> None:
    world = (0, 1, 2)
    done = head(2, member("0", world, entry(4, "broadcast", done=True)), state="finished")
    gone = AbsentProcess(name="rank 2", rank=2, world="w", fate="exited", head=done)
    waits = head(0, member("0", world, entry(4, "broadcast")), waits=(in_collective("0", 4, "broadcast"),))
    verdict = found(waits, head(1, member("0", world)), absent=(gone,))
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 1",))


def test_roots_that_differ_are_read_off_the_stacks() -> None:
    world = (0, 1)
    group = member("0", world, entry(2, "broadcast"))
    verdict = found(
        head(0, group, waits=(in_collective("0", 2, "broadcast", root=1),)),
        head(1, group, waits=(in_collective("0", 2, "broadcast", root=0),)),
    )
    assert verdict.kind == "different-op"
    assert "root 1 on rank 0 and root 0 on rank 1" in verdict.headline


def test_nccl_queues_in_another_order_though_everybody_has_issued_everything() -> None:
    world = (0, 1)
    a, b = entry(1, group="a"), entry(1, group="b")
    first_a = (
        member("a", world, dataclasses.replace(a, created_ns=1)),
        member("b", world, dataclasses.replace(b, created_ns=2)),
    )
    first_b = (
        member("a", world, dataclasses.replace(a, created_ns=2)),
        member("b", world, dataclasses.replace(b, created_ns=1)),
    )
    waits = (in_collective("a", 1), in_collective("b", 1))
    assert found(head(0, *first_a, waits=waits), head(1, *first_b, waits=waits)).kind == "different-order"


def test_a_call_that_everybody_is_in_and_that_does_not_end() -> None:
    group = member("0", (0, 1), entry(1))
    verdict = found(*(head(rank, group, waits=(in_collective("0", 1),)) for rank in (0, 1)))
    assert (verdict.kind, verdict.is_proof) == ("stuck-call", False)


def test_a_call_that_the_last_member_has_just_entered_is_about_to_end() -> None:
    group = member("0", (0, 1), entry(1))
    waits = (in_collective("0", 1, age_s=200.0), in_collective("0", 1, age_s=0.1))
    assert decide(*(head(rank, group, waits=(waits[rank],)) for rank in (0, 1))) is None


def test_a_store_key_that_no_rank_sets() -> None:
    verdict = found(head(0, waits=(Wait(kind="store", what="store.wait", on="ready/3", age_s=70.0),)), head(1))
    assert verdict.kind == "starved"
    assert "ready/3" in verdict.headline


def test_a_rank_that_moves_may_be_about_to_set_a_store_key() -> None:
    """rank 1 loads a checkpoint, then notifies the others: slow is no reason to kill."""
    verdict = found(
        head(0, waits=(Wait(kind="store", what="store.get", on="loaded", age_s=70.0),)), head(1, still_s=1.0)
    )
    assert verdict.kind == "straggler"


def test_a_declared_wait_without_a_producer_has_its_deadline() -> None:
    moving = head(1, still_s=1.0)
    assert decide(head(0, waits=(declared("http", "", age_s=70.0, deadline_s=300.0),)), moving) is None
    assert found(head(0, waits=(declared("http", "", age_s=301.0, deadline_s=300.0),)), moving).kind == "straggler"
    assert found(head(0, waits=(declared("http", "", age_s=70.0, deadline_s=300.0),))).kind == "starved"


def test_a_patient_wait_does_not_hide_another_that_is_stuck() -> None:
    group = member("0", (0, 1), entry(1))
    patient = head(2, waits=(declared("get", "rollouter", deadline_s=300.0),))
    stuck = [head(rank, group, waits=(in_collective("0", 1),)) for rank in (0, 1)]
    assert found(patient, head(5, name="rollouter", still_s=1.0), *stuck).kind == "stuck-call"


def test_ranks_of_two_worlds_are_not_mixed_up() -> None:
    trainers = member("0", (0, 1), entry(1))
    others = head(1, member("0", (0, 1)), world="other", name="reward 1")
    verdict = found(head(0, trainers, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1))), others)
    assert verdict.missing == ("rank 1",)


def test_a_failure_that_no_process_depends_on_is_no_verdict() -> None:
    failed = [head(rank, state="failed", error="ConfigError: no such file") for rank in (0, 1)]
    assert find_failure(WaitGraph(heads=failed, stall_after_s=STALL_S)) is None


def test_a_failure_is_distinguished_from_the_errors_it_causes() -> None:
    world = (0, 1, 2)
    group = member("0", world, entry(3), axes=("dp",))
    graph = WaitGraph(
        heads=[
            head(0, group, state="failed", error="RuntimeError: Connection closed by peer [127.0.0.1]:17"),
            head(1, state="failed", error="ValueError: bad batch", error_stack=(LINE,)),
            head(2, group, waits=(in_collective("0", 3, age_s=0.2),)),
        ],
        stall_after_s=STALL_S,
    )
    verdict = find_failure(graph)
    assert verdict is not None
    assert (verdict.kind, verdict.missing, verdict.axes) == ("dead-peer", ("rank 1",), ("dp",))
    assert verdict.arrived == ("rank 0", "rank 2")
    assert "rank 1 raised ValueError: bad batch" in verdict.headline


def test_of_two_that_fail_by_themselves_the_earlier_is_named_first() -> None:
    waits = head(0, member("0", (0, 1, 2), entry(1)), waits=(in_collective("0", 1, age_s=0.1),))
    late, early = (
        head(rank, member("0", (0, 1, 2)), state="failed", error=f"ValueError: {word}", time_s=time_s)
        for rank, word, time_s in ((1, "then this", 20.0), (2, "first this", 10.0))
    )
    verdict = find_failure(WaitGraph(heads=(waits, late, early), stall_after_s=STALL_S))
    assert verdict is not None
    assert [party.name for party in verdict.parties[:2]] == ["rank 2", "rank 1"]


def test_only_losses_of_a_peer_are_secondary() -> None:
    assert is_secondary("RuntimeError: Read error: Connection reset by peer")
    assert not is_secondary("ValueError: shapes differ")


def edges(pairs: list[tuple[int, int]]) -> list[Edge]:
    wait = Wait(kind="declared", what="x", age_s=1.0)
    return [Edge(waiter=str(a), target=str(b), wait=wait, reason="producer") for a, b in pairs]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda p: p[0] != p[1]), max_size=20))
def test_a_cycle_is_found_exactly_if_there_is_one(pairs: list[tuple[int, int]]) -> None:
    cycle = find_cycle(edges(pairs))
    names = [edge.waiter for edge in cycle]
    assert [edge.target for edge in cycle] == names[1:] + names[:1]
    assert len(set(names)) == len(names)
    assert bool(cycle) == has_cycle(pairs)


def has_cycle(pairs: list[tuple[int, int]]) -> bool:
    left = set(pairs)
    while removable := {pair for pair in left if pair[1] not in {a for a, _ in left}}:
        left -= removable
    return bool(left)


@given(
    size=st.integers(2, 9),
    missing=st.integers(0, 8),
    done=st.integers(0, 5),
    ages=st.lists(st.floats(61.0, 500.0), min_size=9, max_size=9),
)
def test_the_missing_rank_is_named_and_no_other(size: int, missing: int, done: int, ages: list[float]) -> None:
    missing %= size
    world = tuple(range(size))
    past = [entry(seq, done=True) for seq in range(1, done + 1)]
    heads = [
        head(rank, member("0", world, *past, entry(done + 1)), waits=(in_collective("0", done + 1, age_s=ages[rank]),))
        if rank != missing
        else head(rank, member("0", world, *past), still_s=600.0)
        for rank in world
    ]
    verdict = found(*heads)
    assert (verdict.kind, verdict.missing, verdict.seq) == ("missing-member", (f"rank {missing}",), done + 1)
    assert len(verdict.arrived) == size - 1


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_one_line_can_be_read_back(ranks: set[int]) -> None:
    text, _, more = join_ranks(ranks).partition(" and ")
    listed: set[int] = set()
    for part in text.split(", "):
        run, _, step = part.partition(" by ")
        first, _, last = run.partition("-")
        listed |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    assert listed <= ranks
    assert len(ranks) - len(listed) == int(more.removesuffix(" more") or 0)


def test_regular_ranks_are_listed_in_short() -> None:
    assert join_ranks(range(0, 1024, 2)) == "0-1022 by 2"
    assert join_ranks([0, 1, 2, 3, 7, 9]) == "0-3, 7, 9"


def test_names_that_are_no_ranks_stay_as_they_are() -> None:
    assert join_names(["rank 2", "rank 0", "rank 1", "rollouter"]) == "ranks 0-2, rollouter"


def test_a_head_survives_the_wire() -> None:
    original = head(
        3, member("0", (0, 3), entry(1), axes=("dp",)), waits=(in_collective("0", 1, root=2),), left=(head(1),)
    )
    assert from_data(ProcessSnapshot, json.loads(json.dumps(to_data(original)))) == original


def test_a_head_of_another_version_may_hold_more() -> None:
    data = {**to_data(head(3)), "invented_later": 1}
    assert from_data(ProcessSnapshot, data) == head(3)


def test_a_service_that_refuses_a_rank_is_its_own_failure() -> None:
    """rank 2 had nothing more to do, and left in order."""
    world = (0, 1)
    graph = WaitGraph(
        heads=[
            head(
                0,
                member("0", world, entry(1)),
                state="failed",
                error="RuntimeError: Connection closed by peer [::1]:1.",
            ),
            head(
                1, member("0", world), state="failed", error="ConnectionError: engine at port 8000: Connection refused"
            ),
        ],
        absent=[AbsentProcess(name="rank 2", rank=2, world="w", fate="exited", head=head(2))],
        stall_after_s=STALL_S,
    )
    verdict = find_failure(graph)
    assert verdict is not None
    assert verdict.missing == ("rank 1",)


def role(name: str, **more: object) -> ProcessSnapshot:
    outside: dict[str, object] = {"rank": None, "world": "", "world_size": 0, "name": name}
    return dataclasses.replace(head(0), **(outside | more))  # type: ignore[arg-type]


def test_a_failure_outside_of_any_world_concerns_those_that_wait_for_it() -> None:
    failed = role("worker-1", state="failed", error="ValueError: bad task")
    other = role("worker-0", waits=(declared("tasks.get", "feeder", age_s=0.1),))
    assert find_failure(WaitGraph(heads=[other, failed, role("feeder", still_s=0.0)], stall_after_s=STALL_S)) is None
    hurt = role("trainer", waits=(declared("result.get", "worker-1", age_s=0.1),))
    verdict = find_failure(WaitGraph(heads=[other, failed, hurt], stall_after_s=STALL_S))
    assert verdict is not None
    assert (verdict.missing, verdict.arrived) == (("worker-1",), ("trainer",))


def test_ranks_of_two_worlds_are_not_taken_for_each_other() -> None:
    here = (0, 1)
    stuck = head(0, member("0", here, entry(1)), waits=(in_collective("0", 1),))
    healthy = [head(rank, member("0", here), world="other", still_s=0.0) for rank in here]
    verdict = found(stuck, head(1, member("0", here)), *healthy)
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 1 (world w)",))


def test_an_operation_beside_which_its_thread_moves_is_no_link_of_a_circle() -> None:
    """rank 0 has posted a receive early, and computes; rank 1 sends when both have met."""
    world = (0, 1)
    receive = Wait(kind="p2p", what="recv", age_s=130.0, peers=(1,))
    waits = head(1, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    for busy, still_s, kind in ((0.0, 1.0, "straggler"), (1.0, 70.0, "straggler"), (0.0, 70.0, "wait-cycle")):
        moves = head(0, member("0", world), waits=(receive,), still_s=still_s, busy=busy)
        assert found(moves, waits).kind == kind


def test_a_slow_one_that_is_on_its_way_out_has_failed() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    verdict = found(waits, head(1, member("0", world), state="failed", error="ValueError: no more samples"))
    assert (verdict.kind, verdict.missing) == ("dead-peer", ("rank 1",))


def test_only_the_four_proofs_are_proofs() -> None:
    world = (0, 1)
    here = member("0", world, entry(1))
    waits = head(0, here, waits=(in_collective("0", 1),))
    behind = member("0", world)
    gone = {fate: AbsentProcess(name="rank 1", rank=1, world="w", fate=fate) for fate in get_args(Fate)}
    certain = {fate for fate, absent in gone.items() if found(waits, absent=(absent,)).is_proof}
    assert certain == {"killed", "crashed", "exited", "raised"}
    assert not found(waits, head(1, behind)).is_proof
    assert not found(waits, head(1, behind, still_s=0.0)).is_proof
    assert not found(waits, head(1, here, waits=(in_collective("0", 1),))).is_proof


def test_a_member_that_has_destroyed_the_group_has_left_for_good() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(3)), waits=(in_collective("0", 3),))
    left = LeftGroup(world="w", rank=1, group=member("0", world, entered=2))
    elsewhere = head(1, world="another", left_groups=(left,))
    verdict = found(waits, elsewhere)
    assert (verdict.kind, verdict.is_proof, verdict.missing) == ("dead-peer", True, ("rank 1",))
    was_in_it = LeftGroup(world="w", rank=1, group=member("0", world, entered=3))
    assert not found(waits, head(1, world="another", left_groups=(was_in_it,))).is_proof


def test_a_circle_with_a_deadline_in_it_is_no_proof_before_that_is_over() -> None:
    world = (0, 1)
    waits = head(1, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    for deadline_s, is_proof in ((None, True), (600.0, False), (65.0, True)):
        asks = head(0, member("0", world), waits=(declared("samples.get", "rank 1", deadline_s=deadline_s),))
        verdict = found(asks, waits)
        assert (verdict.kind, verdict.is_proof) == ("wait-cycle", is_proof)


def test_a_circle_of_processes_whose_other_threads_may_act_is_no_proof() -> None:
    world = (0, 1)
    queue = declared("samples.get", "rank 1")
    waits = in_collective("0", 1)
    asks = head(0, member("0", world), waits=(queue,))
    for free, is_proof in (((), True), (("rollouts",), False)):
        verdict = found(asks, head(1, member("0", world, entry(1)), waits=(waits,), free_threads=free))
        assert (verdict.kind, verdict.is_proof) == ("wait-cycle", is_proof)


def test_a_circle_is_followed_through_the_thread_that_has_to_act() -> None:
    """Two threads of each side: the one that is late in one group is not the one that waits in the other."""
    world = (0, 1)
    saves, trains = dataclasses.replace(member("s", world), worker="save"), member("t", world, entry(1, group="t"))
    in_saves = in_collective("s", 1, thread="save")
    late = dataclasses.replace(member("t", world), worker="MainThread")
    zero = head(
        0, dataclasses.replace(saves, entered=0), trains, waits=(in_collective("t", 1),), free_threads=("save",)
    )
    one = head(1, member("s", world, entry(1, group="s")), late, waits=(in_saves,), free_threads=("MainThread",))
    assert not found(zero, one).is_proof


def test_an_entry_that_cannot_be_read_is_no_reason_to_blame_anybody_else() -> None:
    """rank 1 continues with sends and receives, so that it is not known how far it has come."""
    world = (0, 1, 2)
    waits = head(2, member("0", world, entry(4)), waits=(in_collective("0", 4),))
    unknown = dataclasses.replace(member("0", world), entered=None)
    verdict = found(waits, head(0, unknown, still_s=0.0), head(1, unknown, still_s=0.0))
    assert (verdict.kind, verdict.may_end) == ("straggler", False)


def test_a_group_across_worlds_has_members_of_its_own() -> None:
    """Rank 1 of the trainers is not rank 1 of the group by which weights go to engines."""
    sync = GroupSnapshot(
        name="sync", ranks=(), entered=1, recent=(entry(1, group="sync"),), is_foreign=True, place="h:1", size=2
    )
    trainer = head(0, member("0", (0, 1)), sync, waits=(in_collective("sync", 1),))
    verdict = found(trainer, head(1, member("0", (0, 1)), still_s=70.0))
    assert "2 processes in several worlds; of these 1 is watched" in verdict.headline
    assert not verdict.is_proof
    engine = head(0, dataclasses.replace(sync, entered=0, recent=()), world="engines", name="engine", still_s=0.0)
    verdict = found(trainer, head(1, member("0", (0, 1)), still_s=70.0), engine)
    assert (verdict.kind, verdict.missing) == ("straggler", ("engine",))


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_tensors_of_one_type_and_number_of_elements_are_alike(sizes: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(sizes))
    one, other = entry(1, shape=f"Float{sizes}"), entry(1, shape=f"Float{shuffled}")
    assert difference(one, other) is None
    assert difference(one, entry(1, shape=f"Float{[*sizes, 2]}")) == "other-shape"
    assert difference(one, entry(1, shape=f"Half{sizes}")) == "other-shape"
