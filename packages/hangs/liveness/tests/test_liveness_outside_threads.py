"""A thread that waits for another thread, or for a process of this host, is reported with what it waits for."""

import concurrent.futures
import multiprocessing
import multiprocessing.pool
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from liveness_standing import standing, start, until, wait_of

from offbeat_liveness._process.outside.children import ended_children
from offbeat_liveness._process.outside.other_processes import without_secrets
from offbeat_liveness._process.proc import pid_state

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by /proc")
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()
LOCK = threading.Lock()
OWNED = threading.RLock()
KEPT = threading.Lock()
PIPE = FORK.Pipe()
SOURCE = Path(__file__).read_text().splitlines()
SAMPLES: "queue.SimpleQueue[int]" = queue.SimpleQueue()


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def full_queue(made: Any) -> Any:
    made.put(1)
    made.put(2)
    return made


def test_queues_are_reported_with_what_they_hold() -> None:
    empty, full = queue.Queue[int](), full_queue(queue.Queue[int](2))
    wait = standing(lambda: empty.get(timeout=30), "queue.get")
    assert (wait.kind, wait.text, wait.timeout_s) == ("queue", "queue.get: the queue is empty, timeout 30 s", 30)
    assert standing(lambda: full.put(3), "queue.put").text == "queue.put: the queue is full (2 of 2)"
    assert standing(full.join, "queue.join").text == "queue.join: 2 of its tasks are not done"
    empty.put(1)
    full.get()


def test_queues_of_processes() -> None:
    empty, full = FORK.Queue(), full_queue(FORK.Queue(2))
    wait = standing(empty.get, "multiprocessing.Queue.get")
    assert (wait.kind, wait.text) == (
        "queue",
        "multiprocessing.Queue.get: the queue is empty; other processes serve it",
    )
    assert standing(lambda: empty.get(timeout=40), "multiprocessing.Queue.get").timeout_s in (None, 40)
    assert "is full (2 of 2)" in standing(lambda: full.put(3), "multiprocessing.Queue.put").text
    assert standing(FORK.SimpleQueue().get, "SimpleQueue.get").kind == "queue"
    for _ in range(2):
        empty.put(1)
    full.get()


def leave_with_3() -> None:
    os._exit(3)


@on_linux
@pytest.mark.parametrize(
    ("wait_in", "text"),
    [
        (lambda: FORK.Queue().get(timeout=30), "multiprocessing.Queue.get: the queue is empty"),
        (lambda: FORK.SimpleQueue().get(), "multiprocessing.SimpleQueue.get"),
        (lambda: FORK.Event().wait(20), "multiprocessing.Event.wait: nobody has set it"),
        (lambda: PIPE[0].recv(), "(multiprocessing.Connection)"),
    ],
    ids=["queue", "simple queue", "event", "pipe"],
)
def test_a_child_that_has_ended_is_named_with_what_it_was_to_send(wait_in: Callable[[], object], text: str) -> None:
    child = FORK.Process(target=leave_with_3, name="engine")
    child.start()
    try:
        wait = standing(wait_in, "has ended")
        assert text in wait.text
        assert f"'engine' (pid {child.pid}) has ended with exit code 3" in wait.text
        assert "serve" not in wait.text
        assert child.exitcode == 3  # it is waited for now, and known by what multiprocessing has kept
        assert "has ended with exit code 3" in ended_children() or not ended_children()
    finally:
        child.join(5)


@on_linux
def test_a_child_that_has_ended_well_is_named_only_where_none_is_left() -> None:
    well, lives = FORK.Process(target=str, name="well"), FORK.Process(target=signal.pause, name="lives")
    for each in (well, lives):
        each.start()
    try:
        until(lambda: pid_state(well.pid or 0) == "gone")
        assert "well" not in ended_children()
        lives.kill()
        text = until(lambda: "lives" in (said := ended_children()) and said)
        assert "'well'" in text
    finally:
        for each in (well, lives):
            each.kill()
            each.join(5)


@on_linux
def test_a_child_that_was_killed_beside_one_that_lives() -> None:
    killed, lives = FORK.Process(target=signal.pause, name="killed"), FORK.Process(target=signal.pause, name="lives")
    for each in (killed, lives):
        each.start()
    assert lives.pid
    try:
        assert "killed" not in ended_children()
        assert killed.pid
        os.kill(killed.pid, signal.SIGKILL)
        text = until(lambda: "killed" in (said := ended_children()) and said)
        assert f"'killed' (pid {killed.pid}) was ended by signal 9" in text
        assert text.startswith("; of its ")
        assert "lives" not in text
        os.kill(lives.pid, signal.SIGSTOP)
        assert f"'lives' (pid {lives.pid}) is stopped" in until(lambda: "lives" in (said := ended_children()) and said)
    finally:
        lives.kill()
        lives.join(5)
        killed.join(5)


@pytest.mark.parametrize(
    ("wait_in", "text"),
    [
        (lambda: threading.Event().wait(20), "threading.Event.wait: nobody has set it, timeout 20 s"),
        (lambda: threading.Barrier(3).wait(20), "threading.Barrier.wait: 1 of 3 threads have come"),
        (lambda: threading.Semaphore(0).acquire(timeout=20), "threading.Semaphore.acquire: nobody has released it"),
    ],
)
def test_what_threads_wait_in(wait_in: Callable[[], object], text: str) -> None:
    assert standing(wait_in, text).kind == "lock"


def test_a_condition() -> None:
    condition = threading.Condition()

    def wait_in() -> None:
        with condition:
            condition.wait(20)

    wait = standing(wait_in, "threading.Condition.wait")
    assert (wait.kind, wait.timeout_s) == ("lock", 20)


@on_linux
def test_a_lock_has_the_name_that_the_line_gives_it() -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock = LOCK

        def enter(self) -> None:
            with self.lock:
                pass

        def acquire(self) -> None:
            self.lock.acquire()
            self.lock.release()

    with LOCK:
        assert standing(Holder().enter, "the lock").on == "self.lock"
        assert standing(Holder().acquire, "the lock").on == "self.lock"


@on_linux
def test_a_lock_is_reported_with_the_thread_that_stands_within_it(stop: threading.Event) -> None:
    """A lock of Python's does not know its owner; the line does that took it."""

    free = threading.Event()

    def hold() -> None:
        free.wait(30)
        with open(os.devnull), KEPT:
            for _ in range(2):
                try:
                    stop.wait(30)  # within KEPT
                finally:
                    assert KEPT.locked()

    def held_before() -> None:
        with KEPT:
            pass
        stop.wait(30)

    def enter() -> None:
        with KEPT:
            pass

    start(hold, "holder")
    before = start(held_before, "before")  # looked at first: it is the younger one
    until(lambda: "Event.wait" in getattr(wait_of(before), "text", ""))
    free.set()
    until(KEPT.locked)
    line = next(number for number, text in enumerate(SOURCE, start=1) if text.endswith("# within KEPT"))
    expected = f"the lock KEPT, which is held by the thread 'holder' at {__file__}:{line} in {hold.__qualname__}"
    assert standing(enter, "which is held by").text == expected


@on_linux
def test_a_lock_of_an_object_has_a_holder_by_its_name(stop: threading.Event) -> None:
    class State:
        def __init__(self) -> None:
            self.state_lock = threading.Lock()

        def hold(self) -> None:
            with self.state_lock:
                stop.wait(30)

        def enter(self) -> None:
            self.state_lock.acquire()
            self.state_lock.release()

    state = State()
    start(state.hold, "holder")
    until(state.state_lock.locked)
    text = standing(state.enter, "held by").text
    assert text.startswith("the lock self.state_lock, which ")
    assert " held by the thread 'holder' at " in text


@on_linux
def test_a_lock_that_knows_its_owner(stop: threading.Event) -> None:
    def hold() -> None:
        with OWNED:
            stop.wait(30)

    def enter() -> None:
        with OWNED:
            pass

    holder = start(hold, "writer")
    until(lambda: wait_of(holder))
    assert standing(enter, "the lock").text == "the lock OWNED, held by the thread 'writer'"


@on_linux
def test_a_queue_in_c() -> None:
    assert standing(lambda: SAMPLES.get(), "SAMPLES.get").text == "SAMPLES.get: the queue is empty"
    SAMPLES.put(1)


def test_a_joined_thread_and_what_it_waits_for(stop: threading.Event) -> None:
    held: queue.Queue[int] = queue.Queue()
    uploader = start(held.get, "uploader")
    wait = standing(lambda: uploader.join(60), "queue.get")
    assert (wait.kind, wait.on, wait.timeout_s) == ("thread", "uploader", 60)
    assert wait.text.startswith("the thread 'uploader', which is alive and waits for queue.get: the queue is empty")
    held.put(1)


def test_threads_that_join_each_other_are_reported_and_not_followed_for_ever() -> None:
    threads: list[threading.Thread] = []
    ready = threading.Event()
    for at in range(2):
        threads.append(start(lambda at=at: ready.wait(30) and threads[1 - at].join(30), f"thread-{at}"))
    ready.set()
    wait = until(lambda: (found := wait_of(threads[0])) and found.text.count("thread-") > 2 and found)
    assert wait.text.count("thread-") <= 6


def test_a_future_names_the_thread_that_works_on_it() -> None:
    held: queue.Queue[int] = queue.Queue()
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="scorer") as executor:
        first, second = executor.submit(held.get), executor.submit(held.get)
        wait = standing(lambda: first.result(50), "queue.get")
        assert (wait.kind, wait.on, wait.timeout_s) == ("thread", "scorer_0", 50)
        assert standing(second.result, "pending").kind == "future"
        assert "2 futures (concurrent.futures.as_completed)" in (
            standing(lambda: list(concurrent.futures.as_completed([first, second])), "as_completed").text
        )
        wait = standing(lambda: concurrent.futures.wait([first, second], timeout=44), "concurrent.futures.wait")
        assert wait.timeout_s == 44
        held.put(1)
        held.put(2)


def test_a_future_of_processes_names_those_that_are_gone() -> None:
    executor = concurrent.futures.ProcessPoolExecutor(2, mp_context=FORK)
    try:
        future = executor.submit(time.sleep, 60)
        wait = standing(future.result, "ProcessPoolExecutor")
        pids = sorted(executor._processes)
        assert wait.kind == "process"
        assert all(str(pid) in wait.text for pid in pids)
        assert wait.pid in pids
    finally:
        for process in list(executor._processes.values()):
            process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def test_subprocesses(sleeper: "subprocess.Popen[bytes]") -> None:
    for run in (sleeper.wait, lambda: sleeper.wait(60), lambda: sleeper.communicate(timeout=60)):
        wait = standing(run, "sleep 60")
        assert (wait.kind, wait.pid, wait.on) == ("subprocess", sleeper.pid, "sleep 60")
        assert f"(pid {sleeper.pid}, runs: " in wait.text


def test_a_subprocess_that_writes_is_read() -> None:
    command = ["sh", "-c", "sleep 60"]
    wait = standing(lambda: subprocess.run(command, capture_output=True, timeout=50, check=False), "sh -c")
    assert (wait.kind, wait.on) == ("subprocess", "sh -c sleep 60")
    os.kill(wait.pid, 9)


@on_linux
@pytest.mark.parametrize("is_read_by_pid", [False, True])
def test_a_secret_on_a_command_line_is_not_shown(is_read_by_pid: bool) -> None:
    words = ["sh", "-c", "sleep 60", "-H", "Authorization: Bearer hf_SECRET123"]
    with subprocess.Popen(words) as process:
        try:
            run = (lambda: os.waitpid(process.pid, 0)) if is_read_by_pid else process.wait
            wait = standing(run, "sh -c sleep 60")
            assert wait.text.startswith("sh -c sleep 60 -H *** *** *** (pid ")
            assert "SECRET" not in wait.on
        finally:
            os.kill(process.pid, 9)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("upload --token hf_1 --to hub", "upload --token *** --to hub"),
        ("upload --api-key=hf_1 --to hub", "upload --api-key=*** --to hub"),
        ("env HF_TOKEN=hf_1 PGPASSWORD=x run a", "env HF_TOKEN=*** PGPASSWORD=*** run a"),
        ("curl --header=Authorization: Bearer hf_1 h", "curl --header=*** *** *** h"),
        ("curl 'X-Api-Key: hf_1' h", "curl *** *** h"),
        ("curl -HAuthorization:hf_1 https://h/a?secret=b", "curl *** ***"),
        ("python train.py --steps=5 config.toml", "python train.py --steps=5 config.toml"),
    ],
)
def test_words_that_look_like_keys_are_masked(command: str, text: str) -> None:
    assert without_secrets(command) == text


@on_linux
def test_a_subprocess_whose_output_is_not_read() -> None:
    """The classic: the process that waits for its end is the one that should read."""
    words = [sys.executable, "-c", "print('x' * 1_000_000)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        wait = standing(lambda: process.wait(60), "runs: S, its output fills a pipe that nobody reads")
        assert f"(pid {process.pid}, runs: S, " in wait.text
        process.communicate()


@on_linux
def test_a_stopped_subprocess_and_the_kernels_wait(sleeper: "subprocess.Popen[bytes]") -> None:
    wait = standing(lambda: os.waitpid(sleeper.pid, 0), "sleep 60")
    assert (wait.kind, wait.pid) == ("subprocess", sleeper.pid)
    os.kill(sleeper.pid, 19)
    assert standing(lambda: os.waitpid(sleeper.pid, 0), "is stopped").pid == sleeper.pid


def test_processes_and_pools_of_them() -> None:
    process = FORK.Process(target=time.sleep, args=(60,), name="loader")
    process.start()
    pool = FORK.Pool(2)
    try:
        for timeout in (None, 40):
            wait = standing(lambda timeout=timeout: process.join(timeout), "'loader'")
            assert (wait.kind, wait.pid, wait.on, wait.timeout_s) == ("process", process.pid, "loader", timeout)
        wait = standing(lambda: pool.map(time.sleep, [60, 60]), "multiprocessing.Pool")
        pids = sorted(each.pid for each in pool._pool)
        assert wait.text.startswith("2 workers of a multiprocessing.Pool, pids")
        assert wait.pid in pids
    finally:
        process.kill()
        process.join()
        pool.terminate()
        pool.join()


def test_pools_of_threads(stop: threading.Event) -> None:
    pool = multiprocessing.pool.ThreadPool(2)
    wait = standing(lambda: pool.map(lambda _: stop.wait(30), [1]), "2 threads of a pool")
    assert wait.kind == "thread"
    stop.set()
    pool.close()
    pool.join()


class Slow:
    """A data set whose samples never come."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> int:
        time.sleep(60)
        return at


def test_data_loader_workers_and_which_is_gone() -> None:
    data = pytest.importorskip("torch.utils.data")
    iterator = iter(data.DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"))
    try:
        pids = [each.pid for each in iterator._workers]
        wait = standing(lambda: next(iterator), "DataLoader")
        assert wait.kind == "process"
        assert wait.text == f"2 DataLoader workers, pids {pids[0]}, {pids[1]}"
    finally:
        for each in iterator._workers:
            each.kill()
            each.join()


def test_a_worker_that_is_gone_is_named(stop: threading.Event) -> None:
    from offbeat_liveness._process.outside.concurrency import workers

    processes = [FORK.Process(target=time.sleep, args=(60,)) for _ in range(2)]
    for each in processes:
        each.start()
    try:
        os.kill(processes[1].pid or 0, 9)
        gone = processes[1].pid
        wait = until(lambda: (found := workers(processes, "DataLoader workers")) and "gone" in found.text and found)
        assert wait.text.endswith(f"({gone} is gone)")
        assert wait.pid == gone
    finally:
        for each in processes:
            each.kill()
            each.join()
