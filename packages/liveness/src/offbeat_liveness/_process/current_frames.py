"""Where the threads of this process stand, asked without standing still for ever."""

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_LOOKING: Final = threading.RLock()
_COLLECTS_ANYWHERE: Final = sys.version_info < (3, 12)


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`: the innermost frame of each thread, by thread ident. Any thread may ask at any time.

    Expected: it returns. What happens up to Python 3.11: it makes objects while it holds the interpreter's lock of
    threads, and where that sets off the garbage collector, what is collected may want that lock again (as a
    `threading.local` does) or hand the GIL to a thread that wants it. Then the whole process stands still, for ever
    (python/cpython#106883, not mended in 3.11). So the collector rests meanwhile, for microseconds. Python 3.12
    collects between instructions only. Can go with Python 3.11.

    A program that turns its collector off within those microseconds has it on again: nothing in Python sets the switch
    only if it is as it was.
    """
    return _without_collector(sys._current_frames)


def current_exceptions() -> dict[int, Any]:
    """`sys._current_exceptions()`: what each thread handles, by thread ident; likewise."""
    return _without_collector(sys._current_exceptions)


def _without_collector(look: Callable[[], T]) -> T:
    if not _COLLECTS_ANYWHERE:
        return look()
    with _LOOKING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return look()
        finally:
            if was_on:
                gc.enable()


if _COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    # Else a child born during a look would have no collector, and a lock that nobody holds any more.
    os.register_at_fork(before=_LOOKING.acquire, after_in_parent=_LOOKING.release, after_in_child=_LOOKING.release)
