"""What is told of a stall that nothing proves: who, when it is due, and when it is over."""

import dataclasses

from test_liveness_diagnosis import STALL_S, decide, declared, entry, found, head, in_collective, member, role

from offbeat_liveness._diagnosis import is_over
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._process.snapshot import OutsideWait, Wait


def outside(text: str, age_s: float = 70.0, **more: object) -> Wait:
    wait = OutsideWait(kind="http", text=text, **more)  # type: ignore[arg-type]
    return Wait(kind="outside", what="http", age_s=age_s, outside=wait)


def test_whom_the_missing_one_waits_for_is_told_along_the_way() -> None:
    world = (0, 1)
    waits = head(0, member("0", world, entry(1)), waits=(in_collective("0", 1),))
    asks = head(1, member("0", world), waits=(outside("an HTTP answer of 127.0.0.1:8000", address="127.0.0.1:8000"),))
    engine = role("engine-0", listens=(8000,), waits=(outside("queue.get: the queue is empty"),))
    verdict = found(waits, asks, engine)
    assert verdict.missing == ("rank 1",)
    assert not verdict.is_proof
    chain = "it waits for an HTTP answer of 127.0.0.1:8000, which is engine-0, which waits for queue.get"
    assert chain in verdict.headline


def test_a_run_that_stands_in_queues_only_is_told() -> None:
    heads = [head(rank, waits=(outside("queue.get: the queue is empty"),)) for rank in (0, 1)]
    assert found(*heads).kind == "standstill"
    assert decide(heads[0], dataclasses.replace(heads[1], still_s=1.0, waits=())) is None


def test_a_suspicion_is_due_at_the_timeout_of_what_is_waited_in() -> None:
    world = (0, 1)
    group = dataclasses.replace(member("0", world, entry(1)), timeout_s=1800.0)
    verdict = found(head(0, group, waits=(in_collective("0", 1),)), head(1, member("0", world)))
    assert verdict.due_in_s == 1730.0
    assert "(in 1730 s), when the timeout of the default group is over" in verdict.text


def test_of_two_groups_that_stall_only_one_is_told_of_at_a_time() -> None:
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


def test_nobody_is_ended_before_a_wait_that_the_missing_one_has_declared() -> None:
    group = dataclasses.replace(member("0", (0, 1), entry(1)), timeout_s=50.0)
    uploads = declared("upload", "", deadline_s=600.0)
    verdict = found(head(0, member("0", (0, 1)), waits=(uploads,)), head(1, group, waits=(in_collective("0", 1),)))
    assert (verdict.missing, verdict.due_in_s) == (("rank 0",), 530.0)


def test_a_stall_is_over_when_those_who_waited_say_so() -> None:
    called = member("0", (0, 1), entry(1))
    waits, late = head(0, called, waits=(in_collective("0", 1),)), head(1, member("0", (0, 1)))
    verdict = found(waits, late)
    goes_on = dataclasses.replace(waits, waits=())
    assert not is_over(WaitGraph(heads=[waits, late], stall_after_s=STALL_S), verdict)
    assert not is_over(WaitGraph(heads=[dataclasses.replace(goes_on, is_heard=False)], stall_after_s=STALL_S), verdict)
    assert is_over(WaitGraph(heads=[goes_on, late], stall_after_s=STALL_S), verdict)


def test_a_death_is_told_once_in_whatever_call_it_is_met() -> None:
    death = Verdict(
        kind="dead-peer", certainty="proof", headline="", stalled_s=1.0, time_s=0.0, group="0", missing=("rank 1",)
    )
    assert death.key == dataclasses.replace(death, group="side", op="barrier", seq=7).key
