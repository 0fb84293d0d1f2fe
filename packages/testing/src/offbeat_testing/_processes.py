"""Processes of a test: forks of this one that need no imports, and commands as in a terminal, to interrupt or kill."""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
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


STACKS_SIGNAL: Final = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""A forked process that gets it writes its stacks into its output, even one that is stuck with the GIL."""

BEGIN_S: Final = 60.0
"""Time for a child to lead its session. Until then a signal to its group would reach no process."""


class ForkedProcess:
    """Calls a function in a child process, in a session of its own, with the signal handlers of a new process.

    Args:
        main: called in the child, which ends with it; a SystemExit gives the exit code.
        words: what the child finds in `sys.argv` behind the program's name.
        output: file descriptor for what it prints, to either stream.
    """

    def __init__(self, main: Callable[[], object], words: Sequence[str] = (), output: int = 2) -> None:
        self._code: int | None = None
        wait_for_leaving_threads()
        begun_reader, begun_writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(begun_reader)
            _become(main, words, output, begun_writer)
        os.close(begun_writer)
        has_begun, _, _ = select.select([begun_reader], [], [], BEGIN_S)
        os.close(begun_reader)
        if not has_begun:
            self.send_signal(signal.SIGKILL)
            raise TimeoutError(f"process {self.pid} did not lead its session within {BEGIN_S:g} s of its fork")

    def poll(self) -> int | None:
        """Return the exit code, minus the signal for a killed process; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(main: Callable[[], object], words: Sequence[str], output: int, begun_writer: int) -> None:
    """The child's life; `begun_writer` is closed when it leads its session."""
    code = 1
    try:
        os.setsid()
        os.close(begun_writer)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
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


DEADLINE_S: Final = 90.0
"""Generous: a loaded machine takes long to import torch in three processes."""
_POLL_EVERY_S: Final = 0.05


def read_terminal(descriptor: int) -> str:
    """Read what a pseudo-terminal gets until the last that writes to it has left, and close it.

    Args:
        descriptor: the side of it that `pty.openpty` or `pty.fork` gives to the process that reads the terminal.
    """
    text, end_s = b"", time.monotonic() + DEADLINE_S
    try:
        while select.select([descriptor], [], [], max(end_s - time.monotonic(), 0))[0]:
            if not (some := os.read(descriptor, 1 << 16)):
                return text.decode()
            text += some
    except OSError:  # so Linux says that all have left
        return text.decode()
    finally:
        os.close(descriptor)
    raise TimeoutError(f"after {DEADLINE_S:g} s a process still has the terminal open, which got {text!r:.500}")


class RunningCommand:
    """`python -m MODULE WORDS` in a session of its own. A block ends with whatever it has started killed.

    Args:
        module: of the application, such as "sft_app"; or its `main`, to be called in a fork of this process: a test
            that starts many does not import torch anew for each. This process must not have computed with threads.
        words: of the command line.
    """

    def __init__(self, module: str | Callable[[], object], *words: object) -> None:
        self._module, self._words = module, [str(word) for word in words]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that is not read would block the command

    def __enter__(self) -> "RunningCommand":
        if callable(self._module):
            self._process: subprocess.Popen[bytes] | ForkedProcess = ForkedProcess(
                self._module, self._words, self._output.fileno()
            )
        else:
            line = [sys.executable, "-m", self._module, *self._words]
            self._process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.descendants()
        self.kill()
        self.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._output.close()

    @property
    def pid(self) -> int:
        """Process id of the command itself."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Return what it has printed so far, to either stream."""
        file = self._output.fileno()  # its offset is where the command writes: it must not move
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def descendants(self) -> list[int]:
        """Process ids of all it has started, directly or not, that are still its descendants."""
        children: dict[int, list[int]] = {}
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        for pid, parent in (map(int, line.split()) for line in listed.splitlines()):
            children.setdefault(parent, []).append(pid)
        found = list(children.get(self.pid, []))
        for pid in found:  # grows while it is walked
            found += children.get(pid, [])
        return found

    def press_ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command alone, as `kill -9` does: nothing it has started is notified."""
        self._process.send_signal(signal.SIGKILL)

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for something the command brings about.

        Raises:
            AssertionError: it has ended before, or the deadline has passed; with its output.
        """
        end_s = time.monotonic() + deadline_s
        while not condition():
            ended = self._process.poll()
            # Looked at once more: the last thing it did may have been what is waited for.
            assert ended is None or condition(), f"ended with {ended} before {what}:\n{self.output}"
            assert time.monotonic() < end_s, f"waited {deadline_s:g} s in vain for {what}; so far:\n{self.output}"
            time.sleep(_POLL_EVERY_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end, and return the exit code; -9 for SIGKILL.

        Raises:
            AssertionError: the deadline has passed.
        """
        end_s = time.monotonic() + deadline_s
        while (code := self._process.poll()) is None:
            if time.monotonic() > end_s:
                stacks = self._ask_for_stacks()
                raise AssertionError(f"still running after {deadline_s:g} s:\n{self.output}\n{stacks}")
            time.sleep(_POLL_EVERY_S)
        return code

    def _ask_for_stacks(self) -> str:
        """Have all of its forked processes write where they stand; what those with a log of their own wrote there."""
        logs = set()
        for pid in [self.pid, *self.descendants()]:
            with contextlib.suppress(OSError):
                if _catches(pid, STACKS_SIGNAL):
                    os.kill(pid, STACKS_SIGNAL)
                    logs.add(Path(os.readlink(f"/proc/{pid}/fd/2")))
        time.sleep(1.0)  # the handler is C and needs no GIL
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in sorted(logs) if log.is_file())


def wait_until_gone(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until none of these processes runs any more.

    Raises:
        AssertionError: one does after the deadline; with its command line.
    """
    left = list(pids)
    end_s = time.monotonic() + deadline_s
    while left := [pid for pid in left if _is_running(pid)]:
        assert time.monotonic() < end_s, f"still there after {deadline_s:g} s: {[_command_line(pid) for pid in left]}"
        time.sleep(_POLL_EVERY_S)


def _is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listed.strip()) and not listed.startswith("Z")


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, and would not be ended by it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def _command_line(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return f"{pid} {path.read_text() if path.is_file() else ''}".replace("\0", " ")
