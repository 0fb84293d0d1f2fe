"""The report of a verdict about each process: all of its threads that stand in something, and what to do about it."""

import dataclasses
from typing import get_args

import pytest
from test_liveness_diagnosis import STALL_S, entry, found, head, in_collective, member

from offbeat_liveness._diagnosis.build import ADVICE_OUTSIDE
from offbeat_liveness._process.snapshot import CallSite, OutsideKind, OutsideWait, ThreadSnapshot, Wait

WORLD = (0, 1, 2)
COLLECT, DRAIN = (CallSite(file="/job/train.py", line=line, function="f") for line in (8, 16))


def thread(name: str, outside: OutsideWait | None, still_s: float = STALL_S) -> ThreadSnapshot:
    return ThreadSnapshot(name=name, still_s=still_s, stack=(DRAIN,), outside=outside)


NOTIFIED = OutsideWait(kind="lock", text="threading.Condition.wait: nobody has notified it")
STATE_LOCK = OutsideWait(kind="lock", text="the lock state_lock", on="state_lock")


def test_the_main_thread_is_reported_beside_the_one_that_stands_in_a_collective() -> None:
    collects = Wait(
        kind="collective", what="all_reduce", age_s=70.0, thread="collector", group="side", seq=1, stack=(COLLECT,)
    )
    zero = dataclasses.replace(
        head(0, member("0", (0, 1)), member("side", (0, 1), entry(1, group="side")), waits=(collects,)),
        threads=(thread("collector", None), thread("MainThread", NOTIFIED), thread("quick", STATE_LOCK, still_s=1.0)),
    )
    one = head(1, member("0", (0, 1), entry(1)), member("side", (0, 1)), waits=(in_collective("0", 1),))
    verdict = found(zero, one)
    parties = [(each.doing, each.stack) for each in verdict.parties if each.name == "rank 0"]
    assert parties[0][1] == (COLLECT,)
    assert parties[1:] == [
        ("its thread 'MainThread' waits for threading.Condition.wait: nobody has notified it", (DRAIN,))
    ]
    assert "  rank 0: its thread 'MainThread' waits for" in verdict.text


def test_a_thread_before_a_lock_is_reported_beside_a_main_thread_outside_torch() -> None:
    asleep = OutsideWait(kind="future", text="a concurrent.futures.Future (pending)")
    away = dataclasses.replace(
        head(0, member("0", (0, 1))), threads=(thread("MainThread", asleep), thread("server", STATE_LOCK))
    )
    verdict = found(away, head(1, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),)))
    assert [each.doing for each in verdict.parties if each.name == "rank 0"][1] == (
        "its thread 'server' waits for the lock state_lock"
    )


def test_a_thread_before_a_lock_does_not_speak_for_the_main_thread() -> None:
    """Each of the two holds the lock that the other one wants."""
    disk = OutsideWait(kind="lock", text="the lock disk_lock, which is held by the thread 'flusher'", on="disk_lock")
    away = dataclasses.replace(
        head(0, member("0", (0, 1))), threads=(thread("MainThread", disk), thread("flusher", STATE_LOCK))
    )
    verdict = found(away, head(1, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),)))
    assert f"it waits for {disk.text}; rank 1" in verdict.headline


def test_a_rank_that_waits_for_a_key_is_reported_with_it_wherever_the_store_is() -> None:
    """The kernel only sees that it waits for a socket."""
    key = Wait(kind="store", what="store.get", age_s=70.0, on="cmd/1")
    socket = OutsideWait(kind="socket", text="a socket to 127.0.0.1:29777", address="127.0.0.1:29777")
    ranks = [
        dataclasses.replace(
            head(rank, member("0", WORLD), waits=(key,)), threads=(thread("MainThread", socket),), host="here"
        )
        for rank in (1, 2)
    ]
    alone = head(0, member("0", WORLD, entry(1)), waits=(in_collective("0", 1),))
    zero = dataclasses.replace(alone, listens=(29777,), host="here")
    verdict = found(zero, *ranks)
    assert verdict.headline == (
        "ranks 1, 2 have not come to all_reduce Float[4] on the default group: rank 1 is in store.get for key 'cmd/1', "
        "a key of the store in rank 0; rank 0 waits in it"
    )
    assert "set that key" in verdict.advice


@pytest.mark.parametrize("kind", get_args(OutsideKind))
def test_what_to_do_about_a_rank_that_stands_is_no_longer_timeout(kind: OutsideKind) -> None:
    away = dataclasses.replace(
        head(0, member("0", (0, 1))), threads=(thread("MainThread", OutsideWait(kind=kind, text="something")),)
    )
    verdict = found(away, head(1, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),)))
    assert verdict.advice == ADVICE_OUTSIDE[kind]
    assert "timeout" not in verdict.advice


def test_a_rank_that_moves_may_be_given_more_time() -> None:
    away = dataclasses.replace(head(0, member("0", (0, 1))), still_s=0.0)
    verdict = found(away, head(1, member("0", (0, 1), entry(1)), waits=(in_collective("0", 1),)))
    assert verdict.kind == "straggler"
    assert "give the group a longer timeout" in verdict.advice


def test_ranks_that_are_all_there_and_do_not_reach_each_other_are_not_said_to_be_missing() -> None:
    """As after a restart, with addresses of the ranks before in the store."""
    call = Wait(kind="rendezvous", what="init_process_group", age_s=70.0, on="127.0.0.1:1")
    verdict = found(*(head(rank, world_size=2, waits=(call,)) for rank in (0, 1)))
    assert (verdict.kind, verdict.is_proof, verdict.missing) == ("stuck-call", False, ())
    assert verdict.headline == ("ranks 0, 1 are all in init_process_group (127.0.0.1:1), and do not reach each other")
    assert verdict.arrived == ("rank 0", "rank 1")
    assert "world size" not in verdict.advice
    fewer = found(*(head(rank, world_size=3, waits=(call,)) for rank in (0, 1)))
    assert fewer.kind == "missing-member"
