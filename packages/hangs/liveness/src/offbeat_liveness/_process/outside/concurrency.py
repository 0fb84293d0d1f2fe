"""Waits for threads and processes: queues, futures, locks, pools, subprocesses, DataLoader workers, tasks of Ray."""

import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.children import ended_children, pid_of
from offbeat_liveness._process.outside.event_loop import task_that_fills, tasks_wait
from offbeat_liveness._process.outside.locks import holder_of
from offbeat_liveness._process.outside.other_processes import command_of, cut_short, state_of, without_secrets
from offbeat_liveness._process.outside.peek import Look, Rule, seconds, timed_wait
from offbeat_liveness._process.proc import birth, birth_of_thread, pid_state
from offbeat_liveness._process.snapshot import OutsideWait
from offbeat_liveness._process.stacks import current_frames, main_thread_ident, python_threads

EXECUTOR_MANAGER: Final = "_ExecutorManagerThread"
MAX_WORK_ITEMS: Final = 10_000
MAX_PIDS: Final = 16
MAX_RAY_IDS: Final = 3


def _queue(frame: FrameType, look: Look) -> OutsideWait | None:
    queue, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    held, limit = peek.size(peek.attribute(queue, "queue")), peek.integer(peek.attribute(queue, "maxsize")) or 0
    name = frame.f_code.co_name
    if name == "join":
        left = peek.integer(peek.attribute(queue, "unfinished_tasks"))
        return timed_wait("queue", f"queue.join: {left} of its tasks are not done")
    return timed_wait("queue", f"queue.{name}: {_filling(held, limit)}", timeout)


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
    ended = ended_children()
    if limit is None or kind is None or type(lock) is not kind:
        served = ended or ", which another process serves"
        return timed_wait("queue", f"multiprocessing.SimpleQueue.{name}{served}", timeout)
    held = limit - kind._get_value(lock)
    filling = _filling(max(0, held), limit)
    served = ended or "; other processes serve it"
    return timed_wait("queue", f"multiprocessing.Queue.{name}: {filling}{served}", timeout)


def _lock_wait(text: str) -> Callable[[FrameType, Look], OutsideWait]:
    return lambda frame, look: timed_wait("lock", text, peek.local(frame, "timeout"))


def _lock_of_condition(frame: FrameType, look: Look) -> OutsideWait | None:
    """`with condition:` stands in the lock below it."""
    owner = holder_of(peek.attribute(peek.local(frame, "self"), "_lock"))
    return timed_wait("lock", f"the lock of a condition or semaphore{owner}")


def _of_processes(what: str) -> Callable[[FrameType, Look], OutsideWait]:
    return lambda frame, look: timed_wait(
        "lock", f"multiprocessing.{what}{ended_children()}", peek.local(frame, "timeout")
    )


def _barrier(frame: FrameType, look: Look) -> OutsideWait | None:
    barrier = peek.local(frame, "self")
    came, all_of = peek.attribute(barrier, "_count"), peek.attribute(barrier, "_parties")
    text = f"threading.Barrier.wait: {came} of {all_of} threads have come"
    return timed_wait("lock", text, peek.local(frame, "timeout"))


def _join_thread(frame: FrameType, look: Look) -> OutsideWait | None:
    thread, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    name, ident = peek.text(peek.attribute(thread, "_name")), peek.integer(peek.attribute(thread, "_ident"))
    alive = ident is not None and dict.get(threading._active, ident) is thread  # type: ignore[attr-defined]
    text = f"the thread {name!r}, which {'is alive' if alive else 'has ended'}"
    return _followed(look, text, name, ident if alive else None, timeout)


def _last_threads(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return a wait at the end of the program, which threads that are no daemons keep alive."""
    alive = [each for each in python_threads() if peek.attribute(each, "_daemonic") is False]
    others = [each for each in alive if peek.integer(peek.attribute(each, "_ident")) != main_thread_ident()]
    if not others:
        return None
    name, ident = peek.text(peek.attribute(others[0], "_name")), peek.integer(peek.attribute(others[0], "_ident"))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    text = f"the thread {name!r}{more}, as its main thread has ended; that thread is alive"
    return _followed(look, text, name, ident, None)


def _followed(look: Look, text: str, name: str, ident: int | None, timeout: object) -> OutsideWait:
    inner = look.follow(ident) if ident is not None else None
    if inner is None:
        return timed_wait("thread", text, timeout, on=name)
    text = f"{text} and waits for {inner.text}{seconds(timeout)}"
    return dataclasses.replace(inner, kind="thread", text=text, on=name, timeout_s=peek.number(timeout))


def _future(frame: FrameType, look: Look) -> OutsideWait | None:
    return future_wait(peek.local(frame, "self"), look, peek.local(frame, "timeout"), "concurrent.futures.Future")


def future_wait(future: object, look: Look, timeout: object, what: str) -> OutsideWait:
    """Return a wait for one future: the thread that works on it, or the processes of its executor."""
    manager = next((each for each in _managers() if _has_work(each, future)), None)
    if manager is not None:
        owners, rest = peek.members(peek.attribute(manager, "processes")), f", one of which is to give a {what}"
        found = workers(owners, "workers of a ProcessPoolExecutor", timeout=timeout, rest=rest)
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
    return timed_wait("future", f"a {what} ({state or 'state unknown'})", timeout)


def _managers() -> Iterator[object]:
    """The threads that manage executors of processes; a future does not know its executor, these know their futures."""
    active: dict[int, Any] = threading._active.copy()  # type: ignore[attr-defined]
    return (each for each in active.values() if peek.type_name(each) == EXECUTOR_MANAGER)


def _has_work(manager: object, future: object) -> bool:
    work = peek.attribute(manager, "pending_work_items")
    if type(work) is not dict or len(work) > MAX_WORK_ITEMS:
        return False
    return any(peek.attribute(each, "future") is future for each in list(work.values()))


def _worker_of(future: object) -> int | None:
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
        return timed_wait("future", f"concurrent.futures.{name}", timeout)
    inner = future_wait(left[0], look, None, "concurrent.futures.Future")
    text = f"{len(left)} futures (concurrent.futures.{name}{seconds(timeout)}), the first is {inner.text}"
    return dataclasses.replace(inner, text=text, timeout_s=peek.number(timeout))


def workers(owners: Sequence[object], what: str, *, timeout: object = None, rest: str = "") -> OutsideWait | None:
    """Return a wait for several processes of multiprocessing, `what` in the plural: "DataLoader workers"."""
    pids = [pid for pid in map(pid_of, owners) if pid]
    if not pids:
        return None
    gone = [pid for pid in pids if pid_state(pid) == "gone"]
    listed = ", ".join(map(str, pids[:MAX_PIDS])) + (", …" if len(pids) > MAX_PIDS else "")
    lost = f" ({', '.join(map(str, gone))} {'is' if len(gone) == 1 else 'are'} gone)" if gone else ""
    noun = f"{what.removesuffix('s')}, pid" if len(pids) == 1 else f"{what}, pids"
    text = f"{len(pids)} {noun} {listed}{lost}{rest}"
    return timed_wait("process", text, timeout, pid=gone[0] if gone else pids[0])


def _popen(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    pid = peek.integer(peek.attribute(owner, "pid")) or 0
    timeout = peek.local(frame, "timeout")
    if not pid:
        return None
    command = _words(peek.attribute(owner, "args")) or command_of(pid)
    text = f"{command} (pid {pid}, {state_of(pid)}{seconds(timeout)})"
    return OutsideWait(kind="subprocess", text=text, pid=pid, on=command, timeout_s=peek.number(timeout))


def _words(arguments: object) -> str:
    words = [peek.text(arguments)] if type(arguments) not in (list, tuple) else map(peek.text, peek.members(arguments))
    return cut_short(without_secrets(" ".join(itertools.takewhile(bool, words))))


def _join_process(frame: FrameType, look: Look) -> OutsideWait | None:
    process, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    pid, name = pid_of(process), peek.text(peek.attribute(process, "_name"))
    if not pid:
        return None
    text = f"the end of the process {name!r} (pid {pid}, {state_of(pid)}{seconds(timeout)})"
    return OutsideWait(kind="process", text=text, pid=pid, on=name, timeout_s=peek.number(timeout))


def _data_loader(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    timeout = peek.number(peek.attribute(owner, "_timeout"))
    return workers(peek.members(peek.attribute(owner, "_workers")), "DataLoader workers", timeout=timeout or None)


def _process_pool(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return a wait for a result of a pool, whose `_pool` holds its workers; or for its end, if `self` is the pool."""
    owner, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    held = peek.attribute(owner, "_pool")
    pool = owner if type(held) is list else held
    members = peek.members(peek.attribute(pool, "_pool"))
    rest = _replaced(pool, members)
    found = workers(members, "workers of a multiprocessing.Pool", timeout=timeout, rest=rest)
    return found or _pool_of_threads(members, timeout)


def _replaced(pool: object, members: Sequence[object]) -> str:
    """Name the workers that a Pool has started in the place of others, as the rest of a sentence.

    A Pool starts its first workers, and then the thread that replaces those that end. The task of one that has died is
    given to no other, and its result never comes. Workers that end as they should, after so many tasks, lose none.
    """
    keeper = peek.integer(peek.path(pool, "_worker_handler._native_id"))
    since = birth_of_thread(keeper) if keeper else 0
    if not since or peek.attribute(pool, "_maxtasksperchild") is not None:
        return ""
    later = [pid for pid in map(pid_of, members) if pid and birth(pid) > since]
    if not later:
        return ""
    listed = ", ".join(map(str, later[:MAX_PIDS]))
    if len(later) == 1:
        return f"; pid {listed} is in place of one that died, whose task is lost"
    return f"; pids {listed} are in place of others that died, whose tasks are lost"


def _pool_of_threads(owners: Sequence[object], timeout: object) -> OutsideWait | None:
    names = [peek.text(peek.attribute(each, "_name")) for each in owners]
    if not any(names):
        return None
    return timed_wait("thread", f"{len(names)} threads of a pool ({', '.join(names[:4])})", timeout, on=names[0])


def _spawned(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    return workers(peek.members(peek.attribute(owner, "processes")), "processes of torch.multiprocessing.spawn")


def _manager(frame: FrameType, look: Look) -> OutsideWait | None:
    owner, method = peek.local(frame, "self"), peek.text(peek.local(frame, "methodname"))
    pid = pid_of(peek.path(owner, "_manager._process"))
    state = f" (pid {pid}, {state_of(pid)})" if pid else ""
    address: Any = peek.path(owner, "_token.address")
    place = peek.text(address) if type(address) is not tuple else f"{peek.text(address[0])}:{address[1]}"
    return timed_wait("process", f"{peek.type_name(owner)}.{method} of a manager{state}", pid=pid, address=place)


def _ray_get(frame: FrameType, look: Look) -> OutsideWait | None:
    asked = peek.local(frame, "object_refs") or peek.local(frame, "ray_waitables")
    references = peek.members(asked) if type(asked) in (list, tuple, set) else [] if asked is None else [asked]
    name = "ray.wait" if frame.f_code.co_name == "wait" else "ray.get"
    timeout = peek.local(frame, "timeout")
    if not references:
        return timed_wait("ray", name, timeout)
    names = [_object_id(each) for each in references[:MAX_RAY_IDS]]
    more = f" and {len(references) - len(names)} more" if len(references) > len(names) else ""
    noun = "object" if len(references) == 1 else "objects"
    needed = peek.integer(peek.local(frame, "num_returns")) if name == "ray.wait" else None
    count = f"{needed} of {len(references)}" if needed is not None else str(len(references))
    return timed_wait("ray", f"{name} of {count} {noun}: {', '.join(names)}{more}", timeout, on=names[0])


def _object_id(reference: Any) -> str:
    """Return the id of an object by the C code of Ray's own class, which asks no server."""
    kind = getattr(sys.modules.get("ray._raylet"), "ObjectRef", None)
    return "?" if kind is None or not issubclass(type(reference), kind) else peek.text(kind.hex(reference))


RULES: Final = (
    Rule("/queue.py", ("Queue.get", "Queue.put", "Queue.join", "_PySimpleQueue.get"), _queue),
    Rule(
        "/multiprocessing/queues.py",
        ("Queue.get", "Queue.put", "SimpleQueue.get", "SimpleQueue.put"),
        _process_queue,
        reach=8,
    ),
    Rule(
        "/threading.py",
        ("Condition.wait", "Condition.wait_for"),
        _lock_wait("threading.Condition.wait: nobody has notified it"),
        reach=1,
    ),
    Rule("/threading.py", ("Event.wait",), _lock_wait("threading.Event.wait: nobody has set it")),
    Rule("/threading.py", ("Barrier.wait",), _barrier, reach=5),
    Rule("/threading.py", ("Semaphore.acquire",), _lock_wait("threading.Semaphore.acquire: nobody has released it")),
    Rule("/threading.py", ("Condition.__enter__",), _lock_of_condition, reach=0),
    Rule("/threading.py", ("Thread.join",), _join_thread),
    Rule("/threading.py", ("_shutdown",), _last_threads),
    Rule(
        "/multiprocessing/synchronize.py",
        ("Condition.wait", "Condition.wait_for"),
        _of_processes("Condition.wait: nobody has notified it"),
        reach=1,
    ),
    Rule("/multiprocessing/synchronize.py", ("Event.wait",), _of_processes("Event.wait: nobody has set it"), reach=2),
    Rule(
        "/multiprocessing/synchronize.py",
        ("SemLock.__enter__", "Condition.__enter__"),
        _of_processes("Lock: nobody has released it"),
        reach=1,
    ),
    Rule("/concurrent/futures/_base.py", ("Future.result", "Future.exception"), _future, reach=2),
    Rule("/concurrent/futures/_base.py", ("wait", "as_completed"), _futures, reach=3),
    Rule(
        "/subprocess.py",
        ("Popen.wait", "Popen.communicate", "Popen._wait", "Popen._try_wait", "Popen._communicate"),
        _popen,
        reach=4,
    ),
    Rule("/multiprocessing/process.py", ("BaseProcess.join",), _join_process, reach=6),
    Rule(
        "/torch/utils/data/dataloader.py",
        ("_MultiProcessingDataLoaderIter._try_get_data", "_MultiProcessingDataLoaderIter._get_data"),
        _data_loader,
        reach=9,
    ),
    Rule(
        "/multiprocessing/pool.py",
        ("ApplyResult.wait", "ApplyResult.get", "IMapIterator.next", "Pool.join"),
        _process_pool,
        reach=4,
    ),
    Rule("/torch/multiprocessing/spawn.py", ("ProcessContext.join",), _spawned, reach=6),
    Rule("/multiprocessing/managers.py", ("BaseProxy._callmethod",), _manager, reach=8),
    Rule("/ray/_private/worker.py", ("get", "wait", "Worker.get_objects"), _ray_get, reach=6),
)
