"""The calls of one group, in order: who may make them, how they wait, and what they raise when a member fails."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from offbeat_mesh._board import Board
from offbeat_mesh._guard import check_guards
from offbeat_mesh._membership import Membership
from offbeat_mesh._news import Record, Standing, one_line
from offbeat_types import DeadlineError, GroupError, MismatchError, OffbeatError, PeerFailedError

SLICE: Final = timedelta(seconds=0.25)
"""A wait is cut into pieces of this length, so that it ends soon after a member fails or Ctrl-C is pressed."""

NEWS_S: Final = 4.0
"""How long a rank whose call broke waits for the news of who broke it: milliseconds unless rank 0 is stopped."""

GONE_S: Final = 0.5
"""A call that goes on so long after a member has died, failed or left will not end; a shorter one may, on what that
member sent before, and may know better what went wrong."""

LATER_S: Final = 10.0
"""How much later than ours torch's own timeout of an operation comes."""

ABORT_TAG: Final = 0x0FFBEA7
ABORT_WAIT: Final = timedelta(milliseconds=1)
"""Of the receive that is never answered; see `_abort`."""


class Calls:
    """Bookkeeping of one group on one rank.

    Args:
        membership: who is in the group.
        board: None for a group of one.
        process_groups: what its calls run on; broken off when a member fails.
        deadline_s: of a call that does not bring its own.
    """

    def __init__(
        self,
        membership: Membership,
        board: Board | None,
        process_groups: Sequence[dist.ProcessGroup],
        deadline_s: float,
    ) -> None:
        self.key, self.text = membership.key, membership.text
        self.ranks, self.rank, self.label = membership.ranks, membership.rank, membership.label
        self.board, self.deadline_s = board, deadline_s
        self._process_groups = tuple(process_groups)
        self._owner: threading.Thread | None = None
        self._owner_id = 0
        self._begun = 0  # calls of any kind
        self._entered = 0  # collectives: the same number on all members that are in step
        self._call = ""
        self._inside = False
        self._deadline_s = deadline_s
        self._failure: Record | None = None
        self._gone: Record | None = None
        self._news = threading.Event()
        self._failure_lock = threading.Lock()
        if board is not None:
            board.listen(self)

    @contextmanager
    def call(self, name: str, deadline_s: float | None = None, *, collective: bool = True) -> Iterator[None]:
        """One call of the group. An error inside it is posted, so that the other members raise too.

        Args:
            name: of the call.
            deadline_s: for each wait in it; None takes the group's.
            collective: all members come to it, so the axis rule holds and it counts towards the group's order.

        Raises:
            GuardError: a member of the group does not pass an open guard.
            GroupError: another thread uses the group, or a call of it is going on.
            PeerFailedError, DeadlineError: the group has failed before.
        """
        if collective:
            check_guards(name, self.text, self.ranks)  # raised on every rank that comes, so nobody waits for this one
        try:
            self._begin(name, deadline_s, collective)
            try:
                yield
            finally:
                self._inside = False
        except MismatchError as error:  # all members see it, so there is nobody to tell; but they are out of step
            self._end(Record.of(error, self.rank, self.key), abort=False)
            raise
        except BaseException as error:
            self.fail(error, name)
            raise

    def _begin(self, name: str, deadline_s: float | None, collective: bool) -> None:
        if threading.get_ident() != self._owner_id:
            self._take_over(name)
        self.check()
        if self._inside:
            raise GroupError(
                f"{name} over {self.text} was called inside {self._call} of the same group, where the other members "
                "do not come to it; call it before or after"
            )
        self._inside = True
        self._begun += 1
        self._entered += collective
        self._call = name
        self._deadline_s = self.deadline_s if deadline_s is None else deadline_s
        if self._gone is not None:
            self._end_later(self._gone)

    def _take_over(self, name: str) -> None:
        """The first thread that calls owns the group; another may have it when that one has ended."""
        if self._owner is not None and self._owner.is_alive():
            raise GroupError(
                f"{name} over {self.text} was called from the thread {threading.current_thread().name!r}, but the "
                f"group belongs to {self._owner.name!r}, and two threads have no common order on different ranks; "
                'give the second thread a channel of its own: mesh.group(..., channel="name")'
            )
        self._owner, self._owner_id = threading.current_thread(), threading.get_ident()

    def check(self) -> None:
        """Raise if the group has failed."""
        if self._failure is None and self._gone is not None and self._gone.kind != "left":
            self._end(self._gone)
        if self._failure is not None:
            raise self._error(self._failure)

    def fail(self, error: BaseException, where: str) -> None:
        """Make an error of this rank known to the other members, and end the group here too."""
        if self._failure is None and self.board is not None:
            self.board.post(Record.of(error, self.rank, self.key, f"{self.label(self.rank)} in {where} of {self.text}"))

    def wait(self, work: dist.Work | None, peer: int | None = None) -> None:
        """Wait for an operation on CPU tensors.

        Args:
            work: the operation; None if torch had nothing to do.
            peer: the other rank of a send or receive. Such a wait is not sliced: gloo takes an expired one for the
                group's end; `_abort` ends it when news of a failure arrive.

        Raises:
            DeadlineError: not all members came in time.
            PeerFailedError: a member failed, died or left.
        """
        end = time.monotonic() + self._deadline_s
        piece = SLICE if peer is None else timedelta(seconds=self._deadline_s)
        while work is not None:
            over = work.is_completed()  # before the wait: an error after it is then the operation's own
            try:
                work.wait(min(piece, timedelta(seconds=max(0.001, end - time.monotonic()))))
            except RuntimeError as error:
                if self._failure is not None:
                    raise self._error(self._failure) from error
                if time.monotonic() >= end:
                    raise self._late(peer) from error
                if over or peer is not None:
                    raise self._broken(error) from error
            else:
                return

    def backend_timeout(self) -> timedelta:
        """For torch's own timeout of an operation of the present call: after ours, so that ours speaks."""
        return timedelta(seconds=self._deadline_s + LATER_S)

    def _late(self, peer: int | None) -> OffbeatError:
        """The deadline has passed: say who did not come."""
        waiting = f"{self._call} over {self.text}" if peer is None else f"{self._call} in {self.text}"
        members = [rank for rank in self.ranks if rank != self.rank] if peer is None else [peer]
        standings = self.board.ask(self.key, members) if self.board is not None else {}
        if self._failure is not None:
            return self._error(self._failure)
        absent = [rank for rank in members if rank not in standings or standings[rank].entered < self._entered]
        if absent or peer is not None:
            on = "; ".join(self._whereabouts(rank, standings.get(rank)) for rank in absent or members)
            return DeadlineError(waiting, on, self._deadline_s, "all members must make the same calls in one order")
        calls = "; ".join(f"{self.label(rank)} is in {each.call}" for rank, each in standings.items())
        return DeadlineError(waiting, f"its own end, with all members there ({calls})", self._deadline_s)

    def _whereabouts(self, rank: int, standing: Standing | None) -> str:
        if standing is None:
            return f"{self.label(rank)} (does not answer: stopped, or its host is gone)"
        if not standing.call:
            return f"{self.label(rank)} (has not used the group yet)"
        return f"{self.label(rank)} ({'in' if standing.inside else 'last seen in'} {standing.call})"

    def _broken(self, error: RuntimeError) -> OffbeatError:
        """The operation failed under us: the news say who is to blame."""
        self._news.wait(NEWS_S)
        record = self._failure or self._gone
        return self._error(record) if record else PeerFailedError(f"a member of {self.text}", one_line(error))

    def _error(self, record: Record) -> OffbeatError:
        return record.error(self.label(record.rank))

    def standing(self) -> tuple[int, str, bool]:
        """Collectives entered, the newest call, and whether it is still going on (the board's thread asks)."""
        return self._entered, self._call, self._inside

    def hear(self, record: Record) -> None:
        """Take note of a record that concerns this group (the board's thread calls this)."""
        if record.rank not in self.ranks or record.group not in ("", self.key):
            return
        if record.group:
            self._end(record)
            return
        self._gone = self._gone or record
        self._news.set()
        if self._inside:
            self._end_later(record)

    def _end_later(self, record: Record) -> None:
        """A member is gone: what it sent before may still arrive, but a call that lasts will not end."""
        timer = threading.Timer(GONE_S, self._end_if_in, (record, self._begun))
        timer.daemon = True
        timer.start()

    def _end_if_in(self, record: Record, begun: int) -> None:
        if self._inside and self._begun == begun:
            self._end(record)

    def _end(self, record: Record, *, abort: bool = True) -> None:
        """No more calls: note why, and break off the one that waits."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = record
        self._news.set()
        for group in self._process_groups if abort else ():
            _abort(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Break off whatever a process group waits for, here and on the members that wait for this rank.

    Expected: ProcessGroup.abort() does it. Happens (torch 2.13): gloo's waits go on, and the group cannot be destroyed
    before they end. A receive whose wait expires makes gloo close all connections of the group, which ends every wait
    at once. Can go when abort() works for gloo.
    """
    for backend in {group._get_backend(device) for device in group._device_types}:
        with contextlib.suppress(RuntimeError):
            if backend.name() == "gloo":
                unanswered = backend.recv(  # type: ignore[attr-defined]  # untyped in torch
                    [torch.from_numpy(np.zeros(1))], int(group.rank() == 0), ABORT_TAG
                )
                unanswered.wait(ABORT_WAIT)
            else:
                backend.abort()
