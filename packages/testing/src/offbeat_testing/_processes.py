"""Threads on their way out, which a process that is about to fork must wait for."""

import os
import threading
import time
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 2.0
_TASKS: Final = Path("/proc/self/task")
_staying: Final[set[int]] = set()


def wait_for_leaving_threads() -> None:
    """Return when no thread is on its way out; call it before `os.fork`.

    Expected: a thread that was joined is gone. What happens: Python lets go of it first, then its native libraries
    clean up behind it, under locks of theirs. A child forked meanwhile finds them locked, and hangs in its first matrix
    product: 5 forks of 100 on a busy machine, each after a thread that had multiplied; after this wait none of 1000.

    Native threads that stay, such as a store's, are waited for in vain once, for `PATIENCE_S`.
    """
    if not _TASKS.is_dir():  # not Linux
        return
    end_s = time.monotonic() + PATIENCE_S
    while leaving := _unknown_to_python() - _staying:
        if time.monotonic() > end_s:
            _staying.update(leaving)
        time.sleep(0.001)


def _unknown_to_python() -> set[int]:
    tasks = {int(name) for name in os.listdir(_TASKS)}
    return tasks - {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}
