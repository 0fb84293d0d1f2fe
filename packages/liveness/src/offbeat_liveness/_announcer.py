"""What becomes of a verdict: it is told here and to all others, and written down."""

import dataclasses
import time
from collections.abc import Callable
from typing import Final

from offbeat_liveness._diagnosis.verdict import Verdict, join_names
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._ending import say
from offbeat_liveness._network.peers import Key, Peers
from offbeat_liveness._network.side_channel import Address, Message, ask_all
from offbeat_liveness._process.goodbye import describe
from offbeat_liveness._process.head import Head
from offbeat_liveness._settings import Settings

TELL_S: Final = 0.5
NUM_TRIES: Final = 3
LONGER: Final = 2.0
"""A pause that has come before is told again when it lasts so many times as long as it ever did."""
QUIET_STALLS: Final = 10.0
"""A suspicion that changes while the run still stands is told again after so many times `stall_after_s`."""


class Announcer:
    """Tells the verdicts of a run in this process; the leader's tells them to the other processes too.

    Args:
        settings: of the monitor.
        peers: whom to tell.
        dumps: where it is written down.
        read_head: what this process does now.
        complain: says a thing once.
        on_verdict: the program's.

    Attributes:
        verdict: the newest on the run, None while nothing is stuck.
    """

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        dumps: DumpWriter,
        read_head: Callable[[], Head],
        complain: Callable[[str], None],
        on_verdict: Callable[[Verdict], None] | None,
    ) -> None:
        self.verdict: Verdict | None = None
        self._settings, self._peers, self._dumps = settings, peers, dumps
        self._read_head, self._complain, self._on_verdict = read_head, complain, on_verdict
        self._longest_s: dict[tuple[object, ...], float] = {}
        self._spoken: Verdict | None = None
        self._written: Verdict | None = None
        self._spoke_s = -1e9
        self._is_speaker = False  # whoever told a stall tells its end
        self._told: tuple[object, bool] | None = None  # what all were told of, and whether it ends the run
        self._unheard: dict[Key, Address] = {}  # who has not answered to it
        self._quiet_s = QUIET_STALLS * settings.stall_after_s

    def announce(self, verdict: Verdict, *, ends_run: bool, is_due: bool) -> None:
        """As the leader: tell everybody, unless it is no news; a pause that comes again and again is told once.

        Args:
            verdict: of this look.
            ends_run: this process's policy ends it now.
            is_due: somebody's policy may: the others are told so, whatever the policy here.
        """
        is_known = self.verdict is not None and self.verdict.key == verdict.key
        verdict = dataclasses.replace(verdict, directory=str(self._settings.directory or ""))
        if ends_run and not is_due:
            verdict = dataclasses.replace(verdict, due_in_s=0.0, due_to=f"as the policy is {self._settings.policy}")
        self.verdict = verdict
        if ends_run or self._is_news(verdict, is_known=is_known):
            say(verdict.text)
            self._spoken, self._spoke_s, self._is_speaker = verdict, time.monotonic(), True
        message = {"ask": "verdict", "verdict": verdict.to_data(), "leader": self._peers.own_name()}
        ends = ends_run or is_due
        if self._told in ((verdict.key, True), (verdict.key, ends)):
            if ends and self._unheard:
                self._tell_others(message, num_tries=1)
            return
        self._told, self._unheard = (verdict.key, ends), self._peers.running()
        self._tell_others(message, num_tries=NUM_TRIES if ends else 1)
        self._tell_program(verdict)
        self._written = verdict
        self._dumps.write_verdict(verdict)
        self._dumps.write_head(self._read_head())

    def _tell_others(self, message: Message, *, num_tries: int) -> None:
        """Whoever does not hear that a run is ended would stay behind: those that were busy are told again."""
        for _ in range(num_tries):
            heard = ask_all(self._unheard, message, self._peers.secret, TELL_S)
            self._unheard = {key: each for key, each in self._unheard.items() if key not in heard}
            if not self._unheard:
                return

    def announce_movement(self) -> None:
        """As the leader: the run moves again; told where the suspicion was told."""
        spoken = self._spoken if self._is_speaker else None
        stuck, passed_s = self._note_end()
        if stuck is None:
            return
        if spoken is not None and not spoken.is_proof:
            who = f"{join_names(spoken.missing)} came" if spoken.missing else "the call ended"
            say(f"offbeat liveness: it moves again: {who} after {passed_s:.0f} s ({spoken.kind})")
        if self._written is not None:
            self._dumps.write_verdict(dataclasses.replace(self._written, cleared_after_s=passed_s))
        ask_all(self._peers.running(), {"ask": "moves"}, self._peers.secret, TELL_S)

    def hear(self, verdict: Verdict, leader: str, *, ends_run: bool) -> None:
        """The leader's announcement; should this process lead next, what was told is told."""
        self.verdict = self._spoken = self._written = verdict
        self._spoke_s, self._is_speaker = time.monotonic(), False
        if self._told == (verdict.key, ends_run):  # whoever was slow to answer is told again
            return
        self._told, self._unheard = (verdict.key, ends_run), {}
        if verdict.is_proof or ends_run:
            say(f"offbeat liveness: {self._peers.own_name()}: {verdict.kind}, told in full by {leader}")
        self._tell_program(verdict)
        self._dumps.write_head(self._read_head())

    def hear_movement(self) -> None:
        """The leader says that the run moves again."""
        self._note_end()

    def _note_end(self) -> tuple[Verdict | None, float]:
        """The stall is over: what it was, and how long it lasted."""
        stuck, self.verdict, self._spoken, self._is_speaker = self.verdict, None, None, False
        self._told, self._unheard = None, {}
        self._quiet_s = QUIET_STALLS * self._settings.stall_after_s
        if stuck is None:
            return None, 0.0
        passed_s = time.time() - stuck.time_s + stuck.stalled_s
        self._longest_s[stuck.topic] = max(self._longest_s.get(stuck.topic, 0.0), passed_s)
        return stuck, passed_s

    def _is_news(self, verdict: Verdict, *, is_known: bool) -> bool:
        """Whether a verdict is worth a reader's time."""
        if verdict.is_proof:
            return not is_known
        if self._spoken is None:
            before_s = self._longest_s.get(verdict.topic)
            return before_s is None or verdict.stalled_s >= LONGER * before_s
        if is_known or not verdict.may_end or time.monotonic() - self._spoke_s < self._quiet_s:
            return False  # that whoever is missing moves now asks nothing of a reader either
        self._quiet_s *= LONGER
        return True

    def _tell_program(self, verdict: Verdict) -> None:
        """Call what `watch` was given; an error in it must not keep the policy from being carried out."""
        try:
            if self._on_verdict:
                self._on_verdict(verdict)
        except Exception as error:  # noqa: BLE001 - the boundary to the program's code
            self._complain(f"{self._peers.own_name()}: on_verdict failed: {describe(error)[0]}")
