"""Consequences of a verdict: it is reported here, sent to all others, written to disk, and may end the run.

A process that is stuck in a wait cannot run anything any more, so it exits with code 4. One that is in no wait may be
writing a checkpoint: it gets a SIGTERM if the program handles that, and in any case a grace period. The stuck ones
wait for it, because a launcher such as torchrun kills the others as soon as the first has exited.
"""

import contextlib
import dataclasses
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from offbeat_liveness._diagnosis.endings import Ending
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._network.address_book import Key
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Address, Message, ask_all
from offbeat_liveness._printable import printable
from offbeat_liveness._process.nccl_recorder import remove_folder
from offbeat_liveness._process.outside.error_text import describe
from offbeat_liveness._process.snapshot import ProcessSnapshot
from offbeat_liveness._process.stacks import OwnThread
from offbeat_liveness._settings import Settings

NOTIFY_S: Final = 0.5
NUM_TRIES: Final = 3
LONGER: Final = 2.0
"""A pause that has come before is reported again when it lasts so many times as long as it ever did."""
QUIET_STALLS: Final = 10.0
"""A suspicion that changes while the run is still stalled is reported again after so many times `stall_after_s`."""
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
"""A process that has been in a wait of torch's for this long has nothing left to finish."""
ROUNDS_S: Final = 3.0
"""Time beyond the grace period that the others wait for the leader's message."""


class Announcer:
    """Reporter of a run's verdicts in this process; the leader's sends them to the other processes too.

    Attributes:
        verdict: the newest on the run, None while nothing is stuck.
    """

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        dumps: DumpWriter,
        read_head: Callable[[], ProcessSnapshot],
        complain: Callable[[str], None],
        on_verdict: Callable[[Verdict], None] | None,
    ) -> None:
        self.verdict: Verdict | None = None
        self._verdict_at_s = 0.0  # monotonic: the wall clock may be set meanwhile
        self._settings, self._peers, self._dumps = settings, peers, dumps
        self._read_head, self._complain, self._on_verdict = read_head, complain, on_verdict
        self._longest_s: dict[tuple[object, ...], float] = {}
        self._spoken: Verdict | None = None
        self._written: Verdict | None = None
        self._spoke_s = -1e9
        self._is_speaker = False  # the process that reported a stall reports its end
        self._announced: tuple[object, bool] | None = None  # what was sent to all, and whether it ends the run
        self._unanswered: dict[Key, Address] = {}  # the processes that have not answered it
        self._quiet_s = QUIET_STALLS * settings.stall_after_s

    def announce(self, verdict: Verdict, *, ends_run: bool, is_due: bool) -> None:
        """Send a verdict to all as the leader, unless it is no news; a recurring pause is reported once.

        Args:
            verdict: of this look.
            ends_run: this process's policy ends it now.
            is_due: another process's policy may: the others are notified of it, whatever the policy here.
        """
        is_known = self.verdict is not None and self.verdict.key == verdict.key
        verdict = dataclasses.replace(verdict, directory=str(self._settings.directory or ""))
        if ends_run and not is_due:
            verdict = dataclasses.replace(verdict, due_in_s=0.0, due_to=f"as the policy is {self._settings.policy}")
        self.verdict, self._verdict_at_s = verdict, time.monotonic()
        if ends_run or self._is_news(verdict, is_known=is_known):
            say(verdict.text)
            self._spoken, self._spoke_s, self._is_speaker = verdict, time.monotonic(), True
        message = {"ask": "verdict", "verdict": verdict.to_data(), "leader": self._peers.own_name()}
        ends = ends_run or is_due
        if self._announced in ((verdict.key, True), (verdict.key, ends)):
            if ends and self._unanswered:
                self._send_to_others(message, num_tries=1)
            return
        self._announced, self._unanswered = (verdict.key, ends), self._peers.running()
        self._send_to_others(message, num_tries=NUM_TRIES if ends else 1)
        self._notify_program(verdict)
        self._written = verdict
        self._dumps.write_verdict(verdict)
        self._dumps.write_head(self._read_head())

    def _send_to_others(self, message: Message, *, num_tries: int) -> None:
        """Send a message, again to those too busy to answer: else they would miss the end of the run."""
        for _ in range(num_tries):
            answered = ask_all(self._unanswered, message, self._peers.secret, NOTIFY_S)
            self._unanswered = {key: each for key, each in self._unanswered.items() if key not in answered}
            if not self._unanswered:
                return

    def announce_end(self, ending: Ending) -> None:
        """Report as the leader how a stall has ended, where the suspicion was reported."""
        spoken = self._spoken if self._is_speaker else None
        stuck, passed_s = self._note_end()
        if stuck is None:
            return
        if spoken is not None and not spoken.is_proof:
            say(f"offbeat liveness: {ending.what} after {passed_s:.0f} s ({spoken.kind}){ending.why}")
        if self._written is not None and not ending.has_failed:
            self._dumps.write_verdict(dataclasses.replace(self._written, cleared_after_s=passed_s))
        ask_all(self._peers.running(), {"ask": "moves"}, self._peers.secret, NOTIFY_S)

    def receive(self, verdict: Verdict, leader: str, *, ends_run: bool) -> None:
        """Take in the leader's verdict; if this process leads next, it knows what was reported."""
        self.verdict = self._spoken = self._written = verdict
        self._verdict_at_s = time.monotonic()
        self._spoke_s, self._is_speaker = time.monotonic(), False
        if self._announced == (verdict.key, ends_run):  # a process that was slow to answer gets it again
            return
        self._announced, self._unanswered = (verdict.key, ends_run), {}
        if verdict.is_proof or ends_run:
            say(f"offbeat liveness: {self._peers.own_name()}: {verdict.kind}, reported in full by {leader}")
        self._notify_program(verdict)
        self._dumps.write_head(self._read_head())

    def receive_movement(self) -> None:
        """Note that the run moves again, as the leader says."""
        self._note_end()

    def _note_end(self) -> tuple[Verdict | None, float]:
        stuck, self.verdict, self._spoken, self._is_speaker = self.verdict, None, None, False
        self._announced, self._unanswered = None, {}
        self._quiet_s = QUIET_STALLS * self._settings.stall_after_s
        if stuck is None:
            return None, 0.0
        passed_s = time.monotonic() - self._verdict_at_s + stuck.stalled_s
        self._longest_s[stuck.topic] = max(self._longest_s.get(stuck.topic, 0.0), passed_s)
        return stuck, passed_s

    def _is_news(self, verdict: Verdict, *, is_known: bool) -> bool:
        if verdict.is_proof:
            return not is_known
        if self._spoken is None:
            before_s = self._longest_s.get(verdict.topic)
            return before_s is None or verdict.stalled_s >= LONGER * before_s
        is_known = is_known or self._spoken.key == verdict.key  # it was reported, whatever was seen since
        if is_known or not verdict.may_end or time.monotonic() - self._spoke_s < self._quiet_s:
            return False  # that a missing rank moves now is not reported either
        self._quiet_s *= LONGER
        return True

    def _notify_program(self, verdict: Verdict) -> None:
        """Call the `on_verdict` given to `watch`; an error in it must not keep the policy from being carried out."""
        try:
            if self._on_verdict:
                self._on_verdict(verdict)
        except Exception as error:  # noqa: BLE001 - the boundary to the program's code
            self._complain(f"{self._peers.own_name()}: on_verdict failed: {describe(error)[0]}")


def say(text: str) -> None:
    """Write to the process's stderr, past Python's buffers and locks, which a stuck thread may hold.

    A pipe that no process reads is given up after a while: the rest of what is to be done must not hang on it.
    """
    data = (printable(text) + "\n").encode(errors="replace")
    with contextlib.suppress(OSError):
        while data and select.select([], [STDERR], [], SAY_S)[1]:
            data = data[os.write(STDERR, data[: select.PIPE_BUF]) :]  # never blocks on a pipe with room


class Termination:
    """End of this process together with the others, which happens once.

    Args:
        grace_s: how long a process that is in no wait may keep running.
        is_going: whether a process that has failed is still on its way out: its exit code is to come first.

    Attributes:
        has_begun: this run is being ended.
    """

    def __init__(
        self,
        peers: Peers,
        dumps: DumpWriter,
        grace_s: float,
        read_head: Callable[[], ProcessSnapshot],
        is_going: Callable[[], bool],
    ) -> None:
        self.has_begun = False
        self._peers, self._dumps, self._grace_s = peers, dumps, grace_s
        self._read_head, self._is_going = read_head, is_going
        self._is_finishing = self._is_leading = False
        self._is_given_up = self._has_seen_exit = False
        self._may_leave = threading.Event()

    def begin(self, *, leads: bool, ends: bool) -> None:
        """Start to end this process, in a thread of its own.

        Args:
            leads: notify the others when to exit.
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
        return self._is_finishing

    def receive_leave(self) -> None:
        """Note that no process has anything left to finish, as the leader says; no effect before the end has begun."""
        if self.has_begun:
            self._may_leave.set()

    def give_up(self) -> None:
        """Leave this process alone, since it ends by itself; if it led, the next one does."""
        self._is_given_up = True
        self._is_finishing = False
        self._may_leave.set()

    def wait_for_the_failed(self) -> None:
        """Wait until a process that has failed is gone, and its launcher has seen that.

        torchrun polls ten times a second, and if two ranks end between two polls it takes the lower one for the cause.
        """
        end_s = time.monotonic() + FAILED_S
        while time.monotonic() < end_s and self._is_failed_running():
            time.sleep(POLL_S)
        if self._has_seen_exit:
            time.sleep(SEEN_S)

    def _is_failed_running(self) -> bool:
        is_going = self._is_going()
        self._has_seen_exit = self._has_seen_exit or is_going
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
        """Send `leave` to all as the leader, once no process has anything left to finish."""
        while time.monotonic() < end_s and not self._is_given_up and self._is_any_process_busy():
            time.sleep(POLL_S)
        if not self._is_given_up:
            ask_all(self._peers.running(), {"ask": "leave"}, self._peers.secret, ASK_S)

    def _wait_for_word(self, end_s: float) -> None:
        """Wait until the leader sends `leave`, or lead in its place if it is gone."""
        while not self._may_leave.wait(HEIR_S) and time.monotonic() < end_s + ROUNDS_S:
            if self._is_first_of_those_left():
                self._let_go(end_s)
                return

    def _is_first_of_those_left(self) -> bool:
        me = self._peers.me()
        return me is not None and all(me.order < each.order for each in self._peers.running().values())

    def _finish(self, end_s: float) -> None:
        if self._is_stuck():
            return
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        while time.monotonic() < end_s and not self._is_given_up and not self._is_stuck():
            time.sleep(POLL_S)

    def _is_stuck(self) -> bool:
        """Return whether a thread has been in a wait of torch's for a moment, so that this process cannot continue."""
        waits = self._read_head().waits
        return any(wait.age_s >= STUCK_S and wait.kind not in ("outside", "declared") for wait in waits)

    def _is_any_process_busy(self) -> bool:
        """Return whether a process may still finish something, or one that has failed is on its way out."""
        if self._is_failed_running():
            return True
        replies = ask_all(self._peers.running(), {"ask": "finishing"}, self._peers.secret, ASK_S)
        return any(reply.get("finishing") for reply in replies.values())


def leave() -> None:
    """End this process with exit code 4, whatever its threads wait for; flush what was printed if that is possible."""
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
