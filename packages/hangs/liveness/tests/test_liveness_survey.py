"""A look around: a silent process is dead only after several looks without progress; large runs send summaries."""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._network.address_book import Key
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Address, Listener, Message
from offbeat_liveness._network.survey import (
    FEW,
    PATIENT_LOOKS,
    SilenceHistory,
    Survey,
    choose_few,
    head_answer,
    read_summary,
    states_of_pids,
    summarize,
    summary_data,
)
from offbeat_liveness._process.proc import HOST, TreeUsage
from offbeat_liveness._process.snapshot import (
    CallSite,
    Collective,
    GroupSnapshot,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
    to_data,
)

STALL_S = 60.0
OWN = ProcessSnapshot(key="own", name="rank 0", rank=0, world="", world_size=2, waits=())
COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def peers() -> Iterator[Peers]:
    found = Peers(None, "rank 0", dict)
    found.invite("127.0.0.1")  # makes the secret
    yield found
    found.close()


@contextlib.contextmanager
def a_silent_process(code: str, machine: str = HOST) -> Iterator[Address]:
    """It runs, and takes connections as a monitor does that cannot get the GIL: it never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield Address(
                host="127.0.0.1", port=server.getsockname()[1], machine=machine, pid=process.pid, born=0, name="rank 1",
                rank=1,
            )  # fmt: skip
        finally:
            process.kill()


def fates(graph: WaitGraph) -> dict[str, str]:
    return {each.name: each.fate for each in graph.absent}


@pytest.mark.nightly
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_process_that_computes_without_answering_is_slow_however_often_one_looks(peers: Peers, is_here: bool) -> None:
    machine = HOST if is_here else "another host"
    with a_silent_process(COMPUTES, machine) as address, a_witness(peers, machine):
        peers.learn(address)
        survey = Survey(peers, None)
        for _ in range(PATIENT_LOOKS + 2):
            graph = survey.look(OWN, {}, {}, stall_after_s=STALL_S)
            assert "rank 1" not in fates(graph)
        head = graph.by_name["rank 1"]
        assert head.busy >= 0.25
        assert "does not answer, but computes" in head.notes[0]


@contextlib.contextmanager
def a_witness(peers: Peers, machine: str) -> Iterator[None]:
    """A process that answers on another host; that host's /proc is this one's."""
    if machine == HOST:
        yield
        return

    def answer(message: Message) -> Message:
        if message["ask"] == "pids":
            return json.loads(json.dumps(states_of_pids(message["pids"])))  # type: ignore[no-any-return]
        return head_answer(ProcessSnapshot(key="w", name="witness"), in_brief=False)

    listener = Listener("127.0.0.1", lambda: peers.secret, answer)
    try:
        peers.learn(Address(host=listener.host, port=listener.port, machine=machine, pid=1, born=0, name="witness"))
        yield
    finally:
        listener.close()


@pytest.mark.nightly
@pytest.mark.timeout(60)
def test_a_process_that_does_nothing_is_silent_after_several_looks(peers: Peers) -> None:
    with a_silent_process(SLEEPS) as address:
        peers.learn(address)
        survey, seen = Survey(peers, None), []
        for _ in range(PATIENT_LOOKS + 2):
            graph = survey.look(OWN, {}, {}, stall_after_s=STALL_S)
            seen.append(fates(graph).get("rank 1", "there"))
    # Its start may fall into the first look.
    assert seen[: PATIENT_LOOKS - 1] == ["there"] * (PATIENT_LOOKS - 1)
    assert seen[-1] == "silent"


def test_progress_begins_the_count_anew() -> None:
    silences, key = SilenceHistory(), ("vm", 1)
    address = Address(host="", port=1, machine="vm", pid=1, born=0, name="rank 1")
    usages = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 2.0), (4.0, 2.0), (5.0, 2.0)]
    over = []
    for time_s, cpu_s in usages:
        silences.note(key, TreeUsage(cpu_s=cpu_s, time_s=time_s, num_processes=1))
        over.append(silences.is_over(key, "silent"))
    assert over == [False, False, True, False, False, True]
    silences.note_answers([key])
    assert not silences.is_over(key, "unreachable")
    assert silences.is_over(key, "killed")
    assert silences.stand_in(address, 7.0).still_s == 7.0


def test_writing_is_progress_too() -> None:
    silences, key = SilenceHistory(), ("vm", 1)
    for number in range(5):
        silences.note(key, TreeUsage(io_bytes=number << 20, time_s=float(number), num_processes=1))
    assert not silences.is_over(key, "silent")


SITE = CallSite(file="train.py", line=7, function="step")


def a_collective(seq: int, *, done: bool = True, op: str = "all_reduce") -> Collective:
    return Collective(group="0", seq=seq, op=op, inputs=("Float[3]",), done=done, call_site=SITE)


def a_rank(rank: int, size: int, *recent: Collective, waits_in: int = 0) -> ProcessSnapshot:
    group = GroupSnapshot(
        name="0", ranks=tuple(range(size)), entered=recent[-1].seq if recent else 0, recent=recent, size=size
    )
    unused = GroupSnapshot(name="1", ranks=tuple(range(0, size, 2)))
    wait = Wait(kind="collective", what="all_reduce", age_s=75.0, group="0", seq=waits_in, stack=(SITE,) * 9)
    return ProcessSnapshot(
        key=f"vm:{rank}", name=f"rank {rank}", rank=rank, world="w", world_size=size, pid=rank, host="vm", still_s=75.0,
        waits=(wait,) if waits_in else (), groups=(group, unused),
        threads=(ThreadSnapshot(name="MainThread", still_s=75.0, stack=(SITE,) * 9),),
    )  # fmt: skip


def test_a_brief_head_comes_through_as_it_is() -> None:
    head = dataclasses.replace(
        a_rank(3, 8, *map(a_collective, range(1, 33)), a_collective(33, done=False), waits_in=33), left=(a_rank(5, 8),)
    )
    data = json.loads(json.dumps(summary_data(head)))
    read, left = read_summary(data)
    assert read == summarize(head)
    assert left == [("vm", 5)]
    assert [each.name for each in read.groups] == ["0"]
    assert [each.seq for each in read.groups[0].recent] == [32, 33]
    assert len(read.waits[0].stack) == 3
    assert read.threads[0].stack == ()
    assert len(json.dumps(data)) < len(json.dumps(to_data(head))) / 8


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2, 3), (1, 5, 9, 13), (0, 1, 3), (3, 2, 1, 0)])
def test_ranks_of_a_group_come_through_as_they_are(ranks: tuple[int, ...]) -> None:
    head = ProcessSnapshot(key="k", name="n", groups=(GroupSnapshot(name="0", ranks=ranks, entered=3),))
    assert read_summary(json.loads(json.dumps(summary_data(head))))[0].groups[0].ranks == ranks


def test_an_operation_that_a_brief_head_has_forgotten_is_asked_for() -> None:
    """Rank 1 did something else in place 5, and has continued."""
    waits = [
        a_rank(rank, 4, *map(a_collective, range(1, 5)), a_collective(5, done=False), waits_in=5) for rank in (0, 2, 3)
    ]
    other = a_rank(
        1, 4, *map(a_collective, range(1, 5)), a_collective(5, op="broadcast"), *map(a_collective, range(6, 10))
    )
    heads = [summarize(each) for each in (*waits, other)]
    assert find_verdict(WaitGraph(heads=heads, stall_after_s=STALL_S)) != find_verdict(
        WaitGraph(heads=[*waits, other], stall_after_s=STALL_S)
    )
    assert "rank 1" in choose_few(WaitGraph(heads=heads, stall_after_s=STALL_S))


@pytest.mark.timeout(60)
def test_in_a_large_run_all_answer_in_brief_and_the_few_that_matter_in_full(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat_liveness._network.survey.FIRST_CALL_S", 20.0)  # all of them are this one process
    size, absent = 2 * FEW, 70
    asked: list[tuple[int, bool]] = []

    def head_of(rank: int) -> ProcessSnapshot:
        done = tuple(map(a_collective, range(1, 33)))
        return (
            a_rank(rank, size, *done)
            if rank == absent
            else a_rank(rank, size, *done, a_collective(33, done=False), waits_in=33)
        )

    def answering(rank: int) -> Listener:
        def answer(message: Message) -> Message:
            asked.append((rank, bool(message.get("brief"))))
            return head_answer(head_of(rank), in_brief=bool(message.get("brief")))

        return Listener("127.0.0.1", lambda: peers.secret, answer)

    listeners = {rank: answering(rank) for rank in range(1, size)}
    try:
        for rank, each in listeners.items():
            peers.learn(
                Address(
                    host=each.host,
                    port=each.port,
                    machine="vm",
                    pid=rank,
                    born=0,
                    name=f"rank {rank}",
                    rank=rank,
                    world="w",
                )
            )
        graph = Survey(peers, None).look(head_of(0), {}, {}, stall_after_s=STALL_S)
    finally:
        for each in listeners.values():
            each.close()
    verdict = find_verdict(graph)
    assert verdict is not None
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 70",))
    assert {rank for rank, in_brief in asked if in_brief} == set(range(1, size))
    in_full = {rank for rank, in_brief in asked if not in_brief}
    assert absent in in_full
    assert len(in_full) <= 2 * FEW
    assert graph.by_name["rank 70"].threads[0].stack


def test_keys_of_the_address_book_are_machine_and_pid(peers: Peers) -> None:
    key: Key = ("vm", 1)
    peers.learn(Address(host="", port=1, machine="vm", pid=1, born=0, name="x"))
    assert asdict(peers.others()[key])["name"] == "x"


@pytest.mark.timeout(60)
def test_a_process_that_waited_when_it_last_answered_is_still_in_that_wait(peers: Peers) -> None:
    """A rank that a loaded machine lets answer late has come to the barrier that it said it is in."""
    in_barrier = Wait(kind="collective", what="barrier", age_s=7.0, group="0", seq=1)
    with a_silent_process(COMPUTES) as address:
        peers.learn(address)
        survey = Survey(peers, None)
        key = (address.machine, address.pid)
        said = ProcessSnapshot(key="x", name="rank 1", rank=1, waits=(in_barrier,), time_s=time.time() - 5.0)
        survey._said[key] = said
        found = survey.look(OWN, {}, {}, stall_after_s=STALL_S).by_name["rank 1"]
    assert not found.has_answered
    assert found.waits == (in_barrier,)


def test_a_look_is_not_held_up_by_many_ranks_whose_queues_of_connections_are_full(peers: Peers) -> None:
    """Native code that holds the GIL for long fills them: no thread accepts the others' questions."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        door = server.getsockname()
        with contextlib.suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection(door, timeout=0.3))
        addresses = [
            Address(host=door[0], port=door[1], machine=HOST, pid=pid, born=0, name=f"pid {pid}") for pid in range(40)
        ]
        quiet: dict[Key, Address] = {(HOST, each.pid): each for each in addresses}
        begun_s = time.monotonic()
        heads = Survey(peers, None)._stand_ins(quiet, dict.fromkeys(quiet, "silent"), {}, {})
        assert time.monotonic() - begun_s < 2.0
    assert heads.keys() == quiet.keys()
