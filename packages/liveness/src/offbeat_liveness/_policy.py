"""What is done about a verdict: say it once, write it down, and under `abort` end the process."""

import contextlib
import os
import select
import sys
import threading
from typing import Final

from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._process.stacks import OWN_THREADS

EXIT_CODE: Final = 4  # the same as of a wait that is past its deadline, in all of offbeat
STDERR: Final = 2
FLUSH_S: Final = 0.3
SAY_S: Final = 1.0


def say(text: str) -> None:
    """Write to the process's stderr, past Python's buffers and locks, which a stuck thread may hold.

    A pipe that nobody reads is given up after a while: the rest of what is to be done must not hang on it.
    """
    data = (text + "\n").encode(errors="replace")
    with contextlib.suppress(OSError):
        while data and select.select([], [STDERR], [], SAY_S)[1]:
            data = data[os.write(STDERR, data[: select.PIPE_BUF]) :]  # so much never blocks a pipe that takes any


def pointer(verdict: Verdict, name: str, leader: str) -> str:
    """One line for the processes that do not print the verdict."""
    return f"offbeat liveness: {name}: {verdict.kind}, told in full by {leader}"


def leave() -> None:
    """End this process with exit code 4, whatever its threads stand in; flush what was printed if that is possible."""
    flushing = threading.Thread(target=_flush, name=f"{OWN_THREADS}-flush", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
