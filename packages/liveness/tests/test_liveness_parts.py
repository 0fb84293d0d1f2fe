"""Parts of the monitor by themselves: settings, ledger, stacks, side channel, dumps, recorder's forms, fates."""

import contextlib
import dataclasses
import faulthandler
import gc
import hashlib
import json
import linecache
import os
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import offbeat_liveness as liveness
from offbeat_liveness import LivenessError, _dumps
from offbeat_liveness._cli import main
from offbeat_liveness._network.side_channel import Address, Listener, Message, ask, ask_all
from offbeat_liveness._process import ledger, world_entry
from offbeat_liveness._process.crash import CrashFile, path_of, read_crash
from offbeat_liveness._process.errors_seen import exception_in_flight
from offbeat_liveness._process.goodbye import describe
from offbeat_liveness._process.head import Head, ThreadHead, Wait
from offbeat_liveness._process.kernel.proc import HOST, birth, pid_state
from offbeat_liveness._process.ledger import LEDGER, Entry, Ledger
from offbeat_liveness._process.motion import Motion
from offbeat_liveness._process.reading import read_head
from offbeat_liveness._process.recorder import flight_recorder, nccl_recorder
from offbeat_liveness._process.recorder.entries import parse_entries
from offbeat_liveness._process.stacks import is_machinery, stack_of, thread_frames
from offbeat_liveness._settings import read_settings


def test_the_public_names_are_these() -> None:
    assert liveness.__all__ == sorted(liveness.__all__)
    assert {"watch", "waiting", "name_group", "Verdict", "Monitor", "recent_collectives"} <= set(liveness.__all__)


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
    """A list whose length all threads that ask for it are told at once."""

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

    module, name = (ledger, "_BEFORE_WAIT") if where == "wait" else (world_entry, "_CALLS")
    begun: list[int] = []
    monkeypatch.setattr(module, name, HeldUp(lambda: begun.append(1), 2))
    come = wait if where == "wait" else world_entry._announcing(lambda: None)
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


def test_a_stderr_that_nobody_reads_does_not_hold_up_the_monitor() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    code = "from offbeat_liveness._ending import say; say('x' * 100_000)"
    try:
        assert subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=20, check=False).returncode == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_the_looks_are_close_enough_for_the_promise_of_two_seconds() -> None:
    """A stall is seen to begin up to one look late, and its end up to another."""
    assert 2 * read_settings(environment={}).tick_s <= 1.0


def test_a_stack_is_told_without_torch_and_the_standard_library() -> None:
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


def test_a_loop_that_polls_stands_still_and_new_lines_are_movement() -> None:
    motion, stop, phase = Motion(longest_gap_s=60.0), threading.Event(), threading.Event()

    def poll() -> None:
        while not phase.wait(0.001):
            pass
        sum(range(10))
        stop.wait()

    thread = threading.Thread(target=poll)
    thread.start()
    for _ in range(40):
        motion.look()
        time.sleep(0.005)
    still_s = motion.thread_still_s(thread.ident or 0)
    phase.set()
    time.sleep(0.05)
    motion.look()
    moved_s = motion.thread_still_s(thread.ident or 0)
    stop.set()
    thread.join()
    assert still_s > moved_s


def test_a_thread_on_a_new_line_moves_though_it_stands_in_the_same_helper() -> None:
    """A new call of the helper often gets the frame of the last one: only its caller is somewhere else."""
    motion, arrived, goes_on = Motion(longest_gap_s=60.0), threading.Semaphore(0), threading.Lock()
    seen: list[bool] = []

    def helper() -> None:
        arrived.release()
        goes_on.acquire()

    def watch() -> None:
        for _ in range(10):
            arrived.acquire()
            came_s = time.monotonic()
            time.sleep(0.02)  # it stands in acquire()
            motion.look()
            seen.append(motion.thread_still_s(worker.ident or 0) <= time.monotonic() - came_s)
            goes_on.release()

    goes_on.acquire()
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
    motion = Motion(longest_gap_s=60.0)
    try:
        for each in hogs:
            assert each.stdout is not None
            each.stdout.readline()
        thread.start()
        begun.wait()
        motion.busy(worker=thread.ident or 0)  # from now on its work is counted
        for _ in range(20):
            motion.look()
            time.sleep(0.05)
        assert motion._thread_busy(thread.ident or 0) > 0.5
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

    motion = Motion(longest_gap_s=60.0)
    shape = {"name": "", "world": "", "rank": 0, "world_size": 1, "stall_after_s": 1.0}
    gc.disable()
    try:
        for look in (motion.look, lambda: read_head(motion, **shape), thread_frames):
            assert compute(look)() is None, look
        assert compute(lambda: read_head(motion, **shape), itself=True)() is None
    finally:
        gc.enable()


def test_a_process_that_was_suspended_begins_anew() -> None:
    motion = Motion(longest_gap_s=1.0)
    motion.look()
    time.sleep(1.2)
    assert motion.still_s() > 1.0
    motion.look()
    assert motion.still_s() < 1.0


def address_of(listener: Listener, name: str = "rank 0") -> Address:
    return Address(host=listener.host, port=listener.port, machine="vm", pid=1, born=0, name=name)


def echo(message: Message) -> Message:
    return {"heard": message["ask"]}


def test_a_question_is_answered_to_those_who_know_the_secret() -> None:
    listener = Listener("127.0.0.1", lambda: "s3cret", echo)
    try:
        assert ask(address_of(listener), {"ask": "ping"}, "s3cret", 5.0) == {"heard": "ping"}
        assert ask(address_of(listener), {"ask": "ping"}, "guess", 5.0) is None
    finally:
        listener.close()


def test_all_are_asked_at_once_and_the_silent_are_left_out() -> None:
    listeners = [Listener("127.0.0.1", lambda: "s", echo) for _ in range(20)]
    silent = socket.create_server(("127.0.0.1", 0))  # accepts in the kernel, never answers: like a stopped process
    closed = Listener("127.0.0.1", lambda: "s", echo)
    closed.close()
    addresses = {number: address_of(each) for number, each in enumerate([*listeners, closed])}
    addresses[99] = Address(host="127.0.0.1", port=silent.getsockname()[1], machine="vm", pid=1, born=0, name="x")
    try:
        replies = ask_all(addresses, {"ask": "ping", "padding": "x" * 200_000}, "s", 4.0)
        assert set(replies) == set(range(20))
    finally:
        silent.close()
        for listener in listeners:
            listener.close()


def test_without_a_secret_nobody_is_answered() -> None:
    listener = Listener("127.0.0.1", lambda: "", echo)
    try:
        assert ask(address_of(listener), {"ask": "ping"}, "", 2.0) is None
    finally:
        listener.close()


@contextlib.contextmanager
def descriptors_up_to(limit: int) -> Iterator[None]:
    """Let this process have no descriptor from `limit` on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_are_asked_than_there_are_descriptors() -> None:
    listener = Listener("127.0.0.1", lambda: "s", echo)
    code = (
        "import resource, sys\n"
        "from offbeat_liveness._network.side_channel import Address, ask_all\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "one = Address(host='127.0.0.1', port=int(sys.argv[1]), machine='vm', pid=1, born=0, name='rank 0')\n"
        "print(len(ask_all(dict.fromkeys(range(100), one), {'ask': 'ping'}, 's', 20.0)))\n"
    )
    try:
        asked = subprocess.run([sys.executable, "-c", code, str(listener.port)], capture_output=True, check=True)
        assert asked.stdout == b"100\n"
    finally:
        listener.close()


def test_a_listener_outlives_a_lack_of_descriptors() -> None:
    listener = Listener("127.0.0.1", lambda: "s", echo)
    stranger = socket.socket()
    try:
        with descriptors_up_to(stranger.fileno() + 1):
            stranger.connect((listener.host, listener.port))
            time.sleep(0.3)  # for the listener to try, and fail
        assert ask(address_of(listener), {"ask": "ping"}, "s", 5.0) == {"heard": "ping"}
    finally:
        stranger.close()
        listener.close()


NO_SECRET = '{"ask": "ping", "secret": "é"}\n'.encode()
DEEP = b"[" * 200_000 + b"\n"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_garbage_does_not_end_the_listener() -> None:
    listener = Listener("127.0.0.1", lambda: "s", echo)
    try:
        for garbage in (b"", b"\n", b"{not json\n", b"[1]\n", b"\xff\xfe\n", NO_SECRET, DEEP):
            with socket.create_connection((listener.host, listener.port)) as stranger:
                stranger.sendall(garbage)
        assert ask(address_of(listener), {"ask": "ping"}, "s", 5.0) == {"heard": "ping"}
    finally:
        listener.close()


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


def entry_of(**changes: Any) -> dict[str, Any]:
    """One entry as torch 2.13 dumps it."""
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
    monkeypatch.setattr(nccl_recorder, "HANDLER", "nobody's")  # a build of torch may have the real one
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


def test_an_exception_in_one_line_without_gloos_place() -> None:
    place = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
    text = f"{place} Connection closed by peer [::1]:1. This is typically caused by a"
    told, stack = describe(RuntimeError(text))
    assert (told, stack) == ("RuntimeError: Connection closed by peer [::1]:1.", ())


class ToldError(Exception):
    """Notes who asks for its text."""

    asked = 0

    def __str__(self) -> str:
        ToldError.asked += 1
        return "told"


def test_an_exception_in_flight_is_read_without_its_code_and_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkcache", "lazycache", "updatecache", "getline"):
        monkeypatch.setattr(linecache, name, lambda *_: pytest.fail("a source file is looked for"))
    error = ToldError("batch 7 is empty", 7, b"x", [ToldError()])
    error.add_note("on shard 3")
    try:
        raise error from KeyError("no such shard")
    except ToldError:
        told = exception_in_flight(threading.get_ident())
        text, stack = describe(error)
    name = f"{__name__}.ToldError"
    assert told == f"{name}: batch 7 is empty, 7, x on shard 3 (raised at {stack[0]})"
    assert stack[0].function == test_an_exception_in_flight_is_read_without_its_code_and_without_a_file.__name__
    assert (text, ToldError.asked) == (f"{name}: told on shard 3", 1), "asked by who describes the end alone"


def test_last_words_of_a_crash_are_those_of_the_main_thread(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys, threading, time, ctypes, os\n"
        "faulthandler.enable(open(sys.argv[1], 'w'))\n"
        "threading.Thread(target=os.abort).start()\n"
        "def stand():\n    time.sleep(20)\n"
        "stand()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    subprocess.run([sys.executable, script, path_of(tmp_path, "vm", 12)], check=False)
    reason, stack = read_crash(tmp_path, "vm", 12)
    assert reason == "Aborted"
    assert stack[0].file == str(script)
    assert read_crash(tmp_path, "vm", 13) == ("", ())
    assert read_crash(tmp_path, "another/vm", 12) == ("", ()), "hosts that share a folder may have the same pids"


def test_last_words_are_for_this_user_alone_and_are_written_into_no_file_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", lambda _: None)
    monkeypatch.setattr(faulthandler, "disable", lambda: None)
    crash_file = CrashFile(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path == path_of(tmp_path, HOST, os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    crash_file.close()
    (tmp_path / "another").write_text("kept")
    path.symlink_to(tmp_path / "another")
    CrashFile(tmp_path)
    assert (tmp_path / "another").read_text() == "kept"


def a_head(rank: int, *waits: Wait, name: str = "") -> Head:
    return Head(
        key=f"vm:{rank}", name=name or f"rank {rank}", rank=rank, world="w", world_size=2, pid=rank, host="vm",
        time_s=1e9, waits=waits, still_s=90.0, threads=(ThreadHead(name="MainThread", still_s=90.0),),
    )  # fmt: skip


def test_dumps_are_read_back_and_the_name_before_the_rank_is_forgotten(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, a_head(1, name="pid 1"))
    _dumps.write_head(tmp_path, a_head(1))
    _dumps.write_head(tmp_path, a_head(0))
    assert [head.name for head in _dumps.read_heads(tmp_path)] == ["rank 0", "rank 1"]
    assert not list(tmp_path.glob("*.partial"))


def test_hosts_that_share_a_folder_and_have_the_same_pids_keep_their_dumps(tmp_path: Path) -> None:
    for host in ("0", "node-0", "rank-1-node/0"):
        _dumps.write_head(tmp_path, dataclasses.replace(a_head(1), host=host))
    assert {head.host for head in _dumps.read_heads(tmp_path)} == {"0", "node-0", "rank-1-node/0"}


def test_half_a_file_is_passed_over(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, a_head(0))
    (tmp_path / "head-rank-7-7.json").write_text('{"key": ')
    assert [head.rank for head in _dumps.read_heads(tmp_path)] == [0]


def test_the_secret_of_a_folder_is_one_and_private(tmp_path: Path) -> None:
    found = {_dumps.shared_secret(tmp_path) for _ in range(3)}
    assert len(found) == 1
    assert (tmp_path / ".secret").stat().st_mode & 0o077 == 0


def test_show_tells_from_heads_alone_what_was_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run was killed before anybody could lead."""
    _dumps.write_head(tmp_path, a_head(0, Wait(kind="declared", what="samples.get", on="rank 1", age_s=90.0)))
    _dumps.write_head(tmp_path, a_head(1))
    assert main(["show", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "starved: rank 0 waits in samples.get; rank 1 is idle" in told
    assert "rank 1 (pid 1 on vm): running, in no wait" in told


def test_show_of_a_folder_without_dumps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "must hold dumps" in capsys.readouterr().err


def test_running_a_script_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere/train.py"]) == 2
    assert "/nowhere/train.py" in capsys.readouterr().err


def test_a_look_costs_little() -> None:
    """At the default tick of 2 s, 1 ms a look is 0.05 % of a core; measured here: 0.05 ms."""
    motion = Motion(longest_gap_s=60.0)
    began_s = time.thread_time()
    for _ in range(200):
        motion.look()
    assert (time.thread_time() - began_s) / 200 < 2e-3


HELD_LOCK = """
import faulthandler, os, threading
import offbeat_liveness as liveness
from offbeat_liveness._process.motion import Motion
from offbeat_liveness._process.reading import read_head

faulthandler.dump_traceback_later(20, exit=True)
holds = threading.Event()

def hold():  # as a thread does that a signal handler or a finalizer holds up while it starts another
    with threading._active_limbo_lock:
        holds.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
holds.wait()
motion = Motion(60.0)
motion.look()
head = read_head(motion, name="", world="", rank=0, world_size=1, stall_after_s=60.0)
print([each.name for each in head.threads], flush=True)
os._exit(0)
"""


def test_a_look_takes_no_lock_of_pythons_threads() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_LOCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['MainThread']\n", done.stderr


def test_groups_of_offbeat_are_no_lines_of_the_reader() -> None:
    """What stands around a collective hides whoever called it: a verdict has room for three lines."""
    assert is_machinery("/env/lib/python3.11/site-packages/offbeat_mesh/_exchange.py")
    assert not is_machinery("/env/lib/python3.11/site-packages/offbeat_engine_torch/_engine.py")
