"""A command of an application in a process of its own, as somebody starts, interrupts or kills it in a terminal."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

from offbeat_testing._forked_process import STACKS_SIGNAL, ForkedProcess

DEADLINE_S: Final = 90.0
"""Generous: a loaded machine takes long to import torch in three processes."""
_LOOK_EVERY_S: Final = 0.05


class RunningCommand:
    """`python -m MODULE WORDS` in a session of its own. A block ends with whatever it has started killed.

    Args:
        module: of the application, such as "sft_app"; or its `main`, to be called in a fork of this process: a test
            that starts many does not import torch anew for each. This process must not have computed with threads.
        words: of the command line.
    """

    def __init__(self, module: str | Callable[[], object], *words: object) -> None:
        self._module, self._words = module, [str(word) for word in words]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that nobody reads would stop the command

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
        """Of the command itself."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has printed so far, to either stream."""
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
        """Send SIGINT to all of its process group, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the command alone."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command alone, as `kill -9` does: nothing it has started hears of it."""
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
            time.sleep(_LOOK_EVERY_S)

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
            time.sleep(_LOOK_EVERY_S)
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
        time.sleep(_LOOK_EVERY_S)


def _is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listed.strip()) and not listed.startswith("Z")


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, and would not be ended by it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def _command_line(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return f"{pid} {path.read_text() if path.is_file() else ''}".replace("\0", " ")
