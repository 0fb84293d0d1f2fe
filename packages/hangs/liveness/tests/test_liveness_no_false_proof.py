"""Suspicions, and what looks like a proof and is none: reported along the way, due at a timeout."""

import dataclasses
from typing import get_args

import pytest
from test_liveness_diagnosis import STALL_S, decide, declared, entry, found, head, in_collective, member, role

from offbeat_liveness._diagnosis import how_it_ended, is_over
from offbeat_liveness._diagnosis.graph import AbsentProcess, Fate, WaitGraph
from offbeat_liveness._diagnosis.mismatch import difference
from offbeat_liveness._diagnosis.proofs import find_failure
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._network.side_channel import Address
from offbeat_liveness._network.survey import SilenceHistory
from offbeat_liveness._process.proc import TreeUsage
from offbeat_liveness._process.snapshot import GroupSnapshot, LeftGroup, OutsideKind, OutsideWait, ProcessSnapshot, Wait

WORLD = (0, 1, 2)


def test_a_rank_that_ended_in_order_long_after_a_collective_was_in_it() -> None:
    """Its recorder remembers the last 32 only; the one that is waited in was before those."""
    last = tuple(entry(seq, "broadcast", done=True) for seq in range(10, 42))
    done = head(0, member("0", WORLD, *last), state="finished")
    waits = head(2, member("0", WORLD, entry(5, "broadcast")), waits=(in_collective("0", 5, "broadcast"),))
    late = head(1, member("0", WORLD, entry(4, "broadcast", done=True)), still_s=0.0)
    verdict = found(waits, late, absent=(AbsentProcess(name="rank 0", rank=0, world="w", fate="exited", head=done),))
    assert (verdict.kind, verdict.missing) == ("straggler", ("rank 1",))


def test_a_rank_that_ended_in_order_and_cannot_say_how_far_it_came_is_no_proof() -> None:
    done = head(0, dataclasses.replace(member("0", WORLD), entered=None), state="finished")
    waits = head(2, member("0", WORLD, entry(5, "broadcast")), waits=(in_collective("0", 5, "broadcast"),))
    gone = AbsentProcess(name="rank 0", rank=0, world="w", fate="exited", head=done)
    verdict = decide(waits, head(1, member("0", WORLD), still_s=0.0), absent=(gone,))
    assert verdict is None or not verdict.is_proof


def test_a_rank_that_destroyed_a_group_of_all_ranks_has_not_left_the_world() -> None:
    world = member("0", WORLD)
    left = LeftGroup(world="w", rank=1, group=member("side", WORLD))
    waits = Wait(kind="rendezvous", what="new_group", age_s=70.0, peers=WORLD, on="ranks 0-2")
    for call in (waits, Wait(kind="barrier", what="monitored_barrier", age_s=70.0, group="0")):
        zero, late = (head(rank, world, world_size=3) for rank in (0, 1))
        others = head(2, world, world_size=3, waits=(call,))
        late = dataclasses.replace(late, left_groups=(left,), still_s=0.0)
        verdict = found(dataclasses.replace(zero, waits=(call,)), late, others)
        assert (verdict.kind, verdict.is_proof, verdict.missing) == ("straggler", False, ("rank 1",))


def test_a_rank_on_its_way_from_one_world_into_the_next_has_not_left_the_next() -> None:
    """Before a world has formed, its store knows it by one name for all worlds that meet there."""
    call = Wait(kind="rendezvous", what="init_process_group", age_s=70.0, on="127.0.0.1:1")
    left = LeftGroup(world="w", rank=1, group=member("0", (0, 1)))
    verdict = found(
        head(0, world_size=2, waits=(call,), left_groups=(dataclasses.replace(left, rank=0),)),
        head(1, world_size=2, left_groups=(left,), still_s=0.0),
    )
    assert (verdict.kind, verdict.is_proof) == ("straggler", False)


def test_one_of_a_role_that_has_ended_leaves_the_others_to_act() -> None:
    gone = AbsentProcess(name="rollouter-0", fate="exited", head=head(7, name="rollouter-0", state="finished"))
    other = head(6, name="rollouter-1", world="", still_s=1.0)
    assert decide(head(0, waits=(declared("get", "rollouter", deadline_s=None),)), other, absent=(gone,)) is None
    killed = dataclasses.replace(gone, fate="killed", head=None)
    beside = found(head(0, waits=(declared("get", "rollouter", deadline_s=None),)), other, absent=(killed,))
    assert (beside.kind, beside.is_proof) == ("dead-peer", False)
    alone = found(head(0, waits=(declared("get", "rollouter", deadline_s=None),)), absent=(gone,))
    assert (alone.kind, alone.is_proof) == ("dead-peer", True)


def test_one_of_a_role_that_waits_closes_no_circle_while_another_may_act() -> None:
    asks = head(0, waits=(declared("samples.get", "rollouter"),))
    stands = head(5, name="rollouter-0", world="", waits=(declared("weights.get", "rank 0"),))
    moves = head(6, name="rollouter-1", world="", still_s=1.0)
    verdict = decide(asks, stands, moves)
    assert verdict is None or not verdict.is_proof
    assert found(asks, stands).is_proof


@pytest.mark.parametrize("error", ["ValueError: no such file", "ConnectionResetError: Connection reset by peer"])
@pytest.mark.parametrize("fate", ["silent", "stopped", "unreachable"])
def test_a_failure_elsewhere_makes_no_proof_of_a_silence(fate, error) -> None:
    """A helper that is no member has failed while rank 1 gives no answer for a while."""
    failed = head(9, name="helper", world="", state="failed", error=error)
    waits = head(0, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),))
    quiet = AbsentProcess(name="rank 1", rank=1, world="w", fate=fate)
    graph = WaitGraph(heads=(waits, failed), absent=(quiet,), stall_after_s=60.0)
    assert find_failure(graph) is None
    assert not found(waits, failed, absent=(quiet,)).is_proof


def test_queues_of_devices_prove_nothing_and_of_two_worlds_are_not_compared() -> None:
    """Each may be behind work of its own: a look does not distinguish a long queue from a crossed one."""

    def queued(group: str) -> GroupSnapshot:
        call = dataclasses.replace(entry(1, group=group), backend="nccl")
        return dataclasses.replace(member(group, (0, 1), call), backend="nccl")

    stands = head(0, queued("a"), queued("b"), waits=(in_collective("a", 1),))
    other = head(0, queued("a"), queued("b"), world="engines", name="engine", still_s=0.0)
    late = head(1, member("a", (0, 1)), member("b", (0, 1)), still_s=0.0)
    assert found(stands, late, other).kind == "straggler"
    assert not found(stands, dataclasses.replace(other, world="w", name="rank 1", rank=1)).is_proof


@pytest.mark.parametrize("op", ["broadcast", "all_gather_into_tensor", "all_gather_single", "all_gather"])
def test_bytes_that_are_only_copied_may_be_called_by_two_types(op) -> None:
    """A member may give a view of other type: what goes over the wire is the same."""
    mine, theirs = (dataclasses.replace(entry(1, op, shape=shape), backend="gloo") for shape in ("Long[2]", "Byte[16]"))
    assert difference(mine, theirs) is None
    assert difference(mine, dataclasses.replace(theirs, inputs=("Byte[17]",))) == "other-shape"
    assert difference(mine, dataclasses.replace(theirs, inputs=("SomethingNew[2]",))) is None


def test_a_batch_of_transfers_waits_for_more_than_the_one_that_has_left() -> None:
    call = Wait(kind="p2p", what="batch_isend_irecv", age_s=70.0, group="0", peers=(1, 2))
    left = LeftGroup(world="w", rank=1, group=member("0", WORLD))
    waits = head(0, member("0", WORLD), waits=(call,))
    verdict = found(waits, head(1, left_groups=(left,)), head(2, member("0", WORLD), still_s=0.0))
    assert not verdict.is_proof
    gone = AbsentProcess(name="rank 1", rank=1, world="w", fate="exited", head=head(1, state="finished"))
    assert not found(waits, head(2, member("0", WORLD), still_s=0.0), absent=(gone,)).is_proof


def test_a_rank_past_a_rendezvous_is_not_waited_for_in_it() -> None:
    """Torch lets each member go as soon as it is ready: rank 1 still connects, and rank 0 trains already."""
    zero = head(0, member("0", (0, 1), entry(1)), world_size=2, waits=(in_collective("0", 1),))
    call = Wait(kind="rendezvous", what="init_process_group", age_s=70.0, on="127.0.0.1:1")
    assert not found(zero, head(1, world_size=2, waits=(call,))).is_proof
    side = member("1", (0, 1), entry(1, group="1"))
    zero = head(0, member("0", (0, 1)), side, world_size=2, waits=(in_collective("1", 1),))
    call = Wait(kind="rendezvous", what="new_group", age_s=70.0, peers=(0, 1), on="ranks 0-1")
    assert not found(zero, head(1, member("0", (0, 1)), world_size=2, waits=(call,))).is_proof


def test_an_operation_of_gloo_beside_which_its_thread_computes_holds_up_no_rank() -> None:
    groups = [dataclasses.replace(member(name, (0, 1), entry(1, group=name)), backend="gloo") for name in ("a", "b")]
    computes = head(0, groups[0], waits=(in_collective("a", 1, thread="MainThread"),), busy=0.9, tree_busy=1.0)
    computes = dataclasses.replace(computes, groups=(groups[0], dataclasses.replace(groups[1], recent=(), entered=0)))
    waits = head(1, dataclasses.replace(groups[0], recent=(), entered=0), groups[1], waits=(in_collective("b", 1),))
    verdict = found(computes, waits)
    assert (verdict.kind, verdict.is_proof, verdict.missing) == ("straggler", False, ("rank 0",))


def test_roots_of_calls_that_nothing_numbers_are_not_compared() -> None:
    first = in_collective("0", 0, "broadcast", root=0)
    verdict = found(
        head(0, member("0", WORLD), still_s=0.0),
        head(1, member("0", WORLD), waits=(first,)),
        head(2, member("0", WORLD), waits=(dataclasses.replace(first, root=1),)),
    )
    assert not verdict.is_proof


def test_a_circle_in_which_a_process_has_not_answered_is_no_proof() -> None:
    ranks = (0, 1)
    one = head(0, member("a", ranks, entry(1, group="a")), member("b", ranks), waits=(in_collective("a", 1),))
    other = head(1, member("a", ranks), member("b", ranks, entry(1, group="b")), waits=(in_collective("b", 1),))
    assert found(one, other).is_proof
    assert not found(one, dataclasses.replace(other, has_answered=False)).is_proof


def outside(text: str, age_s: float = 70.0, **more: object) -> Wait:
    wait = OutsideWait(**{"kind": "http", "text": text, **more})  # type: ignore[arg-type]
    return Wait(kind="outside", what="http", age_s=age_s, outside=wait)


def test_the_process_that_the_missing_one_waits_for_is_reported_along_the_way() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    asks = head(1, member("0", world), waits=(outside("an HTTP answer of 127.0.0.1:8000", address="127.0.0.1:8000"),))
    engine = role("engine-0", listens=(8000,), waits=(outside("queue.get: the queue is empty"),))
    verdict = found(waits, asks, engine)
    assert verdict.missing == ("rank 1",)
    assert not verdict.is_proof
    chain = "it waits for an HTTP answer of 127.0.0.1:8000, which is engine-0, which waits for queue.get"
    assert chain in verdict.headline


def test_a_run_that_stands_in_queues_only_is_reported() -> None:
    heads = [head(rank, waits=(outside("queue.get: the queue is empty"),)) for rank in (0, 1)]
    assert found(*heads).kind == "standstill"
    assert decide(heads[0], dataclasses.replace(heads[1], still_s=1.0, waits=())) is None


@pytest.mark.parametrize("fate", ["silent", "stopped", "unreachable", "never-came", "unwatched"])
def test_a_run_that_stands_in_queues_is_not_said_to_stand_while_a_process_has_not_answered(fate: Fate) -> None:
    """It may be at work on what the others wait for."""
    heads = [head(rank, waits=(outside("queue.get: the queue is empty"),)) for rank in (0, 1)]
    assert decide(*heads, absent=(AbsentProcess(name="rank 2", rank=2, world="w", fate=fate),)) is None


def test_services_that_wait_for_requests_are_no_run_that_stands() -> None:
    services = [role(f"engine-{n}", waits=(outside("queue.get: the queue is empty"),)) for n in (0, 1)]
    assert decide(*services) is None
    assert found(*services, head(0, waits=(outside("queue.get: the queue is empty"),))).kind == "standstill"


@pytest.mark.parametrize("kind", get_args(OutsideKind))
def test_a_long_import_file_sleep_or_prompt_is_no_standstill_of_the_run(kind: str) -> None:
    verdict = decide(*(head(rank, waits=(outside("what it waits for", kind=kind),)) for rank in (0, 1)))
    if kind in ("import", "file", "sleep", "terminal", "debugger"):
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.kind == "standstill"


def test_a_process_that_crashed_explains_one_that_was_killed_after_it() -> None:
    waits = head(2, member("0", WORLD, entry(1)), waits=(in_collective("0", 1, age_s=0.1),))
    gone = [
        AbsentProcess(name=f"rank {rank}", rank=rank, world="w", fate=fate, head=head(rank, member("0", WORLD)))
        for rank, fate in enumerate(("killed", "crashed"))
    ]
    for absent in (gone, gone[::-1]):
        verdict = find_failure(WaitGraph(heads=(waits,), absent=tuple(absent), stall_after_s=STALL_S))
        assert verdict is not None
        assert (verdict.missing, verdict.fate) == (("rank 1",), "crashed")


def test_a_suspicion_is_due_at_the_timeout_of_what_is_waited_in() -> None:
    world = (0, 1)
    group = dataclasses.replace(member("0", world, entry(1)), timeout_s=1800.0)
    verdict = found(head(0, group, waits=(in_collective("0", 1),)), head(1, member("0", world)))
    assert verdict.due_in_s == 1730.0
    assert "(in 1730 s), when the timeout of the default group is over" in verdict.text


def test_of_two_groups_that_stall_only_one_is_reported_at_a_time() -> None:
    groups = {name: member(name, ranks) for name, ranks in (("a", (0, 1)), ("b", (2, 3)))}
    calls = {
        name: dataclasses.replace(group, recent=(entry(1, group=name),), entered=1) for name, group in groups.items()
    }
    verdict = found(
        head(0, calls["a"], waits=(in_collective("a", 1, age_s=80.0),)),
        head(1, groups["a"]),
        head(2, calls["b"], waits=(in_collective("b", 1),)),
        head(3, groups["b"]),
    )
    assert (verdict.group, verdict.missing, verdict.arrived) == ("a", ("rank 1",), ("rank 0",))


def test_a_call_of_which_nothing_is_known_is_no_circle() -> None:
    group = dataclasses.replace(member("0", (0, 1)), entered=None)
    stuck = [head(rank, group, waits=(in_collective("0", 3),)) for rank in (0, 1)]
    assert found(*stuck).kind == "stuck-call"


def test_a_circle_is_due_at_the_first_timeout_in_it() -> None:
    serves = dataclasses.replace(member("0", (0, 1), entry(1)), timeout_s=1800.0)
    asks = Wait(kind="outside", what="http", age_s=70.0, outside=OutsideWait(kind="http", text="an answer", pid=1))
    verdict = found(head(0, member("0", (0, 1)), waits=(asks,)), head(1, serves, waits=(in_collective("0", 1),)))
    assert (verdict.kind, verdict.is_proof, verdict.due_in_s) == ("wait-cycle", False, 1730.0)


def test_one_that_still_looks_for_the_store_of_a_world_is_on_its_way_in() -> None:
    """On a busy machine the ranks of one start stand in other parts of `init_process_group`: that is no circle."""
    asks_store = Wait(kind="rendezvous", what="init_process_group", age_s=70.0, on="127.0.0.1:29500")
    meets = dataclasses.replace(asks_store, on="")
    verdict = found(head(0, waits=(asks_store,), world_size=2), head(1, waits=(meets,), world_size=2))
    assert (verdict.kind, verdict.is_proof) == ("stuck-call", False)


def test_no_process_is_ended_before_a_wait_that_the_missing_one_has_declared() -> None:
    group = dataclasses.replace(member("0", (0, 1), entry(1)), timeout_s=50.0)
    uploads = declared("upload", "", deadline_s=600.0)
    verdict = found(head(0, member("0", (0, 1)), waits=(uploads,)), head(1, group, waits=(in_collective("0", 1),)))
    assert (verdict.missing, verdict.due_in_s) == (("rank 0",), 530.0)


def test_a_stall_is_over_when_those_that_waited_say_so() -> None:
    called = member("0", (0, 1), entry(1))
    waits, late = head(0, called, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1)))
    verdict = found(waits, late)
    overlaps = dataclasses.replace(waits, waits=())
    assert not is_over(WaitGraph(heads=[waits, late], stall_after_s=STALL_S), verdict)
    assert not is_over(
        WaitGraph(heads=[dataclasses.replace(overlaps, has_answered=False)], stall_after_s=STALL_S), verdict
    )
    assert is_over(WaitGraph(heads=[overlaps, late], stall_after_s=STALL_S), verdict)


def test_a_stall_is_not_over_because_the_waiting_rank_is_too_busy_to_answer() -> None:
    """On a machine with too much to do a process uses time, so it moves, and says nothing of its waits."""
    called = member("0", (0, 1), entry(1))
    waits, late = head(0, called, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1)))
    verdict = found(waits, late)
    silences, address = SilenceHistory(), Address(host="", port=1, machine="vm", pid=0, born=0, name="rank 0", rank=0)
    for time_s in (0.0, 1.0):
        silences.note(("vm", 0), TreeUsage(cpu_s=time_s, time_s=time_s, num_processes=1))
    busy = silences.stand_in(address, 70.0)
    assert busy.has_answered, "it moves"
    assert not is_over(WaitGraph(heads=[busy, late], stall_after_s=STALL_S), verdict)


def test_no_rank_is_said_to_have_come_that_has_not() -> None:
    called = member("0", (0, 1), entry(1))
    waits, late = head(0, called, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1)))
    verdict = found(waits, late)
    overlaps, came = dataclasses.replace(waits, waits=()), dataclasses.replace(late, groups=(called,))
    words = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    timed_out = AbsentProcess(name="rank 0", rank=0, world="w", fate="raised", text=words, head=waits)

    def end_text(*heads: ProcessSnapshot, absent: tuple[AbsentProcess, ...] = ()) -> str:
        ending = how_it_ended(WaitGraph(heads=heads, absent=absent, stall_after_s=STALL_S), verdict)
        return ending.what + ending.why

    assert end_text(overlaps, came) == "it moves again: rank 1 came"
    assert end_text(overlaps, late) == "it moves again: rank 0 went on without rank 1"
    assert end_text(late, absent=(timed_out,)) == f"the wait has failed: rank 0 raised {words}; rank 1 has not come"


def test_a_wait_for_an_unknown_producer_has_not_ended_well_while_its_timeout_may_be_raising() -> None:
    gets = Wait(kind="store", what="store.get", on="key 'here/0', which nobody has set", age_s=70.0, timeout_s=80.0)
    waits = head(0, waits=(gets,))
    verdict = found(waits)
    assert not verdict.missing
    unwinding = dataclasses.replace(waits, waits=())
    failed = dataclasses.replace(unwinding, state="failed", error="DistStoreError: wait timeout after 80000ms")
    open_end, failure = (
        how_it_ended(WaitGraph(heads=[each], stall_after_s=STALL_S), verdict) for each in (unwinding, failed)
    )
    assert open_end.is_open
    assert not failure.is_open
    assert failure.has_failed
    assert "DistStoreError" in failure.why
    endless = dataclasses.replace(verdict, due_in_s=None)
    assert not how_it_ended(WaitGraph(heads=[unwinding], stall_after_s=STALL_S), endless).is_open


def test_a_rank_that_is_gone_without_a_word_has_not_failed_before_its_word_had_time_to_come() -> None:
    called = member("0", (0, 1), entry(1))
    waits, late = head(0, called, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1)))
    verdict = found(waits, late)
    overlaps = dataclasses.replace(late, groups=(called,))
    gone = AbsentProcess(name="rank 0", rank=0, world="w", fate="killed", head=waits)
    ending = how_it_ended(WaitGraph(heads=[overlaps], absent=(gone,), stall_after_s=STALL_S), verdict)
    assert ending.has_failed
    assert ending.is_open
    crashed = dataclasses.replace(gone, fate="crashed", text="Segmentation fault")
    assert not how_it_ended(WaitGraph(heads=[overlaps], absent=(crashed,), stall_after_s=STALL_S), verdict).is_open


def test_a_receive_from_any_rank_is_no_call_that_all_are_in() -> None:
    receives = Wait(kind="p2p", what="recv_anysource", age_s=70.0, group="0")
    verdict = found(head(0, member("0", (0, 1)), waits=(receives,)), head(1, member("0", (0, 1))))
    assert verdict.kind == "starved"
    assert "rank 0 waits in recv_anysource for a message of any rank, which nobody has sent" in verdict.headline
    late = found(head(0, member("0", (0, 1)), waits=(receives,)), head(1, member("0", (0, 1)), still_s=0.0))
    assert (late.kind, late.is_proof) == ("straggler", False)


def test_a_missing_rank_that_is_in_a_call_of_torch_is_reported_with_that() -> None:
    """Groups that are made in another order have other names, and their members look for each other in vain."""
    world, pair = (0, 1, 2), member("1", (0, 1), entry(1, group="1", done=True))
    call = Wait(kind="rendezvous", what="new_group", age_s=70.0, peers=(0, 1), on="ranks 0-1")
    verdict = found(
        head(0, member("0", world), waits=(call,), world_size=3),
        head(1, member("0", world), pair, world_size=3),
        head(2, member("0", world, entry(1)), waits=(in_collective("0", 1),), world_size=3),
    )
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 0", "rank 1"))
    assert (
        "ranks 0, 1 have not come to all_reduce Float[4] on the default group: rank 0 is in new_group" in verdict.text
    )
    assert "make the groups in the same order on every rank" in verdict.advice


def test_a_rank_that_has_not_answered_yet_is_not_said_to_move() -> None:
    """It may hold the GIL and compute, or hang there: that is known after several looks."""
    silent = head(1, still_s=0.0, threads=(), has_answered=False, notes=("rank 1 does not answer (1 of 3 looks)",))
    verdict = found(head(0, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),)), silent)
    assert (verdict.kind, verdict.is_proof) == ("straggler", False)
    assert "rank 1 is silent so far, and may only be slow" in verdict.headline
    assert "moving" not in verdict.text
    assert "py-spy dump --native" in verdict.advice


def test_a_death_is_reported_once_in_whatever_call_it_is_met() -> None:
    death = Verdict(
        kind="dead-peer", certainty="proof", headline="", stalled_s=1.0, time_s=0.0, group="0", missing=("rank 1",)
    )
    assert death.key == dataclasses.replace(death, group="side", op="barrier", seq=7).key
