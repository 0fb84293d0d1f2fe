"""What torch's flight recorder says, when it may be read, and a look at frames while the collector runs."""

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat_liveness import current_frames, settled_collectives
from offbeat_liveness._process import flight_recorder, nccl_recorder, reading
from offbeat_liveness._process.flight_recorder import StillRecorder, _group_activity, parse_entries, settled_s
from offbeat_liveness._process.progress import ProgressTracker

LIMIT_S = 30.0
IMPORTED_WHILE_READING = """
import sys, threading
import torch, torch.distributed as dist
from offbeat_liveness._process.flight_recorder import read_entries

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
assert read_entries(call_sites=True)[0]["frames"]
assert not [name for name in sys.modules if name.startswith("torch._inductor")], "nothing has asked for it"
ended, seen = [], set()

def look():
    while not ended:
        module = sys.modules.get("torch._inductor")
        seen.add(module is not None and module.__spec__ is None)

def bring():
    try:
        import torch._inductor.config
        ended.append(torch._inductor.config.__file__)
    except Exception as error:
        ended.append(repr(error))

threads = [threading.Thread(target=each) for each in (look, bring)]
for each in threads:
    each.start()
without = 0
while not ended:
    without += not read_entries(call_sites=True)[0]["frames"]
for each in threads:
    each.join()
print(any(seen), without, ended[0])
"""


def read_when_still(recorder):
    end_s = time.monotonic() + LIMIT_S
    while (text := recorder.status_text()) is None:
        assert time.monotonic() < end_s, "the recorder was never read"
        time.sleep(0.005)
    return text


@pytest.mark.ranks(1, liveness=False)
def test_the_recorder_of_a_rank_that_moves_is_never_read():
    recorder, group = StillRecorder(), dist.new_group([0])
    read_when_still(recorder)
    texts = []
    for used in (None, group, None, group):  # the first collective of a group is one of many
        dist.all_reduce(torch.ones(1), group=used)
        texts.append(recorder.status_text())
    at_rest = read_when_still(recorder)
    dist.destroy_process_group(group)
    assert texts == [None] * 4
    assert '"last_enqueued_collective":"2"' in at_rest
    assert recorder.status_text() is None


@pytest.mark.ranks(1, liveness=False)
def test_settled_collectives_are_those_that_were_read_while_nothing_moved(monkeypatch):
    reads, read_entries = [], flight_recorder.read_entries
    monkeypatch.setattr(flight_recorder, "read_entries", lambda **how: reads.append(how) or read_entries(**how))
    dist.all_reduce(torch.ones(1))
    settled = settled_collectives(patience_s=LIMIT_S)
    assert [each.op for each in settled] == ["all_reduce"]
    assert settled[0].call_site.file == __file__
    assert len(reads) == 1, "a second reading would be without the check"
    dist.all_reduce(torch.ones(1))
    assert settled_collectives(patience_s=0.0) is None


@pytest.mark.nightly
def test_other_threads_import_inductor_while_call_sites_are_read():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED_WHILE_READING], capture_output=True, text=True, timeout=120, check=False
    )
    stand_in_was_seen, num_without_frames, imported = ended.stdout.split(" ", 2) or ended.stderr
    assert (stand_in_was_seen, num_without_frames) == ("False", "0")
    assert imported.strip().endswith("torch/_inductor/config.py")


@pytest.mark.ranks(2, liveness=False)
def test_the_recorder_is_not_read_while_a_group_is_made_unless_that_lasts(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("looked")
        dist.new_group([0, 1])
        return
    recorder, end_s = StillRecorder(), time.monotonic() + LIMIT_S
    second_store = store.clone()  # the first one is busy while its thread waits in it
    read_when_still(recorder)
    maker = threading.Thread(target=dist.new_group, args=([0, 1],))
    maker.start()
    while not _group_activity()[0] and time.monotonic() < end_s:
        time.sleep(0.001)
    assert recorder.status_text() is None
    assert read_when_still(recorder) != ""
    assert _group_activity()[0] == (maker.ident,)
    second_store.set("looked", "")
    maker.join(LIMIT_S)
    assert recorder.status_text() is None


@pytest.mark.ranks(1, liveness=False)
def test_a_collective_is_movement_though_it_was_not_read():
    progress = ProgressTracker(longest_gap_s=60.0)
    progress.look()
    before_s = progress.status_since_s
    dist.all_reduce(torch.ones(1))
    progress.look()
    moved_s = progress.status_since_s
    time.sleep(2 * settled_s())
    progress.look()
    assert before_s < moved_s
    assert progress.status != ""
    assert progress.status_since_s == moved_s


@pytest.mark.ranks(1, liveness=False)
def test_a_head_waits_for_a_moment_without_collectives():
    progress = ProgressTracker(longest_gap_s=60.0)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    still = read_groups(progress)
    dist.all_reduce(torch.ones(1))
    progress.recorder = StillRecorder(patience_s=0.0)
    assert [*still, *read_groups(progress)] == [(3, 3), (4, 0)]


def read_groups(progress):
    head = reading.read_snapshot(progress, name="", world="", rank=0, world_size=1, stall_after_s=60.0)
    return [(group.entered, len(group.recent)) for group in head.groups]


def entry_of(**changes: Any) -> dict[str, Any]:
    base = {
        "collective_seq_id": 2,
        "frames": [],
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 5]],
        "is_p2p": False,
        "op_id": 2,
        "output_dtypes": ["Float"],
        "output_sizes": [[3, 5]],
        "p2p_seq_id": 0,
        "pg_id": 1,
        "process_group": ["1", "tp"],
        "profiling_name": "gloo:all_reduce",
        "record_id": 5,
        "retired": False,
        "state": "scheduled",
        "thread_id": "77",
        "thread_name": "python",
        "time_created_ns": 1000,
        "time_discovered_completed_ns": None,
        "time_discovered_started_ns": None,
        "timeout_ms": 1800000,
    }
    return {**base, **changes}


def test_a_gloo_entry() -> None:
    (entry,) = parse_entries([entry_of()])
    assert (entry.group, entry.seq, entry.op, entry.inputs) == ("1", 2, "all_reduce", ("Float[3, 5]",))
    assert (entry.done, entry.backend, entry.thread) == (False, "gloo", 77)


def test_nccl_entries_say_what_the_device_has_done() -> None:
    states = ["scheduled", "started", "completed"]
    entries = [entry_of(profiling_name="nccl:_all_gather_base", state=state) for state in states]
    parsed = parse_entries([*entries, entry_of(profiling_name="nccl:send 0->1", is_p2p=True)])
    assert [each.done for each in parsed] == [False, False, True]
    assert {each.op for each in parsed} == {"all_gather_base"}


def test_a_call_site_is_the_first_line_that_is_not_torchs() -> None:
    frames = [
        {"filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 3245, "name": "all_reduce"},
        {"filename": "/home/me/train.py", "line": 8, "name": "step"},
    ]
    (entry,) = parse_entries([entry_of(frames=frames)])
    assert str(entry.call_site) == "/home/me/train.py:8 in step"


def test_the_status_shows_what_is_pending() -> None:
    one = '{"pg_status": {"0": {"last_enqueued_collective": "%d", "last_completed_collective": "4"}}}'
    assert flight_recorder.has_pending(one % 5)
    assert not flight_recorder.has_pending(one % 4)
    assert not flight_recorder.has_pending("{}")


def a_recorder(entries: list[dict[str, Any]], last: int) -> dict[str, Callable[..., bytes]]:
    """What a build of torch offers to read one of its recorders, with the words that it takes."""
    status = {"pg_status": {"0": {"last_enqueued_collective": str(last), "last_completed_collective": "4"}}}

    def dump(*, includeCollectives: bool, includeStackTraces: bool, onlyActive: bool) -> bytes:
        return pickle.dumps({"entries": entries})

    def dump_json(*, includeCollectives: bool) -> bytes:
        return json.dumps(status).encode()

    return {"trace": dump, "trace_json": dump_json}


def test_the_recorder_of_nccl_is_read_beside_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = sys.modules["torch._C._distributed_c10d"]
    monkeypatch.setattr(nccl_recorder, "HANDLER", "unknown")  # a build of torch may have the real one
    monkeypatch.setattr(flight_recorder, "NCCL", nccl_recorder.NcclRecorder())
    both = entry_of(profiling_name="nccl:all_reduce", record_id=0, time_created_ns=900, collective_seq_id=1)
    late = entry_of(profiling_name="nccl:all_reduce", record_id=1, time_created_ns=1100)
    sent = entry_of(profiling_name="nccl:send 0->1", record_id=2, is_p2p=True)
    recorders = {"fr": a_recorder([entry_of(record_id=0), both], 4), "nccl": a_recorder([both, late, sent], 5)}
    for name, functions in recorders.items():
        for what, function in functions.items():
            monkeypatch.setattr(binding, f"_dump_{name}_{what}", function, raising=False)
    entries = flight_recorder.read_entries()
    assert [entry["time_created_ns"] for entry in entries] == [900, 1000, 1000, 1100], "the one of both once, and p2p"
    assert flight_recorder.has_pending(flight_recorder.status_text())
    assert flight_recorder.holds_all(entries)
    assert not flight_recorder.holds_all([entry_of(record_id=0), late]), "nccl's has forgotten its first"


def test_all_tables_of_torch_are_read_before_anything_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that they are still holds for a moment only, and to unpickle a full recorder takes 20 ms."""
    binding, order = sys.modules["torch._C._distributed_c10d"], []

    def dump(**_: bool) -> bytes:
        order.append("entries")
        return pickle.dumps({"entries": []})

    def dump_json(**_: bool) -> bytes:
        order.append("status of nccl")
        return b"{}"

    def loads(content: bytes) -> dict[str, Any]:
        order.append("unpickle")
        return {"entries": []}

    monkeypatch.setattr(binding, "_dump_fr_trace", dump)
    monkeypatch.setattr(binding, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(binding, "_dump_nccl_trace_json", dump_json, raising=False)
    monkeypatch.setattr(pickle, "loads", loads)
    flight_recorder.read_entries()
    assert order == ["entries", "status of nccl", "unpickle"]


COLLECTED_WHILE_LOOKING = """
import gc, threading
from offbeat_liveness import current_frames

class Circle:
    def __init__(self):
        self.me, self.local = self, threading.local()
        self.local.value = 1

stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(40)]
for thread in threads:
    thread.start()
gc.disable()
Circle()
gc.enable()
gc.set_threshold(gc.get_count()[0] + 10)  # the tenth object from here on sets it off: a frame, while all are looked at
frames = current_frames()
gc.set_threshold(700)
stop.set()
print(len(frames), gc.isenabled())
"""


def test_a_collection_during_a_look_does_not_stop_the_process() -> None:
    """With `sys._current_frames` itself Python 3.11 deadlocks here, every time."""
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTED_WHILE_LOOKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.split() == ["41", "True"], ended.stderr


def test_a_collector_that_rests_is_not_woken() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_born_during_a_look_collects_and_looks() -> None:
    stop = threading.Event()
    seen: list[dict[int, FrameType]] = []

    def look() -> None:
        while not stop.is_set():
            seen[:] = [current_frames()]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            time.sleep(0.001)
            if (child := os.fork()) == 0:
                os._exit(0 if gc.isenabled() and current_frames() else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
        seen.clear()
