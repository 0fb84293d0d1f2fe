"""The recorder of nccl is asked without standing still with it, however long a device takes to answer.

Torch's server of such questions is the real one; what it asks is a stand-in, under a name of its own.
"""

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

import pytest
import torch
import torch.distributed as dist
from nccl_dumps import missing_member

from offbeat_liveness._process import nccl_recorder, reading
from offbeat_liveness._process.nccl_recorder import NCCL, NcclRecorder
from offbeat_liveness._process.progress import ProgressTracker

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
def test_who_gets_no_answer_goes_on_and_does_not_ask_again(monkeypatch):
    device, recorder = Device().registered(monkeypatch), NcclRecorder(ANSWER_S)
    answers(monkeypatch, device.dump)
    device.may_answer.clear()
    start_s = time.monotonic()
    told = [recorder.entries("1", never, with_frames=False) for _ in range(20)]
    assert told == [None] * 20
    assert time.monotonic() - start_s < LIMIT_S / 2, "one question's time, not twenty"
    assert device.asked == 1
    assert recorder.asked_at_s is not None
    device.may_answer.set()
    end_s = time.monotonic() + LIMIT_S
    while recorder.asked_at_s is not None and time.monotonic() < end_s:
        told.append(recorder.entries("1", never, with_frames=False))
        time.sleep(0.01)
    assert told[-1] == device.dump["entries"]
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
def test_whoever_was_asked_knows_that_it_was_before_it_falls_silent(monkeypatch):
    """Even a question that stops the whole process leaves the moment behind, for whoever looks at it afterwards."""
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
def test_it_is_asked_once_while_its_counters_stand_still(monkeypatch):
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
def test_who_can_make_no_server_goes_on_without_and_leaves_nothing_behind(monkeypatch, tmp_path):
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
    monkeypatch.setattr(nccl_recorder, "HANDLER", "nobody's")
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
