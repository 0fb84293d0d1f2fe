"""Waits of the tasks of an asyncio loop, while the thread itself only waits in the loop."""

import dataclasses
import gc
import sys
import types
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.connections import client_of, host_and_port, http_answer
from offbeat_liveness._process.outside.error_text import read_exception
from offbeat_liveness._process.outside.other_processes import state_of
from offbeat_liveness._process.outside.peek import Look, Rule
from offbeat_liveness._process.snapshot import OutsideWait
from offbeat_liveness._process.stacks import is_own

MAX_TASKS: Final = 1000
MAX_CHAIN: Final = 64
MAX_FOLLOWED: Final = 4
MAX_REPORTED: Final = 3
MAX_FRAMES: Final = 256
PORTS: Final = {"http": 80, "https": 443}
LOCKS: Final = ("Event.wait", "Lock.acquire", "Condition.wait", "Semaphore.acquire", "Barrier.wait")


@dataclass
class Chain:
    """The frames of one task from what it awaits innermost, outward, and the future at the end."""

    frames: list[FrameType]
    end: object


def running_callback(frame: FrameType | None) -> Any:
    """Return the handle of the callback that an asyncio loop runs in a stack, None where it runs none."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_qualname == "Handle._run" and frame.f_code.co_filename.endswith("/asyncio/events.py"):
            return peek.local(frame, "self")
        frame = frame.f_back
    return None


def pending_tasks(loop: object) -> list[Any]:
    """Return the tasks of a loop that are not done, or of all loops where `loop` is None; in no order."""
    return [each for each in _tasks_of(loop) if peek.text(peek.attribute(each, "_state")) == "PENDING"]


def _failed_tasks(loop: object) -> list[Any]:
    """Return tasks of a loop that an exception has ended unseen, as long as the program keeps them."""
    finished = (each for each in _tasks_of(loop) if peek.text(peek.attribute(each, "_state")) == "FINISHED")
    return [each for each in finished if peek.attribute(each, "_log_traceback") is True]


def _tasks_of(loop: object) -> list[Any]:
    """Return the tasks that the program keeps.

    `asyncio.all_tasks` would step through weak sets that other threads change; these are copied in one step.
    """
    module = sys.modules.get("asyncio.tasks")
    found: list[Any] = []
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):  # the first up to Python 3.11
        known = getattr(module, name, None)
        data = peek.attribute(known, "data")
        if type(data) is set:
            found += [task for task in (reference() for reference in data.copy()) if task is not None]
        elif type(known) is set:
            found += known.copy()
    unique = {id(each): each for each in found}.values()
    return [each for each in unique if loop is None or peek.attribute(each, "_loop") is loop]


def _loop_runs(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return the wait in `BaseEventLoop._run_once`: the task that the program runs lies in an outer frame."""
    loop = peek.local(frame, "self")
    main = next(
        (
            peek.local(each, "future")
            for each in look.outward(4)
            if each.f_code.co_name == "run_until_complete" and "/asyncio/" in each.f_code.co_filename
        ),
        None,
    )
    return tasks_wait(loop, main)


def _runner(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return the wait in `asyncio.Runner.run` itself: a loop written in C, such as uvloop's, has no frames."""
    return tasks_wait(peek.attribute(peek.local(frame, "self"), "_loop"), peek.local(frame, "task"))


def tasks_wait(loop: object, main: object) -> OutsideWait | None:
    """Return what the tasks of a loop wait for, the one given to `run_until_complete` (`main`) first."""
    tasks = pending_tasks(loop)
    number = len(tasks)
    tasks = sorted(tasks[:MAX_TASKS], key=_name)
    if main is not None and _is_pending_task(main):
        tasks = [main, *(each for each in tasks if each is not main)]
    if not tasks:
        return None
    seen: set[int] = set()
    waits = [(task, task_wait(task, seen)) for task in tasks if len(seen) < MAX_REPORTED and id(task) not in seen]
    first = next((wait for _, wait in waits if wait.address or wait.pid), waits[0][1])
    lines = "; ".join(f"task {_name(task)!r} awaits {wait.text}" for task, wait in waits)
    left = number - len(seen)
    more = f"; and {left} more {'task' if left == 1 else 'tasks'}" if left > 0 else ""
    timeout_s = waits[0][1].timeout_s
    return _wait(
        lines + more + _failures(loop), on=_name(waits[0][0]), pid=first.pid, address=first.address, timeout=timeout_s
    )


def _failures(loop: object) -> str:
    """Describe the errors of failed tasks, as the rest of a sentence: the others may wait for these tasks."""
    failed = sorted(_failed_tasks(loop)[:MAX_TASKS], key=_name)
    texts = []
    for task in failed[:MAX_REPORTED]:
        text, stack = read_exception(peek.attribute(task, "_exception"))
        texts.append(f"; task {_name(task)!r} has failed with {text}{f' at {stack[0]}' if stack else ''}, unnoticed")
    more = f"; and {len(failed) - MAX_REPORTED} more have failed" if len(failed) > MAX_REPORTED else ""
    return "".join(texts) + more


def task_wait(task: object, seen: set[int]) -> OutsideWait:
    """Return what one task awaits; tasks that it awaits are followed. Adds the ids of all reported ones to `seen`."""
    seen.add(id(task))
    chain = _chain(peek.attribute(task, "_coro"))
    try:
        place = _place(chain)
        found = _library_wait(chain)
        if found is not None:
            return dataclasses.replace(found, text=found.text + place)
        awaited = [each for each in _awaited_tasks(chain, task) if id(each) not in seen]
        if not awaited or len(seen) > MAX_FOLLOWED:
            return _wait("a future" + place)
        inner = task_wait(awaited[0], seen)
        more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
        name = _name(awaited[0])
        text = f"the task {name!r}{more}{place}, which awaits {inner.text}"
        return dataclasses.replace(inner, kind="asyncio", text=text, on=name)
    finally:
        chain.frames.clear()


def _wait(text: str, *, on: str = "", pid: int = 0, address: str = "", timeout: object = None) -> OutsideWait:
    return OutsideWait(kind="asyncio", text=text, on=on, pid=pid, address=address, timeout_s=peek.number(timeout))


def task_that_fills(future: object) -> Any:
    """Return the task whose result goes to another thread's future (`run_coroutine_threadsafe`), None if there is none.

    asyncio keeps that future in what it calls when the task is done.
    """
    for task in pending_tasks(None):
        for callback in peek.members(peek.attribute(task, "_callbacks")):
            function = callback[0] if type(callback) is tuple and callback else None
            cells = function.__closure__ if type(function) is types.FunctionType else None
            if any(_content(cell) is future for cell in cells or ()):
                return task
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _name(task: object) -> str:
    kind = getattr(sys.modules.get("asyncio.tasks"), "Task", None)
    if kind is not None and issubclass(type(task), kind):
        return peek.text(kind.get_name(task))
    return peek.text(peek.attribute(task, "_name"))


def _place(chain: Chain) -> str:
    """Return the program's innermost line, else that of a library but asyncio."""
    lines = [each for each in chain.frames if "/asyncio/" not in each.f_code.co_filename]
    frame = next((each for each in lines if is_own(each.f_code.co_filename)), next(iter(lines), None))
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _chain(awaited: Any) -> Chain:
    frames: list[FrameType] = []
    for _ in range(MAX_CHAIN):
        kind = type(awaited)
        if kind is types.CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif kind is types.GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif kind is types.AsyncGeneratorType:
            frame, awaited = awaited.ag_frame, awaited.ag_await
        elif (inner := _wrapped(awaited)) is not None:
            awaited = inner
            continue
        else:
            break
        if frame is not None:
            frames.append(frame)
    return Chain(frames[::-1], awaited)


def _wrapped(awaited: object) -> Any:
    """Return what lies in an object of C that forwards: the steps of an async generator, `__await__` of a coroutine."""
    if type(awaited).__module__ != "builtins" and peek.type_name(awaited) != "FutureIter":
        return None
    if peek.type_name(awaited) not in ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper",
                                       "FutureIter"):  # fmt: skip
        return None
    kinds = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
    found = gc.get_referents(awaited)
    future = next((each for each in found if peek.attribute(each, "_state") is not None), None)
    return next((each for each in found if type(each) in kinds), future)


def _awaited_tasks(chain: Chain, task: object) -> list[Any]:
    """Tasks that are not done at the end of a chain: the one awaited, those of a gather, a group, or a wait."""
    end = chain.end if chain.end is not None else peek.attribute(task, "_fut_waiter")
    found = [end, *peek.members(peek.attribute(end, "_children"))]
    for frame in chain.frames:
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        if name.startswith("TaskGroup.") and file.endswith(("/asyncio/taskgroups.py", "/anyio/_backends/_asyncio.py")):
            found += peek.members(peek.attribute(peek.local(frame, "self"), "_tasks"))
        elif name in ("wait", "_wait", "wait_for") and file.endswith("/asyncio/tasks.py"):
            found += [peek.local(frame, "fut"), *peek.members(peek.local(frame, "fs"))]
    unique = {id(each): each for each in found if _is_pending_task(each)}
    return list(unique.values())


def _is_pending_task(value: object) -> bool:
    if peek.attribute(value, "_coro") is None:
        return False
    return peek.text(peek.attribute(value, "_state")) == "PENDING"


def _library_wait(chain: Chain) -> OutsideWait | None:
    """Return what a call of a library awaits, by its innermost frame; that of an HTTP client by its outermost."""
    names = [frame.f_code.co_filename for frame in chain.frames]
    for frame in reversed(chain.frames):
        if any(part in frame.f_code.co_filename for part in ("/httpx", "/httpcore", "/aiohttp/")):
            found = _http(frame, chain, client_of(names))
            if found is not None:
                return found
    for frame in chain.frames:
        code = frame.f_code
        if "/asyncio/" in code.co_filename:
            found = _asyncio_call(frame, code.co_filename.rpartition("/")[2], code.co_qualname)
            if found is not None:
                return found
    return None


def _http(frame: FrameType, chain: Chain, client: str) -> OutsideWait | None:
    name = frame.f_code.co_qualname
    if name in ("AsyncClient.send", "AsyncClient._send_single_request", "AsyncConnectionPool.handle_async_request"):
        url = peek.attribute(peek.local(frame, "request"), "url")
        parts = peek.attribute(url, "_uri_reference")  # of httpx; httpcore's address has them itself
        where = url if parts is None else parts
        scheme = _part(where, "scheme")
        host = host_and_port(_part(where, "host"), _part(where, "port") or PORTS.get(scheme))
    elif name == "AsyncHTTPConnection.handle_async_request":
        origin = peek.attribute(peek.local(frame, "self"), "_origin")
        host = host_and_port(peek.attribute(origin, "host"), peek.attribute(origin, "port"))
    elif name in ("ClientSession._request", "ClientResponse.start", "ClientResponse.read", "ClientResponse.text"):
        return _aiohttp(frame, chain, client)
    else:
        return None
    timeout = next(
        (peek.local(each, "timeout") for each in chain.frames if "/httpcore" in each.f_code.co_filename), None
    )
    return http_answer(host, timeout, client)


def _part(where: Any, name: str) -> Any:
    """Return a part of httpx's parsed address, a named tuple, or of httpcore's, an object."""
    if issubclass(type(where), tuple):
        fields = ("scheme", "userinfo", "host", "port")
        return tuple.__getitem__(where, fields.index(name))
    found = peek.attribute(where, name)
    return peek.text(found) if type(found) is bytes else found


def _aiohttp(frame: FrameType, chain: Chain, client: str) -> OutsideWait | None:
    """`_request` holds the address as a yarl.URL, which keeps the parts of urllib's SplitResult."""
    owner = peek.local(frame, "self")
    found = (peek.local(frame, "url"), peek.attribute(owner, "_real_url"), peek.attribute(owner, "url"))
    url = next((each for each in found if each is not None), None)
    place = peek.text(peek.attribute(url, "_netloc"))
    place = place.rpartition("@")[2]
    host, _, port = place.rpartition(":")
    if host and port.isdigit():
        place = host_and_port(host.strip("[]"), int(port))
    else:
        place = host_and_port(place, PORTS.get(peek.text(peek.attribute(url, "_scheme"))))
    timeout = peek.attribute(peek.local(frame, "real_timeout"), "total")
    connects = any(each.f_code.co_name in ("_create_connection", "create_connection") for each in chain.frames)
    return http_answer(place, timeout, client, doing="a connection to" if connects else "an HTTP answer from")


def _asyncio_call(frame: FrameType, file: str, name: str) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    if file == "queues.py" and name in ("Queue.get", "Queue.put", "Queue.join"):
        held = peek.size(peek.attribute(owner, "_queue"))
        limit = peek.integer(peek.attribute(owner, "_maxsize")) or 0
        filling = "" if held is None else f" (the queue holds {held}{f' of {limit}' if limit else ''})"
        return _wait(f"asyncio.{name}{filling}")
    if file == "locks.py" and name in LOCKS:
        return _wait(f"asyncio.{name}")
    if file == "tasks.py" and name == "sleep":
        delay = peek.number(peek.local(frame, "delay"))
        return OutsideWait(kind="sleep", text=f"asyncio.sleep({delay:g})" if delay is not None else "asyncio.sleep")
    if file == "streams.py" and name.startswith("StreamReader."):
        return _stream(owner)
    if file in ("subprocess.py", "base_subprocess.py") and name in ("Process.wait", "Process.communicate",
                                                                     "BaseSubprocessTransport._wait"):  # fmt: skip
        pid = peek.integer(peek.path(owner, "_transport._pid") or peek.attribute(owner, "_pid")) or 0
        return _wait(f"the process {pid}, which {state_of(pid)}", pid=pid) if pid else _wait("a process")
    if file == "base_events.py" and name == "BaseEventLoop.create_connection":
        host = host_and_port(peek.local(frame, "host"), peek.local(frame, "port"))
        return _wait(f"a connection to {host}", address=host)
    if file == "threads.py" and name == "to_thread":
        return _wait(f"a thread that runs {_function_name(peek.local(frame, 'func'))}")
    return None


def _stream(reader: object) -> OutsideWait:
    extra = peek.path(reader, "_transport._extra")
    peer = extra.get("peername") if type(extra) is dict else None
    address = host_and_port(peer[0], peer[1]) if type(peer) is tuple and len(peer) > 1 else ""
    return _wait(f"data from {address or 'a stream'} (asyncio.StreamReader)", address=address)


def _function_name(function: object) -> str:
    if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
        return peek.text(function.__qualname__)
    return f"a {peek.type_name(function)}"


RULES: Final = (
    Rule("/asyncio/base_events.py", ("BaseEventLoop._run_once",), _loop_runs, reach=2),
    Rule("/asyncio/runners.py", ("Runner.run",), _runner, reach=0),
)
