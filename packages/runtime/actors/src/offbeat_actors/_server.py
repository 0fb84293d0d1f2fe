"""The process of one role: `python -m offbeat_actors._server FD REAPER_FD NAME`, started by a launcher.

The event loop reads calls and answers them. Methods that are not async, and the constructor, run in one worker
thread, one at a time; so the loop, and with it every async method, answers while a long method computes. A role that
needs the main thread for such methods has it, and the loop another.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, get_type_hints

import msgspec

from offbeat_actors._failures import describe_failure
from offbeat_actors._processes.reaper import PR_SET_PDEATHSIG, Reaper
from offbeat_actors._wire import (
    MAIN_THREAD,
    START_ID,
    STOP_ID,
    Bytes,
    Call,
    Cancel,
    Channel,
    Frame,
    FrameWriter,
    Result,
    SocketStream,
    Start,
    Stop,
    write_frame,
)
from offbeat_core import defer_device_backends
from offbeat_liveness import watch_if_invited

EXIT_PARENT_GONE: Final = 70
EXIT_NO_ANSWER: Final = 71
"""An answer could not be given, as for lack of memory: the caller is notified of the end of the process instead."""


class Server:
    """Holds the role object and answers the calls of the parent.

    Args:
        channel: to the parent.
        worker: one thread.
        role: answers the calls; None: the first message says what to construct.
    """

    def __init__(self, channel: Channel, worker: Executor, role: Any = None) -> None:
        self._channel, self._worker = channel, worker
        self._num_in_worker = 0
        self._role = role
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Serve until asked to stop; leave at once when the parent is gone."""
        reading = asyncio.create_task(self._read())
        closing = asyncio.create_task(self._closed.wait())
        await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        if not self._closed.is_set():  # a parent may be gone as soon as it has the answer to its Stop
            reading.result()
            self._leave_without_parent()
        for task in self._tasks.values():
            task.cancel()
        await self._channel.flush()
        if self._num_in_worker:
            _exit_now(0)  # a normal exit would wait for a method that cannot be interrupted

    def _leave_without_parent(self) -> None:
        _exit_now(EXIT_PARENT_GONE)

    async def _read(self) -> None:
        while (frame := await self._channel.receive()) is not None:
            match frame.message:
                case Start() as start:
                    self._spawn(START_ID, self._start(start, frame))
                case Call() as call:
                    self._spawn(call.id, self._call(call, frame))
                case Cancel(id=call_id) if call_id in self._tasks:
                    self._tasks[call_id].cancel()
                case Stop():
                    self._spawn(STOP_ID, self._stop()).add_done_callback(lambda _: self._closed.set())

    def _spawn(self, call_id: int, work: Coroutine[Any, Any, Bytes]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._answer(call_id, work))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(call_id, None))
        task.add_done_callback(lambda _: work.close())  # when cancelled before its first step
        task.add_done_callback(_end_if_it_failed)
        return task

    async def _answer(self, call_id: int, work: Coroutine[Any, Any, Bytes]) -> None:
        try:
            frame = await work
        except BaseException as error:  # noqa: BLE001  the boundary: whatever a role raises goes to the caller
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return  # the caller has gone away
            frame = write_frame(describe_failure(call_id, error))
        self._channel.send(frame)

    async def _start(self, start: Start, frame: Frame) -> Bytes:
        sys.path.extend(entry for entry in start.path if entry not in sys.path)

        def construct() -> None:
            target = load_target(start.target)
            bound = bind_arguments(target, [], start.kwargs, frame)
            self._role = target(*bound.args, **bound.kwargs)

        # The constructor is watched as the role's first method; only if it went well comes `start`.
        failure_or_result = await self._in_worker(START_ID, construct)
        gc.freeze()  # what it has built stays: a collector that scans all of it again takes a tenth of small calls
        if self._role is not None and hasattr(self._role, "start"):
            return await self._invoke(START_ID, self._role.start)
        return failure_or_result

    async def _call(self, call: Call, frame: Frame) -> Bytes:
        method = self._public_method(call.method)
        bound = bind_arguments(method, call.args, call.kwargs, frame)
        return await self._invoke(call.id, method, *bound.args, **bound.kwargs)

    async def _stop(self) -> Bytes:
        return await self._invoke(STOP_ID, getattr(self._role, "close", _nothing))

    async def _invoke(self, call_id: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Bytes:
        if inspect.iscoroutinefunction(method):
            return _write_result(call_id, await method(*args, **kwargs))
        return await self._in_worker(call_id, lambda: method(*args, **kwargs))

    async def _in_worker(self, call_id: int, function: Callable[[], object]) -> Bytes:
        """Run in the worker thread, and write the answer there too: a big one takes its time."""

        def run() -> Bytes:
            self._num_in_worker += 1
            try:
                return _write_result(call_id, function())
            except BaseException as error:  # noqa: BLE001  as above; SystemExit and StopIteration must not reach asyncio
                return write_frame(describe_failure(call_id, error))
            finally:
                self._num_in_worker -= 1

        return await asyncio.get_running_loop().run_in_executor(self._worker, run)

    def _public_method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._role, name, None)
        if name.startswith("_") or not callable(method):
            public = [key for key in dir(self._role) if not key.startswith("_") and callable(getattr(self._role, key))]
            raise AttributeError(f"{type(self._role).__name__} has no method {name!r}; it has {', '.join(public)}")
        return method  # type: ignore[no-any-return]


def _write_result(call_id: int, value: object) -> Bytes:
    writer = FrameWriter()
    return writer.finish(Result(call_id, writer.pack(value)))


def _nothing() -> None:
    """Stand in for the `close` of a role that has none."""


def _end_if_it_failed(answering: asyncio.Task[None]) -> None:
    if not answering.cancelled() and answering.exception() is not None:
        _exit_now(EXIT_NO_ANSWER)


def _exit_now(code: int) -> None:
    with contextlib.suppress(OSError, ValueError, MemoryError):  # no log, or no memory to write to it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _EndsWithoutMemory(logging.Handler):
    """Ends the process when a library logs that it had no memory to wake the waiter for a result."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], MemoryError):
            _exit_now(EXIT_NO_ANSWER)


def _end_without_memory() -> None:
    """End this process on a lack of memory that would not be reported to any caller."""
    for name in ("asyncio", "concurrent.futures"):
        logging.getLogger(name).addHandler(_EndsWithoutMemory())
    notify = threading.excepthook

    def on_exception(raised: Any) -> None:
        if issubclass(raised.exc_type, MemoryError):
            _exit_now(EXIT_NO_ANSWER)
        notify(raised)

    threading.excepthook = on_exception


def _prepare_process() -> None:
    """Die with the parent, leave Ctrl-C to it, and log by whole lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The end of the socket says the same, but not to a thread that computes without the interpreter lock.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(all_threads=False)  # of the crash only: the end of the log comes along in errors
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class _MainThread(Executor):
    """Runs in the main thread what another one submits."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def work() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(fn(*args, **kwargs))

        self._work.put(work)
        return done

    def run_with(self, loop: Coroutine[Any, Any, None]) -> None:
        """Run it in a thread of its own, and here what it submits, until it has ended."""

        def run() -> None:
            try:
                asyncio.run(loop)
            finally:
                self._work.put(None)

        threading.Thread(target=run, name="calls", daemon=True).start()
        while (work := self._work.get()) is not None:
            work()


async def _serve(sock: socket.socket, worker: Executor) -> None:
    server = Server(Channel(SocketStream(sock)), worker)
    try:
        await server.run()
    except Exception:  # noqa: BLE001  the boundary of the process: a broken frame; say it in the log and leave
        traceback.print_exc()
        _exit_now(1)


def main(fd: int) -> None:
    """Serve one role on the socket `fd`, inherited from the parent."""
    defer_device_backends()
    _prepare_process()
    _end_without_memory()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    watch_if_invited(os.environ.get("OFFBEAT_ROLE", ""))
    if os.environ.pop(MAIN_THREAD, ""):
        main_thread = _MainThread()
        main_thread.run_with(_serve(sock, main_thread))
    else:
        asyncio.run(_serve(sock, ThreadPoolExecutor(1, thread_name_prefix="role")))


def load_target(target: str) -> type[Any]:
    """Import "package.module:Class"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def bind_arguments(
    function: Callable[..., Any], args: Sequence[msgspec.Raw], kwargs: Mapping[str, msgspec.Raw], frame: Frame
) -> inspect.BoundArguments:
    """Match packed arguments with the parameters of a method or class, and decode each.

    A parameter without annotation takes plain data and arrays as they come.

    Raises:
        TypeError: an argument is missing or unknown.
        msgspec.ValidationError: one is of another type than declared; the text names the parameter.
    """
    signature, hints = _declared(function)
    bound = signature.bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        hint = hints.get(name, Any)
        kind = signature.parameters[name].kind
        try:
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(frame.unpack(raw, hint) for raw in value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: frame.unpack(raw, hint) for key, raw in value.items()}
            else:
                bound.arguments[name] = frame.unpack(value, hint)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"argument {name!r}: {error}") from None
    return bound


@functools.cache
def _declared(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Parameters and annotations: to find them takes longer than a small call."""
    return inspect.signature(function), get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]


if __name__ == "__main__":
    reaper = Reaper(int(sys.argv[2]))
    main(int(sys.argv[1]))
    reaper.dismiss()
