"""Parts of the monitor by themselves: settings, ledger, stacks, progress, exceptions, fates."""

import contextlib
import gc
import hashlib
import linecache
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import offbeat_liveness as liveness
from offbeat_liveness import LivenessError, _watch
from offbeat_liveness._process import ledger
from offbeat_liveness._process.exceptions import describe, exception_in_flight
from offbeat_liveness._process.ledger import LEDGER, Entry, Ledger
from offbeat_liveness._process.proc import birth, pid_state
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.reading import read_snapshot
from offbeat_liveness._process.stacks import is_machinery, stack_of, thread_frames
from offbeat_liveness._settings import read_settings


def test_importing_liveness_imports_no_torch() -> None:
    code = "import sys, offbeat_liveness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settings_come_from_arguments_then_the_environment() -> None:
    environment = {
        "OFFBEAT_STALL_AFTER_S": "7",
        "OFFBEAT_LIVENESS_POLICY": "abort",
        "OFFBEAT_LIVENESS_DIR": "/tmp/dumps",
    }
    settings = read_settings(environment=environment)
    assert (settings.stall_after_s, settings.policy, settings.directory) == (7.0, "abort", Path("/tmp/dumps"))
    assert read_settings(3.0, "report", environment=environment).stall_after_s == 3.0
    assert read_settings(environment={}).stall_after_s == 60.0


@pytest.mark.parametrize(
    ("arguments", "environment", "word"),
    [
        ({"stall_after_s": 0.0}, {}, "above 0"),
        ({"stall_after_s": float("nan")}, {}, "above 0"),
        ({"policy": "panic"}, {}, "report, abort"),
        ({}, {"OFFBEAT_STALL_AFTER_S": "soon"}, "OFFBEAT_STALL_AFTER_S"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, Any], environment: dict[str, str], word: str) -> None:
    with pytest.raises(LivenessError, match=word):
        read_settings(**arguments, environment=environment)


def test_a_declared_wait_is_open_while_its_block_runs() -> None:
    with liveness.waiting("sample_queue.get", on="rollouter", deadline_s=5):
        (entry,) = [each for each in LEDGER.open_waits() if each.what == "sample_queue.get"]
        assert (entry.kind, entry.on, entry.deadline_s) == ("declared", "rollouter", 5)
    assert all(each.what != "sample_queue.get" for each in LEDGER.open_waits())


def test_a_declared_wait_ends_with_an_exception_too() -> None:
    with pytest.raises(ValueError, match="x"), liveness.waiting("short"):
        raise ValueError("x")
    assert all(each.what != "short" for each in LEDGER.open_waits())


class HeldUp(list[Callable[[], None]]):
    """A list whose length all threads that ask for it get at once."""

    def __init__(self, call: Callable[[], None], num_threads: int) -> None:
        super().__init__([call])
        self._barrier = threading.Barrier(num_threads)

    def __len__(self) -> int:
        length = super().__len__()
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(0.5)
        return length


@pytest.mark.parametrize("where", ["wait", "world"])
def test_two_threads_may_come_at_once_to_what_begins_the_watch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        with liveness.waiting("sample_queue.get"):
            pass

    module, name = (ledger, "_BEFORE_WAIT") if where == "wait" else (_watch, "_BEFORE_WORLD")
    begun: list[int] = []
    monkeypatch.setattr(module, name, HeldUp(lambda: begun.append(1), 2))
    come = wait if where == "wait" else _watch._announcing(lambda: None)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(come) for _ in range(2)]:
            each.result()
    assert begun


class Work:
    """Stands for torch's handle of a posted operation."""

    def __init__(self) -> None:
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done


def test_a_posted_operation_is_no_wait_and_its_handle_is_forgotten_when_it_is_over() -> None:
    ledger, works = Ledger(), [Work() for _ in range(1000)]
    for work in works:
        ledger.post(Entry(kind="p2p", what="isend", work=weakref.ref(work)))
        work.is_done = True
    assert ledger.open_waits() == []
    assert len(ledger.posted) < 300


def test_waits_are_not_lost_while_two_threads_look() -> None:
    """The monitor looks while it answers another one's question."""
    ledger, stop = Ledger(), threading.Event()
    for _ in range(50):
        ledger.enter(Entry(kind="p2p", what="irecv"))

    def look() -> None:
        while not stop.is_set():
            ledger.leave(ledger.enter(Entry(kind="store", what="store.get")))

    thread = threading.Thread(target=look)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        assert {len([each for each in ledger.open_waits() if each.kind == "p2p"]) for _ in range(300)} == {50}
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval_s)


def test_a_stderr_that_is_not_read_does_not_hold_up_the_monitor() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    code = "from offbeat_liveness._announcer import say; say('x' * 100_000)"
    try:
        assert subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=20, check=False).returncode == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_the_looks_are_close_enough_for_the_promise_of_two_seconds() -> None:
    """A stall is seen to begin up to one look late, and its end up to another."""
    assert 2 * read_settings(environment={}).tick_s <= 1.0


def test_a_stack_is_reported_without_torch_and_the_standard_library() -> None:
    ready, free = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        ready.set()
        free.wait()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    ready.wait()
    stack = stack_of(thread_frames()[thread.ident or 0])
    free.set()
    thread.join()
    assert [site.function.rpartition(".")[2] for site in stack] == ["wait_for_it"]
    assert is_machinery(queue.__file__)
    assert is_machinery("/x/lib/python3.11/site-packages/torch/distributed/c10d_logger.py")
    assert not is_machinery("/x/lib/python3.11/site-packages/megatron/core/optimizer.py")
    assert not is_machinery("/home/me/train.py")


def test_a_loop_that_polls_makes_no_progress_and_new_lines_are_movement() -> None:
    progress, stop, phase = ProgressTracker(longest_gap_s=60.0), threading.Event(), threading.Event()

    def poll() -> None:
        while not phase.wait(0.001):
            pass
        sum(range(10))
        stop.wait()

    thread = threading.Thread(target=poll)
    thread.start()
    for _ in range(40):
        progress.look()
        time.sleep(0.005)
    still_s = progress.thread_still_s(thread.ident or 0)
    phase.set()
    time.sleep(0.05)
    progress.look()
    moved_s = progress.thread_still_s(thread.ident or 0)
    stop.set()
    thread.join()
    assert still_s > moved_s


def test_a_thread_on_a_new_line_moves_though_it_stands_in_the_same_helper() -> None:
    """A new call of the helper often gets the frame of the last one: only its caller is somewhere else."""
    progress, arrived, overlaps = ProgressTracker(longest_gap_s=60.0), threading.Semaphore(0), threading.Lock()
    seen: list[bool] = []

    def helper() -> None:
        arrived.release()
        overlaps.acquire()

    def watch() -> None:
        for _ in range(10):
            arrived.acquire()
            came_s = time.monotonic()
            time.sleep(0.02)  # it stands in acquire()
            progress.look()
            seen.append(progress.thread_still_s(worker.ident or 0) <= time.monotonic() - came_s)
            overlaps.release()

    overlaps.acquire()
    lines = "def work():\n" + "    helper()\n" * 10 + "work()"
    worker = threading.Thread(target=exec, args=(lines, {"helper": helper}))
    watching = threading.Thread(target=watch, name="offbeat-liveness")
    worker.start()
    watching.start()
    watching.join()
    worker.join()
    assert all(seen), seen


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="priorities of threads are Linux's")
def test_a_thread_that_waits_for_a_core_has_work_before_the_kernel_adds_it_up() -> None:
    core = min(os.sched_getaffinity(0))
    hog = f"import os; os.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", hog], stdout=subprocess.PIPE) for _ in range(2)]
    begun, data = threading.Event(), bytes(2**28)

    def compute() -> None:
        os.sched_setaffinity(0, [core])
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        begun.set()
        hashlib.sha256(data)  # native, without the GIL

    thread = threading.Thread(target=compute)
    progress = ProgressTracker(longest_gap_s=60.0)
    try:
        for each in hogs:
            assert each.stdout is not None
            each.stdout.readline()
        thread.start()
        begun.wait()
        progress.busy(worker=thread.ident or 0)  # from now on its work is counted
        for _ in range(20):
            progress.look()
            time.sleep(0.05)
        assert progress._thread_busy(thread.ident or 0) > 0.5
    finally:
        for each in hogs:
            each.kill()
            each.communicate()
        thread.join()


def test_a_look_lets_go_of_what_it_has_seen() -> None:
    """A frame holds its locals, such as a layer's weights: one kept in a circle waits for the collector."""

    class Layer:
        pass

    def compute(look: Callable[[], object], *, itself: bool = False) -> "weakref.ref[Layer]":
        layer = Layer()
        if itself:
            look()
            return weakref.ref(layer)
        watching = threading.Thread(target=look, name="offbeat-liveness")
        watching.start()
        watching.join()
        return weakref.ref(layer)

    progress = ProgressTracker(longest_gap_s=60.0)
    shape = {"name": "", "world": "", "rank": 0, "world_size": 1, "stall_after_s": 1.0}
    gc.disable()
    try:
        for look in (progress.look, lambda: read_snapshot(progress, **shape), thread_frames):
            assert compute(look)() is None, look
        assert compute(lambda: read_snapshot(progress, **shape), itself=True)() is None
    finally:
        gc.enable()


def test_a_process_that_was_suspended_begins_anew() -> None:
    progress = ProgressTracker(longest_gap_s=1.0)
    progress.look()
    time.sleep(1.2)
    assert progress.still_s() > 1.0
    progress.look()
    assert progress.still_s() < 1.0


def test_fates_by_pid() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        born = birth(child.pid)
        assert pid_state(child.pid, born) == "runs"
        assert pid_state(child.pid, born + 1) == "gone"  # another bears its number
        os.kill(child.pid, signal.SIGSTOP)
        while pid_state(child.pid) != "stopped":
            time.sleep(0.01)
        child.kill()
        while pid_state(child.pid) != "gone":  # a zombie is gone
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert pid_state(child.pid) == "gone"


def test_an_exception_in_one_line_without_gloos_place() -> None:
    place = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
    text = f"{place} Connection closed by peer [::1]:1. This is typically caused by a"
    line, stack = describe(RuntimeError(text))
    assert (line, stack) == ("RuntimeError: Connection closed by peer [::1]:1.", ())


class NotedError(Exception):
    asked = 0

    def __str__(self) -> str:
        NotedError.asked += 1
        return "called"


def test_an_exception_in_flight_is_read_without_its_code_and_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkcache", "lazycache", "updatecache", "getline"):
        monkeypatch.setattr(linecache, name, lambda *_: pytest.fail("a source file is looked for"))
    error = NotedError("batch 7 is empty", 7, b"x", [NotedError()])
    error.add_note("on shard 3")
    try:
        raise error from KeyError("no such shard")
    except NotedError:
        line = exception_in_flight(threading.get_ident())
        text, stack = describe(error)
    name = f"{__name__}.NotedError"
    assert line == f"{name}: batch 7 is empty, 7, x on shard 3 (raised at {stack[0]})"
    assert stack[0].function == test_an_exception_in_flight_is_read_without_its_code_and_without_a_file.__name__
    assert (text, NotedError.asked) == (f"{name}: called on shard 3", 1), "called only where the end is described"


@pytest.mark.nightly
def test_a_look_costs_little() -> None:
    """At the default tick of 2 s, 1 ms a look is 0.05 % of a core; measured here: 0.05 ms."""
    progress = ProgressTracker(longest_gap_s=60.0)
    began_s = time.thread_time()
    for _ in range(200):
        progress.look()
    assert (time.thread_time() - began_s) / 200 < 2e-3


HELD_LOCK = """
import faulthandler, os, threading
import offbeat_liveness as liveness
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.reading import read_snapshot

faulthandler.dump_traceback_later(20, exit=True)
holds = threading.Event()

def hold():  # as a thread does that a signal handler or a finalizer holds up while it starts another
    with threading._active_limbo_lock:
        holds.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
holds.wait()
progress = ProgressTracker(60.0)
progress.look()
head = read_snapshot(progress, name="", world="", rank=0, world_size=1, stall_after_s=60.0)
print([each.name for each in head.threads], flush=True)
os._exit(0)
"""


def test_a_look_takes_no_lock_of_pythons_threads() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_LOCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['MainThread']\n", done.stderr


def test_groups_of_offbeat_are_no_lines_of_the_reader() -> None:
    """What stands around a collective hides its caller: a verdict has room for three lines."""
    assert is_machinery("/env/lib/python3.11/site-packages/offbeat_mesh/_plain_data.py")
    assert not is_machinery("/env/lib/python3.11/site-packages/offbeat_engine_torch/_engine.py")


BEGINS_ANOTHER_AT_THE_END = """
import atexit, contextlib, time
from datetime import timedelta
import torch.distributed as dist
from offbeat_liveness._process.stacks import OwnThread, join_own_threads

store = dist.HashStore()

def in_torch():
    with contextlib.suppress(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.2))

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

def begins_another():
    time.sleep(0.3)
    OwnThread(in_torch).start()

ends_slowly = EndsSlowly()
atexit.register(join_own_threads, 5.0)
OwnThread(begins_another).start()
"""


@pytest.mark.nightly
def test_a_thread_that_begins_while_the_process_ends_is_waited_for() -> None:
    """Python 3.11 ends a thread that comes back from C++ too late, and C++ then ends the process with SIGABRT."""
    script = [sys.executable, "-c", BEGINS_ANOTHER_AT_THE_END]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
