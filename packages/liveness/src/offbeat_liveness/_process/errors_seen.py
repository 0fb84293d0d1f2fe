"""Exceptions that do not end a process and explain why it stands: those that ended a thread, and one that is in flight.

A thread that was to fill a queue raises, and whoever gets from the queue waits for ever. A rank that failed stands in
the clean-up of its `finally`, where it waits for ranks that wait for it, and its exception is printed only after that.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from offbeat_liveness._process.current_frames import current_exceptions
from offbeat_liveness._process.goodbye import describe, read_exception
from offbeat_liveness._process.stacks import OWN_THREADS

MAX_REMEMBERED: Final = 8


class ThreadErrors:
    """Remembers which threads an exception has ended; the program's own hook is called as before."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, str]] = []
        self._hook: Callable[[Any], object] = threading.excepthook
        threading.excepthook = self._on_exception

    def close(self) -> None:
        """Give the hook back, unless somebody has put another before it."""
        if threading.excepthook == self._on_exception:
            threading.excepthook = self._hook

    def notes(self, who: str) -> tuple[str, ...]:
        """One line for each, for a verdict."""
        now_s = time.monotonic()
        return tuple(f"{who}: {text}, {now_s - seen_s:.0f} s ago" for seen_s, text in self._seen)

    def _on_exception(self, raised: Any) -> None:
        if raised.thread and raised.thread.name.startswith(OWN_THREADS):
            threading.__excepthook__(raised)  # what goes wrong in the watch is no matter of the program's hook
            return
        self._hook(raised)
        if raised.exc_value is None or isinstance(raised.exc_value, SystemExit):
            return
        text, stack = describe(raised.exc_value)
        where = f" at {stack[0]}" if stack else ""
        name = raised.thread.name if raised.thread else "?"
        self._seen.append((time.monotonic(), f"its thread {name!r} was ended by {text}{where}"))
        del self._seen[:-MAX_REMEMBERED]


def exception_in_flight(ident: int) -> str:
    """The exception that a thread handles, or cleans up after, and where it was raised; "" if there is none."""
    error = current_exceptions().get(ident)
    error = error[1] if isinstance(error, tuple) else error  # Python 3.11 gives what exc_info does
    if not isinstance(error, BaseException):
        return ""
    text, stack = read_exception(error)
    return text + (f" (raised at {stack[0]})" if stack else "")
