"""Lines that a role process writes into its log, so that a reader sees that it is alive and how far it is."""

import contextlib
import os
import socket
import time

from offbeat_run._console.printing import shown


def log_line(text: str) -> None:
    """Write one line with its time to standard output, which is the log of a role. A full disk ends no role."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shown(text)}\n"
    with contextlib.suppress(OSError):
        os.write(1, line.encode(errors="replace"))  # not print, which would keep what a full disk refuses


def log_start(device: str, num_threads: int = 0) -> None:
    """Write the first line of a role.

    Args:
        device: that it computes on, by the name in its configuration.
        num_threads: of its computations; 0: as many as there are.
    """
    threads = f", {num_threads} threads" if num_threads else ""
    log_line(f"started: process {os.getpid()} on {socket.gethostname()}, device {device}{threads}")


def log_loaded(path: str, dtype: str, since_s: float) -> None:
    """Write that a model is loaded.

    Args:
        path: its folder.
        dtype: of its weights here.
        since_s: `time.monotonic()` when loading began.
    """
    log_line(f"loaded {path} as {dtype} in {time.monotonic() - since_s:.1f} s")
