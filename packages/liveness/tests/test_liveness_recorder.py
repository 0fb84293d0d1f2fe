"""Torch's flight recorder is left alone while groups are made or used: it dies of being read meanwhile."""

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from offbeat_liveness import settled_collectives
from offbeat_liveness._process import flight_recorder, reading
from offbeat_liveness._process.flight_recorder import StillRecorder, _group_activity, settled_s
from offbeat_liveness._process.progress import ProgressTracker

LIMIT_S = 30.0
IMPORTED_WHILE_READING = """
import sys, threading
import torch, torch.distributed as dist
from offbeat_liveness._process.flight_recorder import read_entries

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
assert read_entries(call_sites=True)[0]["frames"]
assert not [name for name in sys.modules if name.startswith("torch._inductor")], "nobody has asked for it"
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
    told = []
    for used in (None, group, None, group):  # the first collective of a group is one of many
        dist.all_reduce(torch.ones(1), group=used)
        told.append(recorder.status_text())
    at_rest = read_when_still(recorder)
    dist.destroy_process_group(group)
    assert told == [None] * 4
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
    motion = ProgressTracker(longest_gap_s=60.0)
    motion.look()
    before_s = motion.status_since_s
    dist.all_reduce(torch.ones(1))
    motion.look()
    moved_s = motion.status_since_s
    time.sleep(2 * settled_s())
    motion.look()
    assert before_s < moved_s
    assert motion.status != ""
    assert motion.status_since_s == moved_s


@pytest.mark.ranks(1, liveness=False)
def test_a_head_waits_for_a_moment_without_collectives():
    motion = ProgressTracker(longest_gap_s=60.0)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    still = read_groups(motion)
    dist.all_reduce(torch.ones(1))
    motion.recorder = StillRecorder(patience_s=0.0)
    assert [*still, *read_groups(motion)] == [(3, 3), (4, 0)]


def read_groups(motion):
    head = reading.read_snapshot(motion, name="", world="", rank=0, world_size=1, stall_after_s=60.0)
    return [(group.entered, len(group.recent)) for group in head.groups]
