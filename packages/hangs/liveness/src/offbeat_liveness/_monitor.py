"""The monitor of one process: watches it, answers the other monitors, and leads when it is the lowest alive."""

import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from offbeat_liveness._announcer import Announcer, Termination, leave, say
from offbeat_liveness._diagnosis import Ending, find_verdict, how_it_ended, is_over
from offbeat_liveness._diagnosis.graph import LATE_S, WaitGraph
from offbeat_liveness._diagnosis.proofs import find_failure, is_secondary
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._exit_notices import MAX_CANDIDATES, MAX_LEFT, ExitNotices, Kind
from offbeat_liveness._network.job_store import Launcher
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import LOOPBACK, Address, Message, ask, ask_all
from offbeat_liveness._network.survey import Survey, head_answer, states_of_pids
from offbeat_liveness._process import flight_recorder, ledger
from offbeat_liveness._process.exceptions import CrashFile, ErrorNotes, ExitHook, ThreadErrors
from offbeat_liveness._process.outside.error_text import describe
from offbeat_liveness._process.process_groups import LeftGroups
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.reading import read_snapshot
from offbeat_liveness._process.snapshot import ProcessSnapshot, from_data, to_data
from offbeat_liveness._process.stacks import OwnThread, join_own_threads
from offbeat_liveness._settings import POLICY, STALL_AFTER, Policy, Settings

PING_S: Final = 0.8  # on a machine under load: a process that gets no answer leads, and two leaders report twice
SUSPENDED_S: Final = 3.0  # a monitor may be late by as much on a machine under load
MEETING_S: Final = 3.0  # for addresses to come, on a machine under load
CONFIRM_S: Final = 0.25
FRESH_S: Final = 0.05  # a snapshot this young is not read again
NUM_LOOKS: Final = 3
"""So many looks in a row must find the same proof: heads are not read at one instant."""
MAX_LOOKS: Final = 7
JOIN_THREADS_S: Final = 3.0
REPLACED: Final = ("killed", "crashed", "raised")
"""Ends of a process after which torchrun's agents, or the supervisor of policy "replace", form the group anew."""
JOIN_S: Final = 0.05
JOIN_AT_ONCE_S: Final = 2.0
FELLOWS_S: Final = 0.3  # for others that fail for the same reason
FAILURE_S: Final = 2.0
DUMP_S: Final = 5.0
DUMPS_S: Final = 1.0  # for a folder that answers late, on the way out


def is_elastic(environment: Mapping[str, str]) -> bool:
    """Return whether several agents of torchrun run this job: one that comes back restarts the others' ranks.

    A rank that ends by itself meanwhile would count as a failure, which may be one too many (max_restarts).
    """
    return "TORCHELASTIC_RUN_ID" in environment and int(environment.get("GROUP_WORLD_SIZE") or 1) > 1


def must_end(verdict: Verdict, policy: Policy) -> bool:
    """Return whether a policy ends a process now: on a proof, and on a suspicion once its timeout is over."""
    if policy == "report" or not verdict.may_end:
        return False
    is_due = verdict.due_in_s is not None and verdict.due_in_s <= -LATE_S
    if (policy == "replace" or is_elastic(os.environ)) and verdict.fate in REPLACED:
        return is_due
    return verdict.is_proof or is_due or policy == "strict"


def _as_ended(head: ProcessSnapshot, error: BaseException | None) -> ProcessSnapshot:
    if error is None:
        return dataclasses.replace(head, state="finished", waits=())
    text, stack = describe(error)
    return dataclasses.replace(head, state="failed", error=text, error_stack=stack, waits=())


class Monitor:
    """Watches this process; made by `watch`.

    Attributes:
        settings: as `watch` took them.
    """

    def __init__(self, settings: Settings, on_verdict: Callable[[Verdict], None] | None = None) -> None:
        self.settings = settings
        self._progress = ProgressTracker(max(SUSPENDED_S, settings.stall_after_s))
        self._peers = Peers(settings.directory, settings.name, self._answer)
        self._closed = threading.Event()
        self._ends = ExitNotices(self._peers, self._closed)
        self._survey = Survey(self._peers, settings.directory)
        self._dumps = DumpWriter(settings.directory)
        self._announcer = Announcer(settings, self._peers, self._dumps, self.head, self._complain, on_verdict)
        self._left_groups = LeftGroups(self._place_in_world, self._join_at_once, self._complain_of)
        self._error_notes = ErrorNotes()
        self._thread_errors = ThreadErrors(self._error_notes)
        self._ending = Termination(self._peers, self._dumps, settings.grace_s, self.head, self._ends.is_failed_running)
        self._alarm = threading.Event()
        self._looking = threading.Lock()  # the watch and a thread that reports a failure look one after the other
        self._reading = threading.Lock()
        self._last_head: ProcessSnapshot | None = None
        self._last_read_s = -1e9
        self._looked_s = self._next_head_s = -1e9
        self._open_since_s = math.inf  # since when no process waits, while the missing one has not come
        self._is_leading = self._is_hooked = False
        self._joining = threading.Lock()
        self._error: BaseException | None = None
        self._complaints: set[str] = set()
        self._launcher = Launcher()
        self._crash_file = CrashFile(settings.directory) if settings.directory else None
        self._hook_torch()
        self._exit_hook = ExitHook(self._report_end, self._error_notes)
        OwnThread(self._run).start()

    @property
    def verdict(self) -> Verdict | None:
        """The newest verdict on the run, None while nothing is stuck."""
        return self._announcer.verdict

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed.is_set()

    def head(self) -> ProcessSnapshot:
        """Return what this process does now; one thread reads, and all that ask meanwhile get the same snapshot."""
        asked_s = time.monotonic()
        with self._reading:
            if self._last_head is None or self._last_read_s < asked_s - FRESH_S:
                self._last_head, self._last_read_s = self._read_head(), time.monotonic()
            head = self._last_head
        return head if self._error is None else _as_ended(head, self._error)

    def _read_head(self) -> ProcessSnapshot:
        head = read_snapshot(
            self._progress,
            name=self.settings.name,
            world=self._peers.world,
            rank=self._peers.rank,
            world_size=self._peers.world_size,
            stall_after_s=self.settings.stall_after_s,
        )
        problems = tuple(each for each in (self._peers.problem, self._launcher.problem()) if each)
        notes = (*head.notes, *problems, *self._error_notes.lines_for(head.name))
        return dataclasses.replace(head, notes=notes, left_groups=self._left_groups.all())

    def ask(self) -> Verdict | None:
        """Look around now, without waiting for `stall_after_s`: any wait that has stood for a tenth of it counts.

        For a caller that has a reason of its own to think that the run is stuck, such as a test's deadline. Takes up
        to 2 s.

        Returns:
            A verdict, which is not announced; None if no process waits.
        """
        return find_verdict(self._look_around(max(0.1, self.settings.stall_after_s / 10)))

    def invite(self, host: str = LOOPBACK, *, policy: Policy | None = None) -> dict[str, str]:
        """Let a process that is started from here know this one and all that it knows, on whatever host.

        Args:
            host: an IP address of this machine that leads here from there; the monitor listens at it from now on.
            policy: of that process's monitor; its own business without it.

        Returns:
            Environment variables for that process, which calls `watch_if_invited`; they hold a secret. {} where
            this process cannot listen at `host`, which is logged once.
        """
        own = {STALL_AFTER: str(self.settings.stall_after_s), **({POLICY: policy} if policy else {})}
        try:
            return self._peers.invite(host).variables() | own
        except OSError as error:
            self._complain(f"{self._peers.own_name()}: no process can be invited to {host}: {error.strerror}")
            return {}

    def close(self) -> None:
        """Stop watching: the others receive nothing more from this process."""
        self._unhook()
        self._alarm.set()
        self._peers.close()
        if self._crash_file:
            self._crash_file.close()

    def forget(self) -> None:
        """Reset a forked child: the threads are gone, the sockets are the parent's, a lock may be held for ever."""
        self._closed = threading.Event()
        self._unhook()
        self._peers.forget()
        if self._crash_file:
            self._crash_file.forget()

    def _unhook(self) -> None:
        self._closed.set()
        for hook in (self._left_groups, self._exit_hook, self._thread_errors):
            hook.close()

    def _look_around(self, stall_after_s: float) -> WaitGraph:
        return self._survey.look(self.head(), self._ends.exited, self._ends.error_notices, stall_after_s=stall_after_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            is_settled = self._peers.is_settled()
            self._alarm.wait(self.settings.tick_s if is_settled else min(JOIN_S, self.settings.tick_s))
            if self._closed.is_set() or self._ending.has_begun:
                return
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001 - the watch must not end because one look failed
                if sys.is_finalizing():
                    return
                self._complain_of("a look", error)
                self._closed.wait(self.settings.tick_s)

    def _warn(self, text: str) -> None:
        """Log once, on one process of this host, what all of them see."""
        if text and os.environ.get("LOCAL_RANK", "0") == "0":
            self._complain(text)

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            say(f"offbeat liveness: {text}")

    def _complain_of(self, what: str, error: Exception) -> None:
        """Log once that something of the monitor's own has failed; the program continues."""
        self._complain(f"pid {os.getpid()}: {what} failed: {type(error).__name__}: {error}")

    def _tick(self) -> None:
        self._hook_torch()
        self._progress.look()
        self._warn(self._launcher.problem())
        self._warn(self._peers.intruders)  # here: whichever thread has met the others
        half_s = self.settings.stall_after_s / 2
        is_suspect = time.monotonic() >= self._next_head_s and self._is_suspect(half_s)
        waits_long = is_suspect or self._progress.still_s() >= half_s
        if self._peers.needs_to_join(waits_long=waits_long) and not self._joining.locked():
            OwnThread(self._join, "join", [waits_long]).start()
        if is_suspect and not self._alarm.is_set():
            self._examine()
        if self._alarm.is_set() or (self._is_leading and self._is_time_to_look()):
            self._lead()

    def _examine(self) -> None:
        """Keep the state on disk fresh while something may be stuck, and raise the alarm if that lasts too long."""
        head = self.head()
        self._dumps.write_head(head)
        oldest_s = max((wait.age_s for wait in head.waits), default=0.0)
        left_s = self.settings.stall_after_s - oldest_s
        if left_s <= 0:
            self._call_leader()
        self._next_head_s = time.monotonic() + (min(DUMP_S, left_s) if left_s > 0 else self._pause_s)

    @property
    def _pause_s(self) -> float:
        """Seconds between two looks of the leader at a stalled run."""
        return min(DUMP_S, max(0.5, self.settings.stall_after_s / 4))

    def _join(self, waits_long: bool) -> None:
        """Join in a thread of its own: the job's store may be slow or gone, and the watch must continue."""
        if self._joining.acquire(blocking=False):
            try:
                self._peers.keep_joined(waits_long=waits_long)
            except Exception as error:  # noqa: BLE001 - such as no descriptor to spare; the next look tries again
                self._complain_of("meeting the others", error)
            finally:
                self._joining.release()

    def _join_at_once(self) -> None:
        """Be known in the world before it is left: a moment later no process can be given this one's address."""
        if not self._closed.is_set() and self._joining.acquire(timeout=JOIN_AT_ONCE_S):
            try:
                if self._peers.needs_to_join(waits_long=False):
                    self._peers.keep_joined(waits_long=False)
            finally:
                self._joining.release()

    def _hook_torch(self) -> None:
        if not self._is_hooked and flight_recorder.is_loaded():
            ledger.watch_torch_calls()
            self._left_groups.watch()
            self._is_hooked = True

    def _is_suspect(self, half_s: float) -> bool:
        """Return whether anything may have waited for half of the allowed time.

        Cheap, and may err on the side of yes.
        """
        now_s = time.monotonic()
        if any(now_s - entry.since_s >= half_s for entry in ledger.LEDGER.open_waits()):
            return True
        if now_s - self._progress.status_since_s >= half_s and self._progress.has_pending():
            return True
        return self._progress.has_thread_in_torch(half_s) or self._progress.still_s() >= half_s

    def _call_leader(self) -> None:
        """Notify the lowest process that answers; that may be this one."""
        leader = self._find_leader()
        message = {"ask": "lead", **self._peers.introduce()}
        if leader is None or "ok" not in (ask(leader, message, self._peers.secret, PING_S) or {}):
            self._alarm.set()

    def _find_leader(self) -> Any:
        me = self._peers.me()
        others = {key: each for key, each in self._peers.running().items() if key not in self._ends.exited}
        lower = {key: each for key, each in others.items() if me is None or each.order < me.order}
        candidates = dict(list(lower.items())[:MAX_CANDIDATES])
        replies = ask_all(candidates, {"ask": "ping"}, self._peers.secret, PING_S) if candidates else {}
        return next((candidates[key] for key in candidates if key in replies), None)

    def _is_time_to_look(self) -> bool:
        return time.monotonic() - self._looked_s >= self._pause_s

    def _lead(self) -> None:
        self._alarm.clear()  # before the look: an alarm during it counts for the next tick
        is_meeting = self._peers.is_meeting(self.settings.stall_after_s + MEETING_S)
        if is_meeting or not self._is_time_to_look():
            return
        with self._looking:
            if self._ending.has_begun:  # while this thread waited for the lock
                return
            self._looked_s = time.monotonic()
            self._peers.fetch_newcomers()
            verdict, graph = self._find()
            if verdict is not None:
                self._open_since_s = math.inf
                self._notify(verdict)
            elif self.verdict is not None and is_over(graph, self.verdict):
                self._end_stall(how_it_ended(graph, self.verdict))
            self._is_leading = self.verdict is not None  # else a process that still waits calls again

    def _end_stall(self, ending: Ending) -> None:
        """Report how a stall has ended; where that is open, once an error that torch may have raised had its time."""
        now_s = time.monotonic()
        self._open_since_s = min(self._open_since_s, now_s)
        if not ending.is_open or now_s - self._open_since_s >= LATE_S:
            self._open_since_s = math.inf
            self._announcer.announce_end(ending)

    def _notify(self, verdict: Verdict) -> None:
        """Send a verdict to all; each process whose policy says so ends itself, and this one says when."""
        is_news = self.verdict is None or self.verdict.key != verdict.key
        if is_news and not verdict.is_proof and self._find_leader() is not None:
            self._call_leader()  # it was too slow to answer before, and is not now
            return
        ends = must_end(verdict, self.settings.policy)
        may_end_others = must_end(verdict, "abort")  # theirs may be another policy than this one's
        self._announcer.announce(verdict, ends_run=ends, is_due=may_end_others)
        if ends or may_end_others:
            self._ending.begin(leads=True, ends=ends and self._error is None)

    def _find(self) -> tuple[Verdict | None, WaitGraph]:
        """Return a verdict on which several looks in a row agree; looks that never do make a suspicion.

        Heads are read one by one, so a run that moves may look stuck. What a process and its descendants do is known
        from the second look on.
        """
        before: Verdict | None = None
        num_alike = 0
        for _ in range(MAX_LOOKS):
            found, graph = self._look()
            if found is None or (self.verdict is not None and found.key == self.verdict.key):
                return found, graph
            is_alike = before is not None and (before.certainty, before.kind) == (found.certainty, found.kind)
            num_alike = num_alike + 1 if is_alike else 1
            if num_alike == (NUM_LOOKS if must_end(found, "abort") else 2):
                return found, graph
            before = found
            time.sleep(CONFIRM_S)
        assert found is not None
        return dataclasses.replace(found, certainty="suspicion"), graph

    def _look(self) -> tuple[Verdict | None, WaitGraph]:
        graph = self._look_around(self.settings.stall_after_s)
        return find_verdict(graph), graph

    def _place_in_world(self) -> tuple[str, int] | None:
        rank = self._peers.rank
        return (self._peers.world, rank) if self._peers.world and rank is not None else None

    def _answer(self, message: Message) -> Message:
        try:
            return self._reply(message)
        except Exception as error:  # noqa: BLE001 - else the program's threading.excepthook is called with it
            self._complain_of(f"an answer to {message.get('ask')!r}", error)
            return {}

    def _reply(self, message: Message) -> Message:
        kind = message.get("ask")
        sender = from_data(Address, message["address"]) if "address" in message else None
        if sender and kind == "meet":
            return {"addresses": [to_data(each) for each in self._peers.greet(sender)]}
        if sender:
            self._peers.learn(sender)
        if kind == "head":
            return self._reply_with_head(in_brief=bool(message.get("brief")))
        if kind == "lead":
            self._alarm.set()
        elif kind == "pids":
            return states_of_pids(message["pids"])
        elif kind in ("exit", "error"):
            self._receive_end(message, kind)
        elif kind == "verdict":
            verdict = from_data(Verdict, message["verdict"])
            ends = must_end(verdict, self.settings.policy)
            self._announcer.receive(verdict, str(message["leader"]), ends_run=ends)
            if ends and self._error is None:  # a process that has failed ends by itself
                self._ending.begin(leads=False, ends=True)
        elif kind == "finishing":
            return {"finishing": self._ending.is_finishing()}
        elif kind == "leave":
            self._ending.receive_leave()
        elif kind == "moves":
            self._announcer.receive_movement()
        return {"ok": True, "world": self._peers.world}

    def _reply_with_head(self, *, in_brief: bool) -> dict[str, Any]:
        """Return this process's snapshot; a process that asks has found a stall, so it is written to disk as well."""
        head = self.head()
        self._dumps.write_head(head)
        return head_answer(
            dataclasses.replace(head, left=tuple(self._ends.exited.values())[-MAX_LEFT:]), in_brief=in_brief
        )

    def _report_end(self, error: BaseException | None, is_certain: bool) -> None:
        """Notify the lowest processes that answer how this one ends; a failure is looked at before it is gone."""
        if not is_certain:
            self._report_error(error)
            return
        if self._ending.has_begun:
            self._end_with_the_others(error)
            return
        if error is not None:
            if self._peers.needs_to_join(waits_long=False):
                self._join(waits_long=False)
            self._error = error
        head = _as_ended(self.head(), error)
        self._dumps.write_head(head)
        if error is not None:
            self._have_failure_looked_at(head, "exit")
        self._ends.notify(head, "exit")
        self._ending.give_up()
        self._stop()

    def _report_error(self, error: BaseException | None) -> None:
        """Report what this process may end with; a lost peer is looked for at once, as there may be no later look."""
        if self._ending.has_begun:
            if error is not None and is_secondary(describe(error)[0]) and not self._ending.is_finishing():
                self._end_with_the_others(error)
            return
        head = _as_ended(self.head(), error)
        if not is_secondary(head.error):
            self._ends.notify(head, "error")
            return
        self._error = error  # for the look alone: the program may go on
        try:
            self._have_failure_looked_at(head, "error")
            self._dumps.flush(DUMPS_S)
        finally:
            self._error = None

    def _end_with_the_others(self, error: BaseException | None) -> None:
        """End while the run is being ended: by itself in its own way, unless only the others' end has set it free."""
        if error is not None and is_secondary(describe(error)[0]):
            self._ending.wait_for_the_failed()
            self._dumps.flush(DUMPS_S)
            leave()
        self._ending.give_up()
        self._stop()

    def _stop(self) -> None:
        """End the watch before Python ends: a thread of it that was in torch's code then would abort the process."""
        self._closed.set()
        self._alarm.set()
        self._dumps.flush(DUMPS_S)
        self._peers.close()
        if self._crash_file:
            self._crash_file.close()
        join_own_threads(JOIN_THREADS_S)

    def _have_failure_looked_at(self, head: ProcessSnapshot, kind: Kind) -> None:
        leader = self._find_leader()
        if leader is None:
            self._look_at_failure()
        else:
            message = {"ask": kind, "head": to_data(head), "look": True}
            ask(leader, message, self._peers.secret, FAILURE_S)

    def _receive_end(self, message: Message, kind: Kind) -> None:
        self._ends.receive(from_data(ProcessSnapshot, message["head"]), kind, self._look_at_failure)
        if message.get("look"):
            self._look_at_failure()

    def _look_at_failure(self) -> None:
        """Report a failure at once if others depend on the process: the stall that follows would be reported later."""
        time.sleep(FELLOWS_S)
        with self._looking:
            is_explained = self.verdict is not None and self.verdict.is_proof
            if not is_explained and not self._ending.has_begun:
                verdict = find_failure(self._look_around(self.settings.stall_after_s))
                if verdict is not None:
                    self._notify(verdict)
