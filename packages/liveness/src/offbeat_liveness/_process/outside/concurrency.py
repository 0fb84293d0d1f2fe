"""Waits for other threads of this process: queues, futures, locks, events, the end of a thread."""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.current_frames import current_frames
from offbeat_liveness._process.head import OutsideKind, OutsideWait
from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.event_loop import task_that_fills, tasks_wait
from offbeat_liveness._process.outside.kernel import holder_of
from offbeat_liveness._process.outside.processes import workers
from offbeat_liveness._process.outside.rule import Look, Rule, seconds

EXECUTOR_MANAGER: Final = "_ExecutorManagerThread"
MAX_WORK_ITEMS: Final = 10_000


def _wait(kind: OutsideKind, text: str, timeout: object, *, on: str = "") -> OutsideWait:
    return OutsideWait(kind=kind, text=f"{text}{seconds(timeout)}", on=on, timeout_s=peek.number(timeout))


def _queue(frame: FrameType, look: Look) -> OutsideWait | None:
    queue, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    held, limit = peek.size(peek.attribute(queue, "queue")), peek.integer(peek.attribute(queue, "maxsize")) or 0
    name = frame.f_code.co_name
    if name == "join":
        left = peek.integer(peek.attribute(queue, "unfinished_tasks"))
        return _wait("queue", f"queue.join: {left} of its tasks are not done", None)
    return _wait("queue", f"queue.{name}: {_filling(held, limit)}", timeout)


def _filling(held: int | None, limit: int) -> str:
    if held == 0:
        return "the queue is empty"
    if held is None:
        return "the queue tells no size"
    return f"the queue is full ({held} of {limit})" if 0 < limit <= held else f"the queue holds {held}"


def _process_queue(frame: FrameType, look: Look) -> OutsideWait | None:
    """multiprocessing's: its bound counts what was put and not yet taken."""
    queue, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    name, limit = frame.f_code.co_name, peek.integer(peek.attribute(queue, "_maxsize"))
    lock = peek.path(queue, "_sem._semlock")
    kind = getattr(sys.modules.get("_multiprocessing"), "SemLock", None)
    if limit is None or kind is None or type(lock) is not kind:
        return _wait("queue", f"multiprocessing.SimpleQueue.{name}, which another process serves", timeout)
    held = limit - kind._get_value(lock)
    filling = _filling(max(0, held), limit)
    return _wait("queue", f"multiprocessing.Queue.{name}: {filling}; other processes serve it", timeout)


def _nobody(text: str) -> Callable[[FrameType, Look], OutsideWait]:
    """Reads a wait of which no more is known than that nobody has ended it."""
    return lambda frame, look: _wait("lock", text, peek.local(frame, "timeout"))


def _barrier(frame: FrameType, look: Look) -> OutsideWait | None:
    barrier = peek.local(frame, "self")
    came, all_of = peek.attribute(barrier, "_count"), peek.attribute(barrier, "_parties")
    timeout = peek.local(frame, "timeout")
    return _wait("lock", f"threading.Barrier.wait: {came} of {all_of} threads have come", timeout)


def _lock_of_condition(frame: FrameType, look: Look) -> OutsideWait | None:
    """`with condition:` stands in the lock below it."""
    owner = holder_of(peek.attribute(peek.local(frame, "self"), "_lock"))
    return _wait("lock", f"the lock of a condition or semaphore{owner}", None)


def _join(frame: FrameType, look: Look) -> OutsideWait | None:
    thread, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    name, ident = peek.text(peek.attribute(thread, "_name")), peek.integer(peek.attribute(thread, "_ident"))
    alive = ident is not None and dict.get(threading._active, ident) is thread  # type: ignore[attr-defined]
    text = f"the thread {name!r}, which {'is alive' if alive else 'has ended'}"
    return _followed(look, text, name, ident if alive else None, timeout)


def _followed(look: Look, text: str, name: str, ident: int | None, timeout: object) -> OutsideWait:
    """A wait for a thread, and what that one waits for."""
    inner = look.follow(ident) if ident is not None else None
    if inner is None:
        return _wait("thread", text, timeout, on=name)
    return OutsideWait(
        kind="thread",
        text=f"{text} and waits for {inner.text}{seconds(timeout)}",
        address=inner.address,
        pid=inner.pid,
        on=name,
        timeout_s=peek.number(timeout),
    )


def _future(frame: FrameType, look: Look) -> OutsideWait | None:
    return future_wait(peek.local(frame, "self"), look, peek.local(frame, "timeout"), "concurrent.futures.Future")


def future_wait(future: object, look: Look, timeout: object, what: str) -> OutsideWait:
    """A wait for one future: the thread that works on it, or the processes of its executor."""
    manager = next((each for each in _managers() if _has_work(each, future)), None)
    if manager is not None:
        rest = f", one of which is to give a {what}"
        found = workers(_processes(manager), "workers of a ProcessPoolExecutor", timeout=timeout, rest=rest)
        if found is not None:
            return found
    ident = _worker_of(future)
    if ident is not None:
        name = peek.thread_names().get(ident, "")
        return _followed(look, f"a {what}, which the thread {name!r} works on", name, ident, timeout)
    task = task_that_fills(future)
    if task is not None:
        inner = tasks_wait(peek.attribute(task, "_loop"), task)
        if inner is not None:
            return dataclasses.replace(inner, text=f"{inner.text}{seconds(timeout)}", timeout_s=peek.number(timeout))
    state = peek.text(peek.attribute(future, "_state")).lower()
    return _wait("future", f"a {what} ({state or 'state unknown'})", timeout)


def _managers() -> Iterator[object]:
    """The threads that manage executors of processes; a future does not know its executor, these know their futures."""
    active: dict[int, Any] = threading._active.copy()  # type: ignore[attr-defined]
    return (each for each in active.values() if peek.type_name(each) == EXECUTOR_MANAGER)


def _has_work(manager: object, future: object) -> bool:
    work = peek.attribute(manager, "pending_work_items")
    if type(work) is not dict or len(work) > MAX_WORK_ITEMS:
        return False
    return any(peek.attribute(each, "future") is future for each in list(work.values()))


def _processes(manager: object) -> list[Any]:
    return peek.members(peek.attribute(manager, "processes"))


def _worker_of(future: object) -> int | None:
    """Ident of the thread of a ThreadPoolExecutor that works on a future."""
    frames = current_frames()
    try:
        return next((ident for ident, frame in frames.items() if _works_on(frame, future)), None)
    finally:
        frames.clear()


def _works_on(frame: FrameType | None, future: object) -> bool:
    for _ in range(128):
        if frame is None:
            break
        if frame.f_code.co_qualname == "_WorkItem.run" and frame.f_code.co_filename.endswith("/futures/thread.py"):
            return peek.attribute(peek.local(frame, "self"), "future") is future
        frame = frame.f_back
    return False


def _futures(frame: FrameType, look: Look) -> OutsideWait | None:
    """`wait` and `as_completed`: the first of what is pending stands for all."""
    timeout = peek.local(frame, "timeout")
    name = frame.f_code.co_name
    pending = peek.local(frame, "pending") if name == "as_completed" else peek.local(frame, "fs")
    left = [each for each in peek.members(pending) if peek.text(peek.attribute(each, "_state")) != "FINISHED"]
    if not left:
        return _wait("future", f"concurrent.futures.{name}", timeout)
    inner = future_wait(left[0], look, None, "concurrent.futures.Future")
    return OutsideWait(
        kind=inner.kind,
        text=f"{len(left)} futures (concurrent.futures.{name}{seconds(timeout)}), the first is {inner.text}",
        address=inner.address,
        pid=inner.pid,
        on=inner.on,
        timeout_s=peek.number(timeout),
    )


RULES: Final = (
    Rule(file="/queue.py", functions=("Queue.get", "Queue.put", "Queue.join", "_PySimpleQueue.get"), read=_queue),
    Rule(
        file="/multiprocessing/queues.py",
        functions=("Queue.get", "Queue.put", "SimpleQueue.get", "SimpleQueue.put"),
        read=_process_queue,
        reach=8,
    ),
    Rule(
        file="/threading.py",
        functions=("Condition.wait", "Condition.wait_for"),
        read=_nobody("threading.Condition.wait: nobody has notified it"),
        reach=1,
    ),
    Rule(file="/threading.py", functions=("Event.wait",), read=_nobody("threading.Event.wait: nobody has set it")),
    Rule(file="/threading.py", functions=("Barrier.wait",), read=_barrier, reach=5),
    Rule(
        file="/threading.py",
        functions=("Semaphore.acquire",),
        read=_nobody("threading.Semaphore.acquire: nobody has released it"),
    ),
    Rule(file="/threading.py", functions=("Condition.__enter__",), read=_lock_of_condition, reach=0),
    Rule(file="/threading.py", functions=("Thread.join",), read=_join),
    Rule(file="/concurrent/futures/_base.py", functions=("Future.result", "Future.exception"), read=_future, reach=2),
    Rule(file="/concurrent/futures/_base.py", functions=("wait", "as_completed"), read=_futures, reach=3),
)
