"""A trace of some updates, on request."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

PROFILE_FILE = "profile.json"

UpdateProfiler = Callable[[int], AbstractContextManager[object]]
"""Called with the number of an update: the block in which that update runs."""


@contextmanager
def open_profiler(updates: range, path: Path) -> Iterator[UpdateProfiler]:
    """Trace the updates asked for; the file opens in Perfetto and chrome://tracing.

    The trace is written after the last of them, or when the block ends before that: what was traced is never lost.

    Args:
        updates: counted from 0; empty for none.
        path: of the trace, Chrome's JSON object form.
    """
    if not len(updates):
        yield lambda update: nullcontext()
        return
    profile: torch.profiler.profile | None = None

    def finish() -> None:
        nonlocal profile
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(str(path))
            profile = None

    @contextmanager
    def traced(update: int) -> Iterator[None]:
        nonlocal profile
        if profile is None and update in updates:  # not only the first: a resumed run may begin inside
            profile = torch.profiler.profile()
            profile.start()
        with torch.profiler.record_function(f"update {update}"):
            yield
        if update + 1 == updates.stop:
            finish()

    try:
        yield traced
    finally:
        finish()
