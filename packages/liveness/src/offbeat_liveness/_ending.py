"""How a run is ended: whoever stands in no wait may finish what it does, and nobody goes before those have.

A process that is stuck in a wait cannot run anything any more, so it leaves with exit code 4. One that stands in no
wait may be writing a checkpoint: it gets a SIGTERM if the program handles that, and in any case a time of grace. The
stuck ones wait for it, because a launcher such as torchrun kills the others as soon as the first has gone.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import ask_all
from offbeat_liveness._process.head import Head
from offbeat_liveness._process.recorder.nccl_recorder import remove_folder
from offbeat_liveness._process.stacks import OwnThread

EXIT_CODE: Final = 4  # the same as of a wait that is past its deadline, in all of offbeat
STDERR: Final = 2
FLUSH_S: Final = 0.3
SAY_S: Final = 1.0
POLL_S: Final = 0.1
ASK_S: Final = 0.5
DUMPS_S: Final = 1.0
FAILED_S: Final = 2.0
HEIR_S: Final = 0.5
SEEN_S: Final = 1.0  # for a launcher to see that a process has ended
STUCK_S: Final = 0.3
"""A process that has stood in a wait of torch's for as long has nothing left to finish."""
ROUNDS_S: Final = 3.0
"""How much longer than the grace the others wait for the word of the process that leads."""


def say(text: str) -> None:
    """Write to the process's stderr, past Python's buffers and locks, which a stuck thread may hold.

    A pipe that nobody reads is given up after a while: the rest of what is to be done must not hang on it.
    """
    data = (text + "\n").encode(errors="replace")
    with contextlib.suppress(OSError):
        while data and select.select([], [STDERR], [], SAY_S)[1]:
            data = data[os.write(STDERR, data[: select.PIPE_BUF]) :]  # so much never blocks a pipe that takes any


class Ending:
    """Ends this process with the others, once.

    Args:
        peers: the other processes.
        dumps: what is still to be written.
        grace_s: how long one that stands in no wait may go on.
        read_head: what this process does now.
        is_going: whether a process that has failed is still on its way out: its exit code is to come first.

    Attributes:
        has_begun: this run is being ended.
    """

    def __init__(
        self,
        peers: Peers,
        dumps: DumpWriter,
        grace_s: float,
        read_head: Callable[[], Head],
        is_going: Callable[[], bool],
    ) -> None:
        self.has_begun = False
        self._peers, self._dumps, self._grace_s = peers, dumps, grace_s
        self._read_head, self._is_going = read_head, is_going
        self._is_finishing = self._is_leading = False
        self._is_given_up = self._has_somebody_gone = False
        self._may_leave = threading.Event()

    def begin(self, *, leads: bool, ends: bool) -> None:
        """Do what is to be done, in a thread of its own.

        Args:
            leads: tell the others when to leave.
            ends: this process ends too; with a policy that only reports it does not.
        """
        if self.has_begun or self._is_leading:
            return
        self.has_begun = self._is_finishing = ends
        self._is_leading = leads
        try:
            OwnThread(self._run, "end", [leads, ends]).start()
        except RuntimeError:  # the interpreter is on its way out already and starts no threads
            if ends:
                leave()

    def is_finishing(self) -> bool:
        """Whether this process still does something that it may finish."""
        return self._is_finishing

    def hear_leave(self) -> None:
        """The process that leads says that nobody has anything left to finish; of no account before the end."""
        if self.has_begun:
            self._may_leave.set()

    def give_up(self) -> None:
        """Leave this process alone, which ends by itself, its own way; if it led, the next one does."""
        self._is_given_up = True
        self._is_finishing = False
        self._may_leave.set()

    def wait_for_the_failed(self) -> None:
        """Let a process that has failed be gone first, and its launcher see that.

        torchrun looks ten times a second, and of two that have ended between two looks it takes the lower rank for the
        cause.
        """
        end_s = time.monotonic() + FAILED_S
        while time.monotonic() < end_s and self._is_somebody_going():
            time.sleep(POLL_S)
        if self._has_somebody_gone:
            time.sleep(SEEN_S)

    def _is_somebody_going(self) -> bool:
        is_going = self._is_going()
        self._has_somebody_gone = self._has_somebody_gone or is_going
        return is_going

    def _run(self, leads: bool, ends: bool) -> None:
        end_s = time.monotonic() + self._grace_s
        if ends:
            self._finish(end_s)
        self._is_finishing = False
        if leads:
            self._let_go(end_s)
        elif ends:
            self._wait_for_word(end_s)
        if ends:
            self.wait_for_the_failed()  # the one that leads may be the one that fails
        self._is_leading = False
        if ends and not self._is_given_up:
            self._dumps.flush(DUMPS_S)
            leave()

    def _let_go(self, end_s: float) -> None:
        """As the process that leads: tell everybody to leave, once nobody has anything left to finish."""
        while time.monotonic() < end_s and not self._is_given_up and self._is_somebody_busy():
            time.sleep(POLL_S)
        if not self._is_given_up:
            ask_all(self._peers.running(), {"ask": "leave"}, self._peers.secret, ASK_S)

    def _wait_for_word(self, end_s: float) -> None:
        """Wait until the process that leads says so; in its place, if it is gone."""
        while not self._may_leave.wait(HEIR_S) and time.monotonic() < end_s + ROUNDS_S:
            if self._is_first_of_those_left():
                self._let_go(end_s)
                return

    def _is_first_of_those_left(self) -> bool:
        me = self._peers.me()
        return me is not None and all(me.order < each.order for each in self._peers.running().values())

    def _finish(self, end_s: float) -> None:
        """Wait until this process stands in a wait of torch's, or its time is over."""
        if self._is_stuck():
            return
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        while time.monotonic() < end_s and not self._is_given_up and not self._is_stuck():
            time.sleep(POLL_S)

    def _is_stuck(self) -> bool:
        """Whether a thread has stood in a wait of torch's for a moment, so that this process will not get on."""
        waits = self._read_head().waits
        return any(wait.age_s >= STUCK_S and wait.kind not in ("outside", "declared") for wait in waits)

    def _is_somebody_busy(self) -> bool:
        """Whether a process may still finish something, or one that has failed is on its way out."""
        if self._is_somebody_going():
            return True
        replies = ask_all(self._peers.running(), {"ask": "finishing"}, self._peers.secret, ASK_S)
        return any(reply.get("finishing") for reply in replies.values())


def leave() -> None:
    """End this process with exit code 4, whatever its threads stand in; flush what was printed if that is possible."""
    flushing = OwnThread(_flush, "flush")
    with contextlib.suppress(RuntimeError):
        flushing.start()
        flushing.join(FLUSH_S)
    remove_folder()
    os._exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
