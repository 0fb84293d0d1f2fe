"""nccl's dumps in the format of 2.11 to 2.13, and its recorder, which may not answer.

Torch's server of such questions is the real one; what it asks is a stand-in, under a name of its own.
"""

import ast
import atexit
import ctypes
import fcntl
import json
import os
import pickle
import resource
import socket
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_dumps import (
    CREATED_NS,
    THREAD,
    Dump,
    crossed_groups,
    different_ops,
    hung_batch,
    missing_in_coalesced,
    missing_member,
    ranks_of,
    started_and_stuck,
)

from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._process import nccl_recorder, reading
from offbeat_liveness._process.flight_recorder import group_of, of_this_life, parse_entries, parse_transfers
from offbeat_liveness._process.nccl_recorder import NCCL, NcclRecorder
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import GroupSnapshot, ProcessSnapshot, ThreadSnapshot

STALL_S = 60.0


class StandingThreads:
    """Stand-in for the threads of a process, all of which have made no progress for long."""

    def __init__(self) -> None:
        self.calls: dict[int, None] = {}
        self.progress = ProgressTracker(STALL_S)

    def still_s(self, ident: int, since_s: float) -> float:
        return 70.0

    def is_elsewhere(self, ident: int, backend: str) -> bool:
        return False

    def polls(self, ident: int) -> bool:
        return False

    def name(self, ident: int) -> str:
        return "MainThread"

    def frame(self, ident: int) -> None:
        return None


def heads_of(dump: Dump) -> tuple[GroupSnapshot, ...]:
    """As `group_heads` makes them, of a dump of one process."""
    found = []
    for name, config in dump["pg_config"].items():
        entries = of_this_life(entry for entry in dump["entries"] if group_of(entry) == name)
        members = tuple(ast.literal_eval(config["ranks"]))
        recent = parse_entries(entries)
        pending = [each for each in parse_transfers(entries, members) if not each.done]
        entered = recent[-1].seq if recent else 0
        found.append(
            GroupSnapshot(
                name=name,
                ranks=members,
                backend="nccl",
                entered=entered,
                recent=tuple(recent),
                transfers=tuple(pending),
            )
        )
    return tuple(found)


def head_of(rank: int, dump: Dump, size: int) -> ProcessSnapshot:
    groups = heads_of(dump)
    threads: Any = StandingThreads()
    waits = (*reading._collective_waits(groups, threads), *reading._transfer_waits(groups, threads))
    return ProcessSnapshot(
        key=f"vm:{rank}", name=f"rank {rank}", rank=rank, world="w", world_size=size, pid=rank, host="vm",
        still_s=70.0, groups=groups, waits=waits, threads=(ThreadSnapshot(name="MainThread", still_s=70.0),),
    )  # fmt: skip


def ours(dumps: list[Dump]) -> Verdict:
    heads = [head_of(rank, dump, len(dumps)) for rank, dump in enumerate(dumps)]
    verdict = find_verdict(WaitGraph(heads=heads, stall_after_s=STALL_S))
    assert verdict is not None
    return verdict


def torchs(dumps: list[Dump]) -> list[Any]:
    """The first thing of each group that torch's analyser finds wrong: group, number, op, ranks that are missing."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    details = {f"rank_{rank}": {"host_name": "vm", "rank": rank, **dump} for rank, dump in enumerate(dumps)}
    database = builder.build_db(details, config.JobConfig().parse_args(["folder"]), dumps[0]["version"])
    return [each for each in database.collectives if each.missing_ranks or each.mismatch_collectives]


@pytest.mark.parametrize(
    ("dumps", "kind"), [(missing_member(), "missing-member"), (missing_in_coalesced(), "missing-member")]
)
def test_a_missing_member_is_named_as_torchs_analyser_names_it(dumps: list[Dump], kind: str) -> None:
    verdict, found = ours(dumps), torchs(dumps)
    assert verdict.kind == kind
    assert (verdict.group, verdict.missing) == ("0", ("rank 2",))
    assert found, "torch's analyser found nothing"
    assert verdict.seq == found[0].collective_seq_id
    assert f"nccl:{verdict.op}" == found[0].collective_name
    assert {f"rank {rank}" for rank in found[0].missing_ranks} <= set(verdict.missing)


def test_calls_of_two_groups_that_cross_are_a_matter_of_order() -> None:
    verdict, found = ours(crossed_groups()), torchs(crossed_groups())
    assert verdict.kind == "different-order"
    names = {each.group_id for each in found}
    assert names <= {"tp", "dp"}
    assert all(name in verdict.headline for name in names)


def test_different_operations_are_reported_as_by_torchs_analyser() -> None:
    verdict, found = ours(different_ops()), torchs(different_ops())
    assert (verdict.kind, verdict.group, verdict.seq) == ("different-op", "0", 2)
    assert found[0].collective_seq_id == 2
    assert set(found[0].mismatch_collectives) == {1}
    assert "broadcast Float[4, 8] on rank 1" in verdict.headline


def test_a_batch_of_transfers_that_hangs_is_a_wait_for_its_peer() -> None:
    dumps = hung_batch()
    (group,) = [each for each in heads_of(dumps[1]) if each.name == "pp"]
    assert [(each.op, each.peer, each.seq, each.done) for each in group.transfers] == [
        ("send", 2, 2, False), ("recv", 2, 2, False),
    ]  # fmt: skip
    assert [(each.seq, each.done) for each in group.recent] == [(1, True)], "the closing entry bears the number 1 too"
    assert head_of(0, dumps[0], 3).waits == ()
    verdict = ours(dumps)
    assert (verdict.group, verdict.op, verdict.missing) == ("pp", "batch_isend_irecv", ("rank 2",))


def test_peers_are_global_ranks() -> None:
    ranks = ranks_of(8, pp=[3, 5, 7])
    ranks[5].transfer("recv", 2, group="pp", state="started")
    (group,) = [each for each in heads_of(ranks[5].dump()) if each.name == "pp"]
    assert [(each.op, each.peer) for each in group.transfers] == [("recv", 7)]


def test_a_coalesced_region_is_one_collective_with_all_its_tensors() -> None:
    (rank,) = ranks_of(1)
    rank.collective("all_reduce")
    rank.coalesced("_all_gather_base", "_all_gather_base")
    rank.coalesced("all_reduce", "broadcast", state="started")
    (group,) = heads_of(rank.dump())
    assert [(each.seq, each.op, each.done, len(each.inputs)) for each in group.recent] == [
        (1, "all_reduce", True, 1), (2, "all_gather_base", True, 2), (3, "coalesced", False, 2),
    ]  # fmt: skip


def test_a_stuck_collective_stays_in_sight_behind_coalesced_ones() -> None:
    (rank,) = ranks_of(1)
    for state in ("completed", "scheduled"):
        rank.collective("all_reduce", state=state)
    rank.coalesced("all_gather", "all_gather", state="scheduled")
    rank.batch(("send", 0), state="scheduled")
    (group,) = heads_of(rank.dump())
    assert [(each.seq, each.done) for each in group.recent] == [(1, True), (2, False), (3, False)]
    assert [each.op for each in group.transfers] == ["send"]


def test_a_slow_batch_is_no_stuck_collective() -> None:
    """The entry that closes it is no p2p, and bears the number of a collective that has ended."""
    (rank,) = ranks_of(1)
    rank.collective("all_reduce")
    rank.batch(("send", 0), ("recv", 0), state="scheduled")
    head = head_of(0, rank.dump(), 1)
    assert [wait.kind for wait in head.waits] == ["p2p"]


def test_what_a_graph_has_captured_is_not_pending() -> None:
    """Calls of a region that nothing closes were never launched."""
    (rank,) = ranks_of(1)
    rank.coalesced("all_gather", "all_gather", state="scheduled")
    dump = rank.dump()
    dump["entries"].pop()
    (group,) = heads_of(dump)
    assert [each.done for each in group.recent] == [True]


def test_a_closing_entry_whose_calls_the_ring_has_forgotten_is_left_out() -> None:
    (rank,) = ranks_of(1)
    rank.batch(("send", 0), state="completed")
    rank.collective("all_reduce", state="scheduled")
    dump = rank.dump()
    dump["entries"].pop(0)
    (group,) = heads_of(dump)
    assert [(each.seq, each.op) for each in group.recent] == [(1, "all_reduce")]
    assert group.transfers == ()


def test_a_group_that_was_made_anew_begins_anew() -> None:
    (first,), (second,) = ranks_of(1), ranks_of(1)
    first.collective("all_reduce", state="scheduled")
    second.collective("broadcast")
    later = [{**entry, "pg_id": 7} for entry in second.entries]
    assert [each.op for each in parse_entries(of_this_life([*first.entries, *later]))] == ["broadcast"]


def test_what_a_device_has_begun_is_not_over() -> None:
    dumps = started_and_stuck()
    (group,) = heads_of(dumps[0])
    last = group.recent[-1]
    assert (last.done, last.thread, last.created_ns) == (False, THREAD, CREATED_NS + 1)
    assert torchs(dumps) == []


LIMIT_S = 20.0
ANSWER_S = 0.2
STAND_IN = "stand_in_for_nccl"


class Device:
    """Answers for nccl's recorder, when it is let."""

    def __init__(self):
        self.may_answer, self.asked, self.hold_gil_s = threading.Event(), 0, 0.0
        self.dump = missing_member()[0]
        self.may_answer.set()

    def answer(self, request, response):
        self.asked += 1
        if self.hold_gil_s:
            ctypes.PyDLL(None).usleep(int(self.hold_gil_s * 1e6))  # as a binding that keeps the GIL
        self.may_answer.wait(LIMIT_S)
        response.set_content("", "text/plain")
        response.set_status(200)

    def registered(self, monkeypatch):
        torch._C._distributed_c10d._register_handler(STAND_IN, self.answer)
        monkeypatch.setattr(nccl_recorder, "HANDLER", STAND_IN)
        return self


def never():
    raise AssertionError("the binding holds the GIL: it is not for a torch that has the server")


def answers(monkeypatch, dump):
    """A handler can only give text, and a pickle is none; so what comes back is put in its place here."""
    monkeypatch.setattr(nccl_recorder.pickle, "loads", lambda content: dump)


@pytest.mark.ranks(1, liveness=False)
def test_a_caller_without_an_answer_continues_and_does_not_ask_again(monkeypatch):
    device, recorder = Device().registered(monkeypatch), NcclRecorder(ANSWER_S)
    answers(monkeypatch, device.dump)
    device.may_answer.clear()
    start_s = time.monotonic()
    read = [recorder.entries("1", never, with_frames=False) for _ in range(20)]
    assert read == [None] * 20
    assert time.monotonic() - start_s < LIMIT_S / 2, "one question's time, not twenty"
    assert device.asked == 1
    assert recorder.asked_at_s is not None
    device.may_answer.set()
    end_s = time.monotonic() + LIMIT_S
    while recorder.asked_at_s is not None and time.monotonic() < end_s:
        read.append(recorder.entries("1", never, with_frames=False))
        time.sleep(0.01)
    assert read[-1] == device.dump["entries"]
    assert device.asked == 2


@pytest.mark.ranks(1, liveness=False)
def test_other_threads_run_while_a_device_does_not_answer(monkeypatch):
    device, recorder = Device().registered(monkeypatch), NcclRecorder(ANSWER_S)
    answers(monkeypatch, device.dump)
    device.may_answer.clear()
    steps = []
    asker = threading.Thread(target=recorder.entries, args=("1", never), kwargs={"with_frames": False})
    asker.start()
    while asker.is_alive():
        steps.append(time.monotonic())
        time.sleep(0.001)
    device.may_answer.set()
    assert len(steps) > 10


@pytest.mark.ranks(1, liveness=False)
def test_a_process_that_was_asked_knows_that_before_it_falls_silent(monkeypatch):
    """Even a question that stops the whole process leaves its time behind, for a later look from outside."""
    device, recorder = Device().registered(monkeypatch), NcclRecorder(answer_s=LIMIT_S)
    answers(monkeypatch, device.dump)
    device.hold_gil_s = 0.5
    seen = []
    watcher = threading.Thread(target=lambda: [seen.append(recorder.asked_at_s) or time.sleep(0.01) for _ in range(30)])
    watcher.start()
    assert recorder.entries("1", never, with_frames=False) == device.dump["entries"]
    watcher.join(LIMIT_S)
    assert any(seen)
    assert recorder.asked_at_s is None


@pytest.mark.ranks(1, liveness=False)
def test_it_is_asked_once_while_its_counters_do_not_change(monkeypatch):
    device, recorder = Device().registered(monkeypatch), NcclRecorder(answer_s=LIMIT_S)
    answers(monkeypatch, device.dump)
    for status in ("1", "1", "1", "2"):
        assert recorder.entries(status, never, with_frames=False) == device.dump["entries"]
    assert device.asked == 2


@pytest.mark.ranks(1, liveness=False)
def test_a_head_says_that_the_recorder_did_not_answer(monkeypatch):
    device = Device().registered(monkeypatch)
    answers(monkeypatch, device.dump)
    device.may_answer.clear()
    binding = sys.modules["torch._C._distributed_c10d"]
    status = json.dumps({"pg_status": {"0": {"last_enqueued_collective": "5", "last_completed_collective": "4"}}})
    monkeypatch.setattr(binding, "_dump_nccl_trace_json", lambda **words: status.encode(), raising=False)
    monkeypatch.setattr(binding, "_dump_nccl_trace", never, raising=False)
    monkeypatch.setattr(binding, "_dump_fr_trace", lambda **words: b"", raising=False)
    monkeypatch.setattr(nccl_recorder.pickle, "loads", lambda content: {"entries": []})
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    head = reading.read_snapshot(ProgressTracker(60.0), name="", world="", rank=0, world_size=1, stall_after_s=60.0)
    device.may_answer.set()
    NCCL.clear()
    assert "torch's recorder of nccl did not answer: of its groups only sequence numbers are known" in head.notes


@pytest.mark.ranks(1, liveness=False)
def test_only_this_user_can_ask(monkeypatch):
    Device().registered(monkeypatch)
    recorder = NcclRecorder(LIMIT_S)
    folder = os.path.dirname(recorder._server())
    assert os.stat(folder).st_mode & 0o077 == 0


@pytest.mark.ranks(1, liveness=False)
def test_a_process_that_can_make_no_server_continues_without_and_leaves_nothing_behind(monkeypatch, tmp_path):
    """The path of a socket has 108 bytes at most, and TMPDIR may be long."""
    device, recorder = Device().registered(monkeypatch), NcclRecorder(LIMIT_S)
    long_folder = tmp_path / ("a" * 100)
    long_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    at_exit = atexit._ncallbacks()
    assert [recorder.entries("1", never, with_frames=False) for _ in range(2)] == [None, None]
    assert recorder.asked_at_s is not None, "what its groups have done is not known"
    assert (list(long_folder.iterdir()), atexit._ncallbacks(), device.asked) == ([], at_exit, 0)


def test_an_answer_is_seen_in_a_process_with_many_open_files():
    """select() takes no descriptor from 1024 on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, limits[0]), limits[1]))
    try:
        own, other = socket.socketpair()
        with own, other, socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD, 1500)) as high:
            assert not nccl_recorder._is_answered(high)
            other.send(b"answer")
            assert nccl_recorder._is_answered(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.ranks(1, liveness=False)
def test_a_torch_without_the_server_is_asked_directly(monkeypatch):
    monkeypatch.setattr(nccl_recorder, "HANDLER", "unknown")
    recorder = NcclRecorder(ANSWER_S)
    dump = missing_member()[0]
    assert recorder.entries("1", lambda: pickle.dumps(dump), with_frames=False) == dump["entries"]


@pytest.mark.ranks(1, liveness=False)
def test_the_recorder_of_a_real_build_with_nccl_answers():
    if nccl_recorder.HANDLER not in torch._C._distributed_c10d._get_handler_names():
        pytest.skip("this build of torch has no nccl")
    recorder = NcclRecorder(LIMIT_S)
    assert recorder.entries("1", never, with_frames=True) == []
    assert recorder.asked_at_s is None
