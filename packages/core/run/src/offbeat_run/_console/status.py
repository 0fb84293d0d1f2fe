"""Says what a command is doing, from its first moment on: a terminal has one line that is overwritten, a log a few.

    doing("loading the model", "smollm2")      loading the model: smollm2 (8 s)
    so_far("12 of 64 samples")                 update 3: 12 of 64 samples (4 s)

Only what is slow needs a stage: in a log a stage is a line where nothing else was printed for `QUIET_S`.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TextIO, cast

from offbeat_core import LossFunction, LossMetrics, LossTokens
from offbeat_run._console.printing import shown
from offbeat_run._console.quantities import duration_text

QUIET_S: Final = 3.0
"""A command that prints nothing for longer looks dead."""
_QUIET_SHARE: Final = 0.1
_QUIET_MOST_S: Final = 60.0
"""A log gets a line for each tenth of the time that a long stage has taken, and at least one a minute."""
_TICK_S: Final = 0.5
_END_S: Final = 1.0
"""Longest wait for a last line, which a reader that has stopped may hold back for ever."""
_LINE: Final = "\r\x1b[K\x1b[?7l{}\x1b[?7h"
"""Text on the cleared line, cut off by the terminal at its edge, because only the terminal knows a text's width."""
_CLEARED: Final = "\r\x1b[K"
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Stage(NamedTuple):
    name: str
    so_far: str
    since_s: float


class Status:
    """Line that says what a command is doing.

    Threads wait for each other only where they write to one terminal.

    Args:
        descriptor: takes it.
        is_terminal: it is a terminal that obeys commands.
        clock: seconds, for tests.
    """

    def __init__(self, descriptor: int, *, is_terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_terminal, self._descriptor, self._clock = is_terminal, descriptor, clock
        self._stage = _Stage("", "", clock())
        self._printed_s = -float("inf")
        self._writing = threading.RLock()
        self._is_drawn = self._is_mid_line = False
        self._num_covers = 0

    def doing(self, stage: str, so_far: str = "") -> None:
        """Take note of the current stage. The first time it is shown at once; "" takes it away."""
        since_s = self._stage.since_s if stage == self._stage.name else self._clock()
        self._stage = _Stage(stage, so_far, since_s)
        if not stage:
            with self.room():
                return
        if self._printed_s < 0:
            self.tick()

    def so_far(self, text: str) -> None:
        """Take note of how far the stage is."""
        self._stage = self._stage._replace(so_far=text)

    @property
    def text(self) -> str:
        """One line; empty before there is a stage."""
        name, so_far, since_s = self._stage
        what, lasted_s = f"{name}: {so_far}" if so_far else name, int(self._clock() - since_s)
        line = f"{what} ({duration_text(lasted_s)})" if lasted_s else f"{what} ..."
        return shown(line).replace("\n", " ") if name else ""

    def tick(self) -> None:
        """Show it, where it is time to."""
        if self.is_terminal:
            with self._writing:
                if not (self._num_covers or self._is_mid_line or self._is_in_background) and self._stage.name:
                    self._write(_LINE.format(self.text))
                    self._is_drawn, self._printed_s = True, self._clock()
        elif self._stage.name and self._clock() - self._printed_s >= self._longest_quiet_s:
            self._printed_s = self._clock()
            self._write(f"{self.text}\n")

    @property
    def _is_in_background(self) -> bool:
        """The shell has the terminal, and what is typed there would be overwritten."""
        try:
            return os.tcgetpgrp(self._descriptor) != os.getpgrp()
        except OSError:  # a terminal that no shell controls
            return False

    @property
    def _longest_quiet_s(self) -> float:
        return min(max(QUIET_S, _QUIET_SHARE * (self._clock() - self._stage.since_s)), _QUIET_MOST_S)

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Leave the line of the terminal to others while the block lasts."""
        if not self.is_terminal:
            yield
            return
        with self._writing:
            if self._is_drawn:
                self._write(_CLEARED)
                self._is_drawn = False
            yield

    def printing(self, text: str) -> None:
        """Take note of what others print."""
        self._printed_s = self._clock()
        if words := _CONTROL.sub("", text):
            self._is_mid_line = not words.endswith("\n")

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """Draw nothing while the block lasts: a display of its own has the terminal, and shows `text` in it."""
        with self.room():
            self._num_covers += 1
        try:
            yield
        finally:
            with self._writing:
                self._num_covers -= 1
                self._is_mid_line = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # its reader has left, and the command continues
            os.write(self._descriptor, text.encode(errors="replace"))


class _Stream:
    """Standard output or standard error, with the status line out of the way of what is written."""

    def __init__(self, stream: TextIO, status: Status) -> None:
        self._stream, self._status = stream, status

    def write(self, text: str) -> int:
        with self._status.room():
            self._status.printing(text)
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_current: Status | None = None


def doing(stage: str, so_far: str = "") -> None:
    """Set the current stage of this command; without a command there is no effect.

    Args:
        stage: such as "loading the model"; its seconds are counted until the next one. "": nothing that ends soon.
        so_far: how much of it is done, or of what, such as "12 of 64 samples".
    """
    if _current is not None:
        _current.doing(stage, so_far)


def so_far(text: str) -> None:
    """Say how far the stage is that `doing` has named."""
    if _current is not None:
        _current.so_far(text)


def counted_loss(loss: LossFunction, notify: Callable[[str], None], *, is_alone: bool = True) -> LossFunction:
    """Return the loss of one pass, which reports with each micro-batch how many sequences it was called for.

    Args:
        loss: called for each micro-batch.
        notify: such as `so_far`.
        is_alone: this process sees all sequences, and not those of one rank.
    """
    done = 0

    def call(tokens: LossTokens[Any]) -> tuple[Any, LossMetrics]:
        nonlocal done
        done += tokens.num_sequences
        notify(f"{done} of {tokens.total_sequences} sequences" if is_alone else f"{done} sequences on this rank")
        return loss(tokens)

    return call


def current_status() -> Status | None:
    """Return the status of the command that this process runs."""
    return _current


@contextlib.contextmanager
def showing_status(terminal: int | None = None) -> Iterator[None]:
    """Show what `doing` says while the block lasts: in the terminal, or where there is none on standard error.

    Args:
        terminal: file descriptor of a terminal to use; None to look for one.
    """
    global _current
    status = Status(terminal, is_terminal=True) if terminal is not None else _find_place()
    if status is None:
        yield
        return
    over = threading.Event()
    ticking = threading.Thread(target=_tick, args=(status, over), name="status", daemon=True)
    with contextlib.ExitStack() as replaced:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            if _is_terminal(getattr(sys, name)) == status.is_terminal:
                replaced.enter_context(redirect(cast(TextIO, _Stream(getattr(sys, name), status))))
        _current = status
        ticking.start()
        try:
            yield
        finally:
            _current = None
            over.set()
            ticking.join(_END_S)
            with status.room():
                pass


def _tick(status: Status, over: threading.Event) -> None:
    while not over.wait(_TICK_S):
        status.tick()


def _find_place() -> Status | None:
    """Choose standard error if it is a terminal, else standard output if that is one, else standard error as a log."""
    for stream in (sys.stderr, sys.stdout):
        if _is_terminal(stream):
            return Status(stream.fileno(), is_terminal=True)
    try:
        return Status(sys.stderr.fileno(), is_terminal=False)
    except (AttributeError, OSError, ValueError):  # there is none, or one that only Python knows
        return None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
