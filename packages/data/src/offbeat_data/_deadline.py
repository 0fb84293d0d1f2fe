"""A deadline for work that others wrote: it holds for work that waits, and for work that never lets go of the thread.

`asyncio.timeout` ends what waits. What blocks (a loop without an end, a socket without a deadline, `time.sleep`) stops
the event loop and every deadline in it; here a timer signal breaks into it, and the time it took is given back to
everybody who waited meanwhile. That works in the main thread only, where Python runs signal handlers; elsewhere only
waiting is bounded. Code that neither waits nor lets Python look at signals cannot be ended but with its process.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_AGAIN_S: Final = 1.0
"""The timer strikes again after so long, should the work have caught what the first stroke raised."""
_NOTICED_S: Final = 0.01
"""Stretches shorter than this hold nobody up."""

_allowed_s: ContextVar[float] = ContextVar("offbeat_step_deadline_s", default=0.0)
_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Timeout]] = WeakKeyDictionary()


class StepBlockedError(BaseException):
    """Raised inside work that blocks the thread for too long. No Exception, like KeyboardInterrupt: it must get out."""


async def within(work: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Await work for at most `deadline_s`, not counting the time in which other work blocked the thread.

    Raises:
        TimeoutError: it waited, or blocked the thread, for longer.
    """
    _allowed_s.set(deadline_s)
    scopes = _waiting.setdefault(asyncio.get_running_loop(), set())
    try:
        async with asyncio.timeout(deadline_s) as scope:
            scopes.add(scope)
            try:
                return await _Interruptible(work, deadline_s, scope)
            finally:
                scopes.discard(scope)
    except StepBlockedError:
        raise TimeoutError(f"it blocked the thread for {deadline_s:g} s") from None


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await work of a task of its own, made inside `within`: no stretch of it may block longer than is allowed there.

    Raises:
        TimeoutError: one did.
    """
    try:
        return await _Interruptible(work, _allowed_s.get())
    except StepBlockedError:
        raise TimeoutError(f"it blocked the thread for {_allowed_s.get():g} s") from None


class _Interruptible(Generic[T]):
    """Runs a coroutine stretch by stretch, from one wait to the next, each under the timer."""

    def __init__(self, work: Coroutine[Any, Any, T], deadline_s: float, own: asyncio.Timeout | None = None) -> None:
        self._work, self._deadline_s, self._own = work, deadline_s, own

    def __await__(self) -> Generator[Any, Any, T]:
        error: BaseException | None = None
        try:
            while True:
                try:
                    with _timer(self._deadline_s, self._own):
                        waited = self._work.send(None) if error is None else self._work.throw(error)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                error = None
                try:
                    yield waited
                except BaseException as thrown:  # noqa: BLE001  as `await` does: what is thrown here is for the work
                    error = thrown
        finally:
            self._work.close()


@contextlib.contextmanager
def _timer(deadline_s: float, own: asyncio.Timeout | None) -> Iterator[None]:
    """Break into the body after `deadline_s`, and put back whatever timer and handler there were."""
    if deadline_s <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def strike(number: int, frame: object) -> None:
        if not is_over:  # a stroke may be on its way when the timer is taken back
            raise StepBlockedError

    handler = signal.signal(signal.SIGALRM, strike)
    begun_s = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, deadline_s, _AGAIN_S)
    try:
        yield
    finally:
        is_over = True
        taken_s = time.monotonic() - begun_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - taken_s, 0.001), interval_s)
        if taken_s > _NOTICED_S:
            _give_back(taken_s, own)


def _give_back(taken_s: float, own: asyncio.Timeout | None) -> None:
    """Move the deadlines of all that waited while the thread was held, but not of the work that held it."""
    for scope in _waiting.get(asyncio.get_running_loop(), set()) - {own}:
        with contextlib.suppress(RuntimeError):  # one that has struck already
            scope.reschedule((scope.when() or 0.0) + taken_s)
