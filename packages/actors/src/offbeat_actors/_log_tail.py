"""The end of a log file, for error texts."""

import os
from pathlib import Path
from typing import Final

NUM_TAIL_LINES: Final = 30


def read_log_tail(path: Path, *, num_lines: int = NUM_TAIL_LINES, max_bytes: int = 8192) -> str:
    """Return the last lines of a log, newest last; empty when there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])
