"""Locks of files, pipes that are full, workers that are gone: reported with the process to look at."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from liveness_standing import standing, until

from offbeat_liveness._process.outside import file_locks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by /proc")
fcntl = pytest.importorskip("fcntl")

FORK: Any = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
BIG = 4_000_000
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[2], "a")
getattr(fcntl, sys.argv[1])(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def held_lock(path: Path, call: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that holds a lock of a file."""
    words = [sys.executable, "-S", "-c", HOLDER, call, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        until(lambda: " S " in Path(f"/proc/{holder.pid}/stat").read_text(), "the holder to have gone to sleep")
        try:
            yield holder
        finally:
            holder.kill()


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_the_process_that_holds_a_lock_of_a_file_is_named(call: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("a") as file, held_lock(path, call) as holder:
        wait = standing(lambda: getattr(fcntl, call)(file, fcntl.LOCK_EX), "held by pid")
        assert (wait.kind, wait.on, wait.pid) == ("lock", str(path), holder.pid)
        assert f"held by pid {holder.pid} ({sys.executable} -S -c" in wait.text
        assert "runs: S)" in wait.text


def test_a_lock_of_filelock_which_asks_again_and_again(tmp_path: Path) -> None:
    filelock = pytest.importorskip("filelock")
    path = tmp_path / "datasets.lock"
    with held_lock(path, "flock") as holder:
        wait = standing(lambda: filelock.FileLock(path).acquire(), f"a lock of {path} (filelock), held by pid")
        assert (wait.kind, wait.pid, wait.timeout_s) == ("lock", holder.pid, None)
        assert standing(lambda: filelock.FileLock(path).acquire(timeout=50), "timeout 50 s").timeout_s == 50


def test_a_file_system_that_may_hang_is_not_asked_for_a_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(file_locks.os, "lstat", lambda path: pytest.fail("a server was asked"))
    assert file_locks._status(str(tmp_path)) is None


def test_the_file_that_a_killed_build_of_an_extension_has_left(tmp_path: Path) -> None:
    batons = pytest.importorskip("torch.utils.file_baton")
    path = tmp_path / "lock"
    path.touch()
    wait = standing(batons.FileBaton(str(path)).wait, f"the file {path} to go")
    assert (wait.kind, wait.on) == ("lock", str(path))
    path.unlink()


def test_a_named_pipe_that_no_process_opens_is_no_slow_file_system(tmp_path: Path) -> None:
    path = tmp_path / "commands"
    os.mkfifo(path)
    wait = standing(lambda: path.open("rb").read(1), "opens the other end")
    assert (wait.kind, wait.on) == ("process", str(path))
    with path.open("wb"):
        pass


def tokenize(part: int) -> int:
    if part == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return part


def test_a_pool_that_has_replaced_a_killed_worker_says_whose_result_never_comes() -> None:
    pool = FORK.Pool(2)
    try:
        wait = standing(lambda: pool.map(tokenize, range(4), chunksize=1), "in place of one that died")
        replacement = wait.text.partition("; pid ")[2].partition(" is in place")[0]
        assert int(replacement) in [each.pid for each in pool._pool]
        assert "2 workers of a multiprocessing.Pool, pids" in wait.text
    finally:
        pool.terminate()
        pool.join()


def test_a_pool_whose_workers_end_as_they_should_has_lost_nothing() -> None:
    with FORK.Pool(2, maxtasksperchild=1) as pool:
        pool.map(abs, range(4), chunksize=1)
        wait = standing(lambda: pool.map(time.sleep, [60]), "workers of a multiprocessing.Pool")
        assert "in place of" not in wait.text


def put_much(results: Any) -> None:
    results.put("x" * BIG)


def test_a_worker_that_is_joined_before_its_queue_is_read() -> None:
    """Its thread that feeds the queue writes, while its main thread has ended."""
    results = FORK.Queue()
    worker = FORK.Process(target=put_much, args=(results,), name="tokenizer")
    worker.start()
    wait = standing(worker.join, "runs: S, its output fills a pipe that nobody reads")  # R until the pipe is full
    assert wait.text.startswith(f"the end of the process 'tokenizer' (pid {worker.pid}, runs: S, ")
    assert len(results.get()) == BIG
    worker.join()


def send_much(link: Any) -> None:
    link.send_bytes(b"x" * BIG)
    link.recv_bytes()


def test_two_that_send_to_each_other_at_once() -> None:
    mine, theirs = FORK.Pipe()
    engine = FORK.Process(target=send_much, args=(theirs,), name="engine")
    engine.start()
    try:
        wait = standing(lambda: mine.send_bytes(b"y" * BIG), "waits too")
        assert wait.text.startswith("room to send to")
        assert f"; its child 'engine' (pid {engine.pid}) waits too, for room to write" in wait.text
        assert len(mine.recv_bytes()) == BIG
    finally:
        engine.join(10)


def test_a_child_that_fills_one_pipe_while_another_is_read() -> None:
    code = "import sys; sys.stderr.write('x' * 1_000_000); print()"
    words = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        wait = standing(child.stdout.readline, "nobody reads")
        assert wait.text.startswith(f"data from a pipe that pid {child.pid} has too ({sys.executable} -S -c")
        assert wait.pid == child.pid
        child.communicate()


class Meter:
    """Takes its lock, and takes it again in what it calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def add(self) -> None:
        with self.lock:
            self.log()

    def log(self) -> None:
        with self.lock:
            pass


def test_a_lock_that_its_own_thread_holds() -> None:
    meter = Meter()
    wait = standing(meter.add, "this thread itself")
    assert f"by this thread itself at {__file__}:" in wait.text
    assert wait.text.endswith("in Meter.add")
    meter.lock.release()


class Trainer:
    """Has a lock of its own, over a call of one that has another."""

    def __init__(self, meter: Meter) -> None:
        self.lock, self.meter = threading.Lock(), meter

    def step(self) -> None:
        with self.lock:
            self.meter.log()


def test_the_lock_of_a_caller_is_not_the_lock_that_is_wanted() -> None:
    meter = Meter()
    meter.lock.acquire()
    assert "itself" not in standing(Trainer(meter).step, "the lock self.lock").text
    meter.lock.release()


@pytest.mark.parametrize("call", [lambda: signal.sigwait({signal.SIGUSR1}), signal.pause], ids=["sigwait", "pause"])
def test_a_signal_that_is_never_sent(call: Callable[[], object]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert standing(call, "a signal").kind == "signal"
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_a_program_that_is_through_and_lives_on_for_a_thread() -> None:
    code = "import threading; threading.Thread(target=threading.Event().wait, name='saver').start()"
    assert "the thread 'saver', as its main thread has ended" in output_of(code)


def output_of(code: str) -> str:
    """What a watcher in a program says of its main thread once that has ended."""
    watcher = """
import os, sys, threading, time
from offbeat_liveness._process.outside import outside_wait
def watch():
    while True:
        wait = outside_wait(sys._current_frames()[threading.main_thread().ident], os.getpid())
        if wait is not None and "has ended" in wait.text:
            print(wait.text, flush=True)
            os._exit(0)
        time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
"""
    return subprocess.run([sys.executable, "-c", watcher + code], stdout=subprocess.PIPE, text=True, timeout=60).stdout
