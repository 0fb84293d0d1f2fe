"""Ctrl-C and SIGTERM, held back until the update in hand is done and saved."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NOTICE = b"\ninterrupted: the update in hand is finished and saved; once more to end at once\n"


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Turn the first signal into an answer; the second raises KeyboardInterrupt at once.

    Yields:
        Whether the run was asked to end.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, _NOTICE)  # not print: the signal may have come in the middle of one

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
