"""Waits of a thread outside torch.distributed (`outside_wait`), and whether it may still act (`may_act`)."""

import threading
from collections import defaultdict
from types import FrameType
from typing import Final

from offbeat_liveness._process.outside import concurrency, connections, event_loop, file_locks, peek, system_calls
from offbeat_liveness._process.outside.event_loop import pending_tasks
from offbeat_liveness._process.outside.peek import Look, Rule
from offbeat_liveness._process.snapshot import OutsideWait
from offbeat_liveness._process.stacks import current_frames

MAX_FRAMES: Final = 64
MAX_THREADS_FOLLOWED: Final = 3
DEBUGGERS: Final = (
    "/pdb.py", "/bdb.py", "/cmd.py", "/contextlib.py", "/ipdb/", "/IPython/", "/pydevd", "/_pydev", "/debugpy/",
)  # fmt: skip
IMPORT_FILES: Final = "<frozen importlib"
IMPORTS: Final = ("_find_and_load", "_lock_unlock_module")
MAX_IDLE_FRAMES: Final = 64
WAITING_FILES: Final = (
    "/threading.py", "/queue.py", "/selectors.py", "/socket.py", "/ssl.py", "/multiprocessing/connection.py",
    "/multiprocessing/queues.py", "/multiprocessing/synchronize.py", "/asyncio/base_events.py",
)  # fmt: skip
IDLE: Final = {
    "_worker": "/concurrent/futures/thread.py",
    "Queue._feed": "/multiprocessing/queues.py",
    "Pool._handle_tasks": "/multiprocessing/pool.py",
    "worker": "/multiprocessing/pool.py",
    "TMonitor.run": "/tqdm/_monitor.py",
    "_pin_memory_loop": "/torch/utils/data/_utils/pin_memory.py",
    "_pin_memory_loop.<locals>.do_one_step": "/torch/utils/data/_utils/pin_memory.py",
    "SubprocPool._read_thread": "/torch/_inductor/compile_worker/subproc_pool.py",
    "QueueListener._monitor": "/logging/handlers.py",
    "QueueListener.dequeue": "/logging/handlers.py",
    "_ResourceSharer._serve": "/multiprocessing/resource_sharer.py",
    "print_logs": "/ray/_private/worker.py",
    "Worker.print_logs": "/ray/_private/worker.py",
    "listen_error_messages": "/ray/_private/worker.py",
}
"""Functions of the standard library, torch and Ray that only wait for work when nothing of theirs is called."""
WITH_WORK: Final = {
    "Pool._handle_results": ("/multiprocessing/pool.py", "cache"),
    "Pool._handle_workers": ("/multiprocessing/pool.py", "cache"),
    "_ExecutorManagerThread.run": ("/concurrent/futures/process.py", "self.pending_work_items"),
    "_ExecutorManagerThread.wait_result_broken_or_wakeup": (
        "/concurrent/futures/process.py", "self.pending_work_items",
    ),
}  # fmt: skip
"""Functions that hand on what other processes do: idle while nothing is asked of these."""
REPORTERS: Final = (
    "/wandb/", "/tensorboard/", "/tensorboardX/", "/tqdm/", "/sentry_sdk/", "/prometheus_client/", "/opentelemetry/",
    "/ipykernel/heartbeat.py", "/zmq/utils/garbage.py", "/_pydevd_bundle/", "/debugpy/",
)  # fmt: skip
"""Packages whose threads only carry away what the program has reported."""


def outside_wait(frame: FrameType | None, native_id: int | None = None) -> OutsideWait | None:
    """Return what a thread waits for; None where it computes, or where that is unknown.

    Nothing of the program is called, and nothing is asked that could hang in its turn. The thread may keep running
    meanwhile: the result is what it was in when the frame was taken.

    Args:
        frame: the thread's innermost one; it is not held afterwards.
        native_id: the kernel's number of the thread, for waits in calls of C; None leaves these out.

    Returns:
        The wait; its `text` can follow "waits for".
    """
    return _outside_wait(frame, native_id, MAX_THREADS_FOLLOWED)


def _outside_wait(frame: FrameType | None, native_id: int | None, follows: int) -> OutsideWait | None:
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    look = Look(frames, native_id, lambda ident: _wait_of_thread(ident, follows - 1))
    try:
        return _read(look)
    except Exception:  # noqa: BLE001 - a library of another version, an object that is being torn down: no answer
        return None
    finally:
        frames.clear()


def _read(look: Look) -> OutsideWait | None:
    if not look.frames:
        return None
    for depth, rule in reversed(_matches(look.frames)):
        look.depth = depth
        found = rule.read(look.frames[depth], look)
        if found is not None:
            return found
    if is_importing(look):
        return import_wait(look)
    found = system_calls.kernel_wait(look.frames[0], look.native_id) if look.native_id else None
    return import_wait(look) if found is None else found


def _matches(frames: list[FrameType]) -> list[tuple[int, Rule]]:
    found: list[tuple[int, Rule]] = []
    last = 0
    for depth, frame in enumerate(frames):
        if depth - last > MAX_REACH:
            break
        rule = rule_of(frame)
        if rule is not None and depth - last <= rule.reach:
            found.append((depth, rule))
            last = depth
    return found


def rule_of(frame: FrameType) -> Rule | None:
    rules = _BY_FUNCTION.get(frame.f_code.co_qualname, ())
    return next((rule for rule in rules if frame.f_code.co_filename.endswith(rule.file)), None)


def _wait_of_thread(ident: int, follows: int) -> OutsideWait | None:
    if follows < 0 or ident == threading.get_ident():
        return None
    frames = current_frames()
    frame = frames.get(ident)
    frames.clear()
    active = threading._active.get(ident)  # type: ignore[attr-defined]
    return _outside_wait(frame, peek.integer(peek.attribute(active, "_native_id")), follows)


def _debugger(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return the first frame further out that is not the debugger's is the one that it has stopped."""
    for each in look.frames[look.depth :]:
        file = each.f_code.co_filename
        if not any(part in file for part in DEBUGGERS):
            place = f"{file}:{each.f_lineno}"
            return OutsideWait(kind="debugger", text=f"a person: it is stopped in a debugger at {place}", on=place)
    return OutsideWait(kind="debugger", text="a person: it is stopped in a debugger")


def import_wait(look: Look) -> OutsideWait | None:
    """Return the innermost module that is being imported, and the thread that has begun it where that is another."""
    for frame in look.frames:
        if frame.f_code.co_name in IMPORTS and frame.f_code.co_filename.startswith(IMPORT_FILES):
            name = peek.text(peek.local(frame, "name"))
            owner = peek.attribute(look.local(IMPORT_FILES, "_ModuleLock.acquire", "self"), "owner")
            other = peek.thread_names().get(owner, "") if type(owner) is int else ""
            begun = f", which the thread {other!r} has begun" if other else ""
            return OutsideWait(kind="import", text=f"the import of {name}{begun}", on=name)
    return None


def is_importing(look: Look) -> bool:
    return look.frames[0].f_code.co_filename.startswith(IMPORT_FILES)


RULES: Final = (
    Rule("/bdb.py", ("Bdb.trace_dispatch", "Bdb.dispatch_line"), _debugger, reach=48),
    Rule("/pdb.py", ("Pdb.interaction", "Pdb._cmdloop", "Pdb._interaction"), _debugger, reach=48),
    Rule("/pydevd.py", ("PyDB.do_wait_suspend", "PyDB._do_wait_suspend"), _debugger, reach=8),
)


def _by_function() -> dict[str, tuple[Rule, ...]]:
    found: defaultdict[str, tuple[Rule, ...]] = defaultdict(tuple)
    for rule in (*connections.RULES, *concurrency.RULES, *event_loop.RULES, *file_locks.RULES, *RULES):
        for function in rule.functions:
            found[function] += (rule,)
    return dict(found)


_BY_FUNCTION: Final = _by_function()
MAX_REACH: Final = max(rule.reach for rules in _BY_FUNCTION.values() for rule in rules)


def may_act(frame: FrameType | None) -> bool:
    """Return whether a thread, given its innermost frame, might still release what others of its process wait for.

    False for a thread that is idle by construction: a worker of a pool that waits for work, a feeder of a queue, a loop
    that flushes, an event loop without a task or a socket. True for all others, and where in doubt: a server's thread
    may do anything for the next client.
    """
    try:
        return _may_act(frame)
    except Exception:  # noqa: BLE001 - what cannot be read may act
        return True


def _may_act(frame: FrameType | None) -> bool:
    if frame is None or _is_reporter(frame):
        return frame is not None
    for _ in range(MAX_IDLE_FRAMES):
        if frame is None:
            return True
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        if name == "BaseEventLoop._run_once" and file.endswith("/asyncio/base_events.py"):
            return _loop_may_act(peek.local(frame, "self"))
        if name in IDLE and file.endswith(IDLE[name]):
            return False
        if name in WITH_WORK and file.endswith(WITH_WORK[name][0]):
            first, _, rest = WITH_WORK[name][1].partition(".")
            owner = peek.local(frame, first)
            return peek.size(peek.path(owner, rest) if rest else owner) != 0
        if not file.endswith(WAITING_FILES):
            return True
        frame = frame.f_back
    return True


def _loop_may_act(loop: object) -> bool:
    """Return whether a loop has a task, a callback that is ready, a timer, or a socket beside its own wake-up."""
    if peek.size(peek.path(loop, "_selector._fd_to_key")) != 1:
        return True
    waiting = (peek.size(peek.attribute(loop, name)) for name in ("_ready", "_scheduled"))
    return any(size != 0 for size in waiting) or bool(pending_tasks(loop))


def _is_reporter(frame: FrameType) -> bool:
    """Return whether a thread was begun by such a package: its outermost frame that is not threading's."""
    outermost = ""
    inner: FrameType | None = frame
    for _ in range(MAX_IDLE_FRAMES):
        if inner is None:
            return any(part in outermost for part in REPORTERS)
        if not inner.f_code.co_filename.endswith("/threading.py"):
            outermost = inner.f_code.co_filename
        inner = inner.f_back
    return False
