"""Torch's flight recorder is left alone while groups are made or used: it dies of being read meanwhile."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from offbeat_liveness._process import reading
from offbeat_liveness._process.motion import Motion
from offbeat_liveness._process.recorder.still_recorder import StillRecorder, _scene, settled_s

LIMIT_S = 30.0


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
    while not _scene()[0] and time.monotonic() < end_s:
        time.sleep(0.001)
    assert recorder.status_text() is None
    assert read_when_still(recorder) != ""
    assert _scene()[0] == (maker.ident,)
    second_store.set("looked", "")
    maker.join(LIMIT_S)
    assert recorder.status_text() is None


@pytest.mark.ranks(1, liveness=False)
def test_a_collective_is_movement_though_it_was_not_read():
    motion = Motion(longest_gap_s=60.0)
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
    motion = Motion(longest_gap_s=60.0)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    still = read_groups(motion)
    dist.all_reduce(torch.ones(1))
    motion.recorder = StillRecorder(patience_s=0.0)
    assert [*still, *read_groups(motion)] == [(3, 3), (4, 0)]


def read_groups(motion):
    head = reading.read_head(motion, name="", world="", rank=0, world_size=1, stall_after_s=60.0)
    return [(group.entered, len(group.recent)) for group in head.groups]
