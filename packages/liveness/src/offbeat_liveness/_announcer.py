"""What becomes of a verdict: it is told once, here and to all others, written down, and under `abort` carried out."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Final

from offbeat_liveness import _dumps, _policy
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Message, ask_all
from offbeat_liveness._process.goodbye import describe
from offbeat_liveness._process.head import Head, from_data
from offbeat_liveness._settings import Settings

TELL_S: Final = 0.5
LEAVE_S: Final = 0.3  # for the answers to go out
STRAGGLER_REPEAT: Final = 5


class Announcer:
    """Tells the verdicts of a run in this process; the leader's tells them to the other processes too.

    Args:
        settings: of the monitor.
        peers: whom to tell.
        read_head: what this process does now.
        complain: says a thing once.
        on_verdict: the program's.

    Attributes:
        verdict: the newest on the run, None while nothing is stuck.
        is_aborting: this process is about to leave.
    """

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        read_head: Callable[[], Head],
        complain: Callable[[str], None],
        on_verdict: Callable[[Verdict], None] | None,
    ) -> None:
        self.verdict: Verdict | None = None
        self.is_aborting = False
        self._settings, self._peers = settings, peers
        self._read_head, self._complain, self._on_verdict = read_head, complain, on_verdict
        self._told_s = -1e9

    def announce(self, verdict: Verdict) -> None:
        """As the leader: tell everybody, unless it is no news."""
        if self.verdict is not None and not self._is_news(verdict, self.verdict):
            return
        directory = self._settings.directory
        verdict = dataclasses.replace(verdict, directory=str(directory or ""))
        self.verdict, self._told_s = verdict, time.monotonic()
        is_fatal = self._settings.policy == "abort" and verdict.is_fatal
        if directory is not None:
            _dumps.write_verdict(directory, verdict)
            _dumps.write_head(directory, self._read_head())
        _policy.say(verdict.text)
        self._tell_program(verdict)
        message = {"ask": "verdict", "verdict": verdict.to_data(), "leader": self._peers.own_name(), "abort": is_fatal}
        ask_all(self._peers.running(), message, self._peers.secret, TELL_S)
        if is_fatal:
            self._leave_soon()

    def announce_movement(self, stuck: Verdict) -> None:
        """As the leader: tell everybody that the run moves again."""
        passed_s = time.time() - stuck.time_s + stuck.stalled_s
        _policy.say(f"offbeat liveness: the run moves again, {passed_s:.0f} s after it stopped ({stuck.kind})")
        self.verdict = None
        ask_all(self._peers.running(), {"ask": "moves"}, self._peers.secret, TELL_S)

    def hear(self, message: Message) -> None:
        """The leader's announcement."""
        verdict = from_data(Verdict, message["verdict"])
        self.verdict, self._told_s = verdict, time.monotonic()
        if self._settings.directory is not None:
            _dumps.write_head(self._settings.directory, self._read_head())
        _policy.say(_policy.pointer(verdict, self._peers.own_name(), message["leader"]))
        self._tell_program(verdict)
        if message["abort"]:
            self._leave_soon()

    def hear_movement(self) -> None:
        """The run moves again."""
        self.verdict = None

    def _is_news(self, verdict: Verdict, told: Verdict) -> bool:
        """A verdict is told once; stragglers change often and are told seldom."""
        if verdict.key == told.key:
            return False
        quiet_s = STRAGGLER_REPEAT * self._settings.stall_after_s
        both_slow = not verdict.is_fatal and not told.is_fatal
        return not both_slow or time.monotonic() - self._told_s >= quiet_s

    def _tell_program(self, verdict: Verdict) -> None:
        """Call what `watch` was given; an error in it must not keep the policy from being carried out."""
        try:
            if self._on_verdict:
                self._on_verdict(verdict)
        except Exception as error:  # noqa: BLE001 - the boundary to the program's code
            self._complain(f"{self._peers.own_name()}: on_verdict failed: {describe(error)[0]}")

    def _leave_soon(self) -> None:
        """All processes leave at about the same moment; whoever is set free by the others' end leaves the same way."""
        self.is_aborting = True
        try:
            threading.Timer(LEAVE_S, _policy.leave).start()
        except RuntimeError:  # the interpreter is on its way out already and starts no threads
            _policy.leave()
