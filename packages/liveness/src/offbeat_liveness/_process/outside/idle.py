"""Threads that wait for work by construction, and so will release nothing by themselves."""

from types import FrameType
from typing import Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.event_loop import pending_tasks

MAX_FRAMES: Final = 64
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
"""Packages whose threads only carry away what the program has said."""


def may_act(frame: FrameType | None) -> bool:
    """Whether a thread might still release what others of its process wait for.

    Args:
        frame: the thread's innermost one; it is not held afterwards.

    Returns:
        False for a thread that is idle by construction: a worker of a pool that waits for work, a feeder of a queue,
        a loop that flushes, an event loop without a task or a socket. True for all others, and where in doubt: a
        server's thread does what whoever asks it next wants done.
    """
    try:
        return _may_act(frame)
    except Exception:  # noqa: BLE001 - what cannot be read may act
        return True


def _may_act(frame: FrameType | None) -> bool:
    if frame is None or _is_reporter(frame):
        return frame is not None
    for _ in range(MAX_FRAMES):
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
    """With a task, a callback that is ready, a timer, or something to read beside its own wake-up."""
    if peek.size(peek.path(loop, "_selector._fd_to_key")) != 1:
        return True
    waiting = (peek.size(peek.attribute(loop, name)) for name in ("_ready", "_scheduled"))
    return any(size != 0 for size in waiting) or bool(pending_tasks(loop))


def _is_reporter(frame: FrameType) -> bool:
    """Whether a thread was begun by such a package: its outermost frame that is not threading's."""
    outermost = ""
    inner: FrameType | None = frame
    for _ in range(MAX_FRAMES):
        if inner is None:
            return any(part in outermost for part in REPORTERS)
        if not inner.f_code.co_filename.endswith("/threading.py"):
            outermost = inner.f_code.co_filename
        inner = inner.f_back
    return False
