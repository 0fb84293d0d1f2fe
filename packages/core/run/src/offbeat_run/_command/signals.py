"""Signals that ask a command to end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_ASK_TO_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_MAY_BE_IGNORED: Final = (signal.SIGHUP, signal.SIGUSR1)
_REPEAT_S: Final = 5.0
"""A batch system may send one request to end to several processes, each of which passes it on."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask a command to end; without SIGHUP under `nohup`, which has it ignored.

    SIGINT is Ctrl-C; SIGTERM comes from Slurm and Kubernetes 30 s before they kill, and SIGUSR1 from
    `sbatch --signal=USR1@60`; SIGHUP from a terminal that closes.
    """
    is_ignored = {number for number in _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
    return [number for number in _ASK_TO_END if number not in is_ignored]


class EndRequests:
    """Tells a second request to end from a repetition of the first. Ctrl-C twice is always two requests."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def is_repeated(self, number: int) -> bool:
        """Note a signal; return whether it only repeats an earlier one, and is to be ignored.

        Args:
            number: of the signal.
        """
        now_s = time.monotonic()
        if self._first is None:
            self._first = number, now_s
            return False
        is_ctrl_c_again = number == self._first[0] == signal.SIGINT
        return not is_ctrl_c_again and now_s - self._first[1] < _REPEAT_S


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let these signals raise KeyboardInterrupt as Ctrl-C does, in the block and where nothing else is set."""
    previous, requests = {}, EndRequests()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not requests.is_repeated(number):
            signal.default_int_handler(number, frame)

    if threading.current_thread() is threading.main_thread():  # handlers can be set by no other
        unset = [number for number in ending_signals() if signal.getsignal(number) is signal.SIG_DFL]
        previous = {number: signal.signal(number, interrupt) for number in unset}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
