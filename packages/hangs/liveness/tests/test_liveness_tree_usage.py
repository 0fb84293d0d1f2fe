"""What a process and its descendants use: children that compute, write, sleep and end."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat_liveness._process import proc as module
from offbeat_liveness._process.proc import TreeUsage, UsageRates, rates, tree_usage
from offbeat_liveness._process.stacks import OwnThread

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
LIMIT_S = 20.0
MEBIBYTE = 1 << 20


@contextlib.contextmanager
def a_tree(leaf: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that starts another, which runs `leaf`; both are up when the block begins, and end after it."""
    middle = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=False)"
    begun = f"import sys, os, time; print('up', flush=True)\n{leaf}"
    with subprocess.Popen(
        [sys.executable, "-c", middle, begun, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def rates_until(pid: int, is_enough: Callable[[UsageRates], bool]) -> UsageRates:
    before, end_s = tree_usage(pid), time.monotonic() + LIMIT_S
    while True:
        time.sleep(0.05)
        found = rates(before, tree_usage(pid))
        if is_enough(found) or time.monotonic() > end_s:
            return found


def test_a_grandchild_that_computes_is_movement() -> None:
    with a_tree("while True: pass") as process:
        assert tree_usage(process.pid).num_processes == 2
        found = rates_until(process.pid, lambda each: each.cores > 0.05)
        assert found.cores > 0.05
        assert rates_until(process.pid, lambda each: each.at_work).at_work


def test_a_grandchild_that_writes_is_movement(tmp_path: Path) -> None:
    code = "file = open(sys.argv[1], 'wb', 0)\nwhile True: file.seek(0); file.write(bytes(1 << 20)); time.sleep(0.01)"
    with a_tree(code, str(tmp_path / "written")) as process:
        assert rates_until(process.pid, lambda each: each.io_bytes_per_s > MEBIBYTE).io_bytes_per_s > MEBIBYTE


def test_those_that_sleep_do_not_move() -> None:
    with a_tree("time.sleep(600)") as process:
        time.sleep(0.5)  # it has only just begun
        before = tree_usage(process.pid)
        time.sleep(1.0)
        after = tree_usage(process.pid)
        assert after.num_processes == 2
        assert not after.at_work
        found = rates(before, after)
        assert (found.cores, found.io_bytes_per_s, found.at_work) == (0.0, 0.0, False)


def test_children_that_come_and_go_between_two_looks_count() -> None:
    code = (
        "import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "code = 'import time; end = time.process_time() + 0.2\\nwhile time.process_time() < end: pass'\n"
        "for _ in range(2): subprocess.run([sys.executable, '-S', '-c', code], check=True)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            before = tree_usage(process.pid)
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"
            after = tree_usage(process.pid)
        finally:
            process.kill()
    assert (before.num_processes, after.num_processes) == (1, 1)
    assert after.cpu_s - before.cpu_s >= 0.35


def test_looking_at_oneself_is_no_movement() -> None:
    """What a look reads from /proc counts as the process's own reading, and the thread that looks is on a core."""
    before = tree_usage(os.getpid())
    for _ in range(200):
        after = tree_usage(os.getpid())
    assert after.io_bytes - before.io_bytes == 0
    assert not after.at_work


def test_another_thread_of_this_process_that_computes_is_at_work() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        end_s = time.monotonic() + LIMIT_S
        while not tree_usage(os.getpid()).at_work and time.monotonic() < end_s:
            time.sleep(0.01)
        assert time.monotonic() < end_s
    finally:
        stop.set()
        thread.join()


def test_threads_that_come_and_go_between_two_looks_count() -> None:
    def compute() -> None:
        while time.thread_time() < 0.06:
            pass

    before = tree_usage(os.getpid())
    for _ in range(5):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    after = tree_usage(os.getpid())
    assert after.cpu_s - before.cpu_s >= 0.25


def test_the_watchs_own_threads_do_not_count() -> None:
    stop, computed = threading.Event(), threading.Event()

    def compute() -> None:
        while time.thread_time() < 0.3:
            pass
        computed.set()
        stop.wait()

    before = tree_usage(os.getpid())
    thread = OwnThread(compute, "answers")
    thread.start()
    computed.wait(LIMIT_S)
    after = tree_usage(os.getpid())
    stop.set()
    thread.join()
    assert after.cpu_s - before.cpu_s <= 0.1
    assert tree_usage(os.getpid()).cpu_s - before.cpu_s <= 0.1, "nor when they have ended"


def test_children_are_found_where_the_kernel_does_not_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_THREADS", 0)
    with a_tree("time.sleep(600)") as process:
        assert tree_usage(process.pid).num_processes == 2


def test_a_process_that_is_gone_has_used_nothing_and_rates_are_never_below_zero() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = tree_usage(process.pid)
    assert gone.num_processes == 0
    assert rates(TreeUsage(cpu_s=5.0, io_bytes=7), gone) == UsageRates(cores=0.0, io_bytes_per_s=0.0, at_work=False)
