"""Signals that ask a command to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ASK_TO_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_MAY_BE_IGNORED: Final = (signal.SIGHUP, signal.SIGUSR1)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask a command to end; without SIGHUP under `nohup`, which has it ignored.

    SIGINT is Ctrl-C; SIGTERM comes from Slurm and Kubernetes 30 s before they kill, and SIGUSR1 from
    `sbatch --signal=USR1@60`; SIGHUP from a terminal that closes.
    """
    is_ignored = {number for number in _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
    return [number for number in _ASK_TO_END if number not in is_ignored]


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let these signals raise KeyboardInterrupt as Ctrl-C does, in the block and where nothing else is set."""
    previous = {}
    if threading.current_thread() is threading.main_thread():  # handlers can be set by no other
        unset = [number for number in ending_signals() if signal.getsignal(number) is signal.SIG_DFL]
        previous = {number: signal.signal(number, signal.default_int_handler) for number in unset}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
