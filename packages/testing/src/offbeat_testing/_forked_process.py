"""A fork of this process that runs one function: it needs no imports, where a new Python takes seconds for torch."""

import faulthandler
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from offbeat_testing._leaving_threads import wait_for_leaving_threads

STACKS_SIGNAL: Final = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""A forked process that gets it writes its stacks into its output, even one that stands still with the GIL."""

BEGIN_S: Final = 60.0
"""How long a child may take to lead its session. Until then a signal to its group would reach nobody."""


class ForkedProcess:
    """Calls a function in a child process, in a session of its own, with the signal handlers of a new process.

    Raises:
        TimeoutError: the child does not get as far as to lead its session; it has been killed.

    Args:
        main: called in the child, which ends with it; a SystemExit gives the exit code.
        words: what the child finds in `sys.argv` behind the program's name.
        output: file descriptor for what it prints, to either stream.
    """

    def __init__(self, main: Callable[[], object], words: Sequence[str] = (), output: int = 2) -> None:
        self._code: int | None = None
        wait_for_leaving_threads()
        heard, telling = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(heard)
            _become(main, words, output, telling)
        os.close(telling)
        has_begun, _, _ = select.select([heard], [], [], BEGIN_S)
        os.close(heard)
        if not has_begun:
            self.send_signal(signal.SIGKILL)
            raise TimeoutError(f"process {self.pid} did not lead its session within {BEGIN_S:g} s of its fork")

    def poll(self) -> int | None:
        """The exit code, minus the signal for a killed process; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(main: Callable[[], object], words: Sequence[str], output: int, telling: int) -> None:
    """The child's life; `telling` is closed when it leads its session."""
    code = 1
    try:
        os.setsid()
        os.close(telling)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1, closefd=False) for each in (1, 2))
        faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
        sys.argv[1:] = words
        main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:  # noqa: BLE001  the boundary of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
