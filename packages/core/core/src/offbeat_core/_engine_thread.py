"""A thread that owns a rollout engine: it steps the engine, and between two steps runs what other threads ask for."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from offbeat_core._errors import OffbeatError


def new_future() -> "Future[Any]":
    """Make a future that cannot be cancelled: the thread will set it, even if no caller waits any more."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Give a future what `function` returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - passed to the caller, whatever it is
        future.set_exception(error)


class EngineThread:
    """Nothing that only this thread touches needs a lock.

    Args:
        name: of the thread.
        build: makes the engine, in the thread.
        can_step: whether there is something to step; asked in the thread.
        step: one step. What it raises ends the thread.
        shut_down: run in the thread after its last step.
        context: makes what is entered around everything the thread does.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], None],
        can_step: Callable[[], bool],
        step: Callable[[], None],
        shut_down: Callable[[], None] = lambda: None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._build, self._can_step, self._step, self._shut_down = build, can_step, step, shut_down
        self._context = context
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a job passes before `_closed` is set, and is answered, or not at all
        self._closed = False
        self._ready = new_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_closed(self) -> bool:
        """Return whether it takes no more jobs."""
        return self._closed

    def start(self) -> "Future[None]":
        """Start the thread; the future is done when the engine is built, or has what `build` raised."""
        self._thread.start()
        return self._ready

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run `function` in the thread, between two steps. From any thread."""
        future = new_future()
        with self._lock:
            if not self._closed:
                self._jobs.put((function, future))
                return future
        future.set_exception(OffbeatError("the rollout engine is closed; make a new one"))
        return future

    def close(self) -> None:
        """Step no more and take no more jobs. In the thread."""
        self._closed = True

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; say whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with self._context():
            try:
                self._build()
            except BaseException as error:  # noqa: BLE001 - passed to the caller that made the engine
                self._refuse_jobs()
                self._ready.set_exception(error)
                return
            self._ready.set_result(None)
            try:
                while not self._closed:
                    self._do_jobs()
                    if not self.is_closed and self._can_step():
                        self._step()
                self._shut_down()
            finally:
                self._refuse_jobs()

    def _do_jobs(self) -> None:
        """Do what was asked; wait for it when there is nothing to step."""
        while not self._closed and (not self._jobs.empty() or not self._can_step()):
            function, future = self._jobs.get()
            settle(future, function)

    def _refuse_jobs(self) -> None:
        with self._lock:
            self._closed = True
        while not self._jobs.empty():
            _, future = self._jobs.get()
            future.set_exception(OffbeatError("the rollout engine was closed"))
