"""Nothing of the program is called or kept when it is read; a person, the interpreter, and Ray are reported too."""

import asyncio
import concurrent.futures
import gc
import json
import logging
import logging.handlers
import os
import queue
import socketserver
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from liveness_standing import acts, standing, start, until, wait_of

from offbeat_liveness._process import snapshot as wire
from offbeat_liveness._process.outside import may_act, outside_wait, peek
from offbeat_liveness._process.stacks import current_frames

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by /proc")


class Trap(BaseException):
    """Raised where code of the program is run."""


class Trapped:
    """Every way in which reading an object may run its code."""

    __slots__ = ("__dict__", "slot", "unset")
    plain = 3

    def __init__(self) -> None:
        object.__setattr__(self, "slot", "slot")
        object.__setattr__(self, "stored", "stored")

    def __getattribute__(self, name: str) -> Any:
        raise Trap(name)

    def __getattr__(self, name: str) -> Any:
        raise Trap(name)

    @property
    def computed(self) -> Any:
        raise Trap

    def _trap(self, *_: Any) -> Any:
        raise Trap

    __repr__ = __str__ = __format__ = __len__ = __iter__ = __eq__ = __hash__ = __bool__ = _trap  # type: ignore[assignment]


def test_reading_an_object_runs_none_of_its_code() -> None:
    trapped = Trapped()
    assert peek.attribute(trapped, "stored") == "stored"
    assert peek.attribute(trapped, "slot") == "slot"
    assert peek.attribute(trapped, "plain") == 3
    for name in ("unset", "computed", "missing", "_trap"):
        assert peek.attribute(trapped, name) is None
    assert peek.text(trapped) == ""
    assert peek.number(trapped) is peek.size(trapped) is None
    assert peek.members(trapped) == []
    assert peek.type_name(trapped) == "Trapped"


def test_a_dict_that_is_a_property_is_not_asked() -> None:
    class Hidden:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise Trap

    assert peek.attribute(Hidden(), "any") is None


def test_texts_are_cut_and_are_exact() -> None:
    class Text(str):
        def __str__(self) -> str:
            raise Trap

    text = peek.text(Text("x" * 1000))
    assert type(text) is str
    assert len(text) == peek.MAX_TEXT + 1


class TrappedQueue(queue.Queue[int]):
    """A queue whose size is a question to another process."""

    def __getattribute__(self, name: str) -> Any:
        if threading.current_thread().name == "MainThread":
            raise Trap(name)
        return super().__getattribute__(name)


def test_a_queue_that_guards_itself_is_reported_all_the_same() -> None:
    held: list[TrappedQueue] = []
    thread = start(lambda: (held.append(TrappedQueue()), held[0].get()))
    wait = until(lambda: wait_of(thread))
    assert wait.text == "queue.get: the queue is empty"
    start(lambda: held[0].put(1)).join(10)


def test_no_frame_and_nothing_in_it_outlives_the_wait() -> None:
    class Batch:
        pass

    batches: list[weakref.ref[Batch]] = []
    held: queue.Queue[int] = queue.Queue()
    done = threading.Event()
    go = threading.Event()

    def train() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        held.get()
        del batch
        done.set()
        go.wait(30)

    gc.disable()
    try:
        thread = start(train)
        wait = until(lambda: wait_of(thread))
        assert "queue.get" in wait.text
        held.put(1)
        assert done.wait(30)
        assert batches[0]() is None, "the frame of the program keeps what it has let go"
    finally:
        gc.enable()
        go.set()


def test_a_thread_that_looks_at_itself_leaves_no_circle() -> None:
    class Batch:
        pass

    def look() -> weakref.ref[Batch]:
        batch = Batch()
        outside_wait(sys._getframe(), threading.get_native_id())
        may_act(sys._getframe())
        return weakref.ref(batch)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


def test_a_thread_that_computes_waits_for_nothing() -> None:
    go = threading.Event()

    def compute() -> None:
        while not go.is_set():
            sum(range(10_000))

    thread = start(compute)
    try:
        for _ in range(50):
            frame = current_frames().get(thread.ident or 0)
            assert outside_wait(frame, thread.native_id) is None
            assert may_act(frame)
            frame = None
    finally:
        go.set()
        thread.join(10)


def test_no_frame_is_no_wait() -> None:
    assert outside_wait(None) is None
    assert outside_wait(None, 1) is None
    assert not may_act(None), "a thread that has ended"


def test_what_is_reported_travels() -> None:
    wait = wire.OutsideWait(kind="http", text="an answer", address="h:1", timeout_s=1.5)
    head = wire.ThreadSnapshot(name="MainThread", outside=wait)
    assert wire.from_data(wire.ThreadSnapshot, json.loads(json.dumps(wire.to_data(head)))) == head


def test_a_library_that_changed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held: queue.Queue[int] = queue.Queue()
    thread = start(held.get)
    until(lambda: wait_of(thread))

    def fail(frame: FrameType, name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr(peek, "local", fail)
    assert wait_of(thread) is None
    held.put(1)


@on_linux
def test_a_sleep_is_reported_with_what_is_left_of_it() -> None:
    wait = standing(lambda: time.sleep(50), "a sleep")
    assert wait.kind == "sleep"
    assert 0 <= int(wait.text.split(", ")[1].split()[0]) <= 50


def wait_in(kind: str, code: str, *, text: str = "", stdin: int = subprocess.PIPE) -> str:
    watcher = with_watcher(code)
    process = subprocess.Popen(
        [sys.executable, "-c", watcher, kind, text], stdin=stdin, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "WAIT " in line:
                return line.partition("WAIT ")[2].strip()
        raise AssertionError(f"no {kind} was reported")
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def with_watcher(code: str) -> str:
    return (
        "import sys, threading, time, os\n"
        "from offbeat_liveness._process.stacks import current_frames\n"
        "from offbeat_liveness._process.outside import outside_wait\n"
        "main = threading.main_thread()\n"
        "def watch():\n"
        "    for _ in range(300):\n"
        "        time.sleep(0.1)\n"
        "        wait = outside_wait(current_frames().get(main.ident), main.native_id)\n"
        "        if wait is not None and wait.kind == sys.argv[1] and sys.argv[2] in wait.text:\n"
        "            print('\\nWAIT', wait.text, '|', wait.on, flush=True)\n"
        "            os._exit(0)\n"
        "    os._exit(1)\n"
        "threading.Thread(target=watch, daemon=True).start()\n" + code
    )


@on_linux
@pytest.mark.parametrize("code", ["input()", "sys.stdin.readline()"])
def test_the_standard_input_as_a_pipe(code: str) -> None:
    assert wait_in("terminal", code).startswith("its standard input, a pipe")


@on_linux
def test_the_standard_input_as_a_terminal() -> None:
    outer, inner = os.openpty()
    try:
        assert wait_in("terminal", "input()", stdin=inner).startswith("its standard input, the terminal /dev/pts/")
    finally:
        os.close(outer)
        os.close(inner)


def test_a_debugger_is_reported_with_the_line_where_it_has_stopped() -> None:
    code = "def train():\n    breakpoint()\n    return 1\ntrain()\n"
    line = wait_in("debugger", code, text="<string>")
    assert line.startswith("a person: it is stopped in a debugger at <string>:")


def test_an_import_is_reported_with_the_innermost_module(tmp_path: Path) -> None:
    (tmp_path / "outer_module.py").write_text("import inner_module\n")
    (tmp_path / "inner_module.py").write_text("x = 0\nwhile True:\n    x += 1\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport outer_module\n"
    assert wait_in("import", code, text="inner") == "the import of inner_module | inner_module"


def test_an_import_that_another_thread_has_begun_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_that_waits.py").write_text("import threading\nthreading.Event().wait(20)\n")
    start(lambda: __import__("module_that_waits"), "loader")
    until(lambda: "module_that_waits" in sys.modules)
    wait = standing(lambda: __import__("module_that_waits"), "has begun")
    assert (wait.kind, wait.on) == ("import", "module_that_waits")
    assert "which the thread 'loader' has begun" in wait.text


RAY = """
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
@ray.remote
def roll():
    time.sleep(60)
reference = roll.remote()
print("ID", reference.hex(), flush=True)
ray.{call}
"""


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Ray is not installed there")
@pytest.mark.parametrize("call", ["get(reference, timeout=55)", "wait([reference], timeout=55)"])
def test_ray_objects_are_reported_by_their_ids(call: str) -> None:
    pytest.importorskip("ray")
    line = wait_in("ray", RAY.format(call=call), text="timeout 55 s")
    name = call.partition("(")[0]
    assert line.startswith(f"ray.{name} of {'1 of ' if name == 'wait' else ''}1 object")
    assert "timeout 55 s" in line
    assert len(line.partition("| ")[2]) == 56, "an id of Ray has 28 bytes"


def idle_threads() -> Iterator[tuple[str, Callable[[], threading.Thread], Callable[[], object]]]:
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.submit(int).result()
    yield "executor", lambda: next(iter(executor._threads)), executor.shutdown
    listener = logging.handlers.QueueListener(queue.Queue())
    listener.start()
    yield "logging", lambda: listener._thread, listener.stop  # type: ignore[return-value]
    loop = asyncio.new_event_loop()
    yield "loop", lambda: start(loop.run_forever), lambda: loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("which", ["executor", "logging", "loop"])
def test_a_thread_that_waits_for_work_releases_nothing(which: str) -> None:
    for name, begin, end in idle_threads():
        thread = begin() if name == which else None
        if thread is not None:
            until(lambda thread=thread: not acts(thread), f"{name} may act")
        if thread is not None or name in ("executor", "logging"):
            end()


def test_servers_may_act_for_the_next_client() -> None:
    server = socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    thread = start(server.serve_forever)
    until(lambda: acts(thread))
    server.shutdown()
    server.server_close()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0))
    thread = start(loop.run_forever)
    until(lambda: acts(thread))
    loop.call_soon_threadsafe(loop.stop)


def test_feeders_of_queues_and_monitors_of_bars_release_nothing() -> None:
    import multiprocessing

    held = multiprocessing.Queue()
    held.put(1)
    assert held.get() == 1
    feeder = held._thread  # type: ignore[attr-defined]
    until(lambda: not acts(feeder))
    held.close()
    held.join_thread()


def test_the_same_threads_may_act_while_they_work() -> None:
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(stop.wait, 30)
        worker = next(iter(executor._threads))
        time.sleep(0.1)
        assert acts(worker)
        stop.set()


def test_a_loop_with_a_task_or_a_timer_may_act() -> None:
    loop = asyncio.new_event_loop()
    thread = start(loop.run_forever)
    until(lambda: not acts(thread))
    timer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, loop.call_later(60, int)), loop).result()
    until(lambda: acts(thread))
    timer.cancel()
    future = asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), loop)
    until(lambda: acts(thread))
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # the task has begun
    future.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # and has ended
    until(lambda: not acts(thread))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_an_executor_of_processes_may_act_while_it_has_work() -> None:
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
        executor.submit(int).result()
        manager = executor._executor_manager_thread
        until(lambda: not acts(manager))
        executor.submit(time.sleep, 2)
        until(lambda: acts(manager))


def test_a_thread_that_waits_for_the_program_may_act() -> None:
    event = threading.Event()
    thread = start(lambda: event.wait(30))
    time.sleep(0.1)
    assert acts(thread)
    event.set()
