"""The test's process: forks the ranks, reads their reports, always ends all of them, and gives the verdict."""

import importlib
import os
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from offbeat_testing._processes import STACKS_SIGNAL, wait_for_leaving_threads
from offbeat_testing._ranks._child import EXPLAIN, JUDGE, LEAVE, Rank, RankPipes
from offbeat_testing._ranks._report import (
    RankReport,
    RankState,
    RankVerdict,
    first_difference,
    from_line,
    waiting_for_the_finished,
)
from offbeat_testing._ranks._request import PRELOAD_INI, RanksRequest

PEER_IS_GONE: Final = ("gloo/transport/", "PeerFailedError: ")
PLACE: Final = re.compile(r"\S+:\d+: in ")


@dataclass(kw_only=True)
class RankEnd:
    """Knowledge of the test's process about one rank's end."""

    rank: int
    process: int
    folder: Path
    report: RankReport | None = None
    state: RankState | None = None
    status: int | None = None
    was_killed: bool = False

    @property
    def is_there(self) -> bool:
        return self.status is None

    @property
    def is_over(self) -> bool:
        return self.report is not None or not self.is_there

    @property
    def died(self) -> bool:
        return self.report is None and self.status is not None and not self.was_killed

    @property
    def has_failed(self) -> bool:
        return self.died or (self.report is not None and self.report.outcome in ("failed", "expected"))

    @property
    def last_state(self) -> RankState | None:
        return self.report.state if self.report else self.state

    def output(self, what: str) -> str:
        """Return what the rank wrote to `stdout`, `stderr` or `stacks`."""
        path = self.folder / f"rank-{self.rank}.{what}"
        return path.read_text(errors="replace") if path.is_file() else ""

    @property
    def is_stopped(self) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False


def give_verdict(request: RanksRequest, ends: list[RankEnd], *, why_ended: str) -> None:
    """Return if every rank passed; else skip, xfail or fail the test."""
    outcomes = {end.report.outcome for end in ends if end.report}
    if any(end.report is None for end in ends) or outcomes & {"failed", "expected"}:
        first = _by_time(ends)[0]
        if first.report and first.report.outcome == "expected" and not any(_failed_otherwise(end) for end in ends):
            pytest.xfail(f"rank {first.rank}: {first.report.text.strip().splitlines()[-1]}")
        pytest.fail(_failure_text(request, ends, why_ended), pytrace=False)
    if outcomes == {"skipped"}:
        pytest.skip(next(end.report.text for end in ends if end.report))
    if "skipped" in outcomes:
        skipped = [end.rank for end in ends if end.report and end.report.outcome == "skipped"]
        pytest.fail(f"ranks {skipped} skipped the test and the others ran it: skip on all ranks or on none", False)
    difference = first_difference(_states(ends)) if request.compare else None
    if difference:
        pytest.fail(f"every rank passed, but they did not call the same collectives\n{difference}", False)


def _states(ends: list[RankEnd]) -> dict[int, RankState]:
    return {end.rank: end.last_state for end in ends if end.last_state}


def _by_time(ends: list[RankEnd]) -> list[RankEnd]:
    """First causes first: a process that died reports no time, but nothing else explains it."""
    failed = [end for end in ends if end.has_failed]
    failed.sort(key=lambda end: (not end.died, end.report.at_s if end.report else 0.0))
    return failed + [end for end in ends if end.was_killed] + [end for end in ends if not end.is_over]


def _failure_text(request: RanksRequest, ends: list[RankEnd], why_ended: str) -> str:
    failed = [end for end in _by_time(ends) if end.has_failed]
    stuck = [end for end in ends if end.report is None and not end.died]
    passed = [end.rank for end in ends if end.report and end.report.outcome == "passed"]
    parts = [why_ended] if why_ended else []
    if failed:
        parts.append(f"rank {failed[0].rank} of {request.size} failed{' first' if len(failed) > 1 else ''}")
        parts.append(_end_text(failed[0]))
    if passed:
        parts.append(f"ranks {passed} came to the end of the test")
    difference = first_difference(_states(ends))
    if difference:
        parts.append(str(difference))
    parts += [_later_text(end) for end in failed[1:]]
    for end in stuck:
        stacks = end.state.stacks if end.state else "(it gave no stacks)"
        parts.append(f"rank {end.rank} was still running and was killed; it was here:\n{stacks}")
    return "\n\n".join(part.rstrip() for part in parts)


def _end_text(end: RankEnd) -> str:
    if end.report:
        return end.report.text
    assert end.status is not None
    if end.status < 0:
        how = f"was killed by {signal.Signals(-end.status).name}"
    else:
        how = f"left with exit code {end.status} before the end of the test"
    return f"its process {how}\n{end.output('stacks')}"


def _failed_otherwise(end: RankEnd) -> bool:
    """Return whether a rank failed in a way that neither the test expects nor a peer's end explains."""
    if not end.has_failed or (end.report and end.report.outcome == "expected"):
        return False
    return not _lost_a_peer(_end_text(end))


def _lost_a_peer(text: str) -> bool:
    return any(sign in text for sign in PEER_IS_GONE)


def _later_text(end: RankEnd) -> str:
    """Return one line where a peer's end explains it, else the whole of it."""
    text = _end_text(end)
    if not _lost_a_peer(text):
        return f"after that, rank {end.rank} failed\n{text}"
    places = [line.strip() for line in text.splitlines() if PLACE.match(line)]
    return f"after that, rank {end.rank} lost its connection to a peer, at {places[0] if places else 'start'}"


GRACE_S: Final = 5.0  # for the others to notice that one rank has failed
VERDICT_S: Final = 4.0  # for the liveness monitor to look around
LOOK_S: Final = 1.0  # how often ranks are asked where they are while others have come to the end
EXPLAIN_S: Final = 2.0  # for a stuck rank to say where it is


def run_on_ranks(item: pytest.Function, request: RanksRequest) -> None:
    """Run the body of `item` on its ranks; skip, fail or return as they did together."""
    if dist.is_initialized():
        pytest.fail("the test's own process has joined a torch.distributed world: destroy it before ranks fork", False)
    for module in item.config.getini(PRELOAD_INI):
        importlib.import_module(module)
    if request.axes:
        importlib.import_module("offbeat_mesh._mesh")
    with _folder() as folder:
        processes = RankProcesses(item, request, folder)
        try:
            processes.start()
            processes.watch()
        finally:
            processes.end()
        for end in processes.ends:
            for stream in ("stdout", "stderr"):
                if output := end.output(stream):
                    item.add_report_section("call", f"rank {end.rank} {stream}", output)
        give_verdict(request, processes.ends, why_ended=processes.why_ended)


class RankProcesses:
    """The processes of one test."""

    def __init__(self, item: pytest.Function, request: RanksRequest, folder: Path) -> None:
        self._item, self._request, self._folder = item, request, folder
        self._selector = selectors.DefaultSelector()
        self._orders: dict[int, int] = {}
        self._buffers: dict[int, bytes] = {}
        self._store: object = None
        self._deadline_s = time.monotonic() + request.deadline_s
        self._first_failure_s = inf
        self._next_look_s = time.monotonic() + LOOK_S
        self.ends: list[RankEnd] = []
        self._verdict: RankVerdict | None = None
        self.why_ended = ""

    def start(self) -> None:
        """Fork every rank; then open the store that ranks meet at which join by themselves.

        Its thread must not be there when they fork. Ranks that are joined for the test meet at a file: a TCPStore asks
        the DNS for the name of each address that connects, and 5 s are gone when an answer is lost.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        wait_for_leaving_threads()
        for rank in range(self._request.size):
            self._fork(rank)
        port = 0
        if not self._request.join:
            timeout = timedelta(seconds=self._request.deadline_s)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self._store, port = store, store.port
        self._order(f"{port}\n".encode())

    def _fork(self, rank: int) -> None:
        orders_read, orders_write = os.pipe()
        reports_read, reports_write = os.pipe()
        pipes = RankPipes(
            rank=rank,
            orders=orders_read,
            reports=reports_write,
            folder=self._folder,
            captures=self._item.config.getoption("capture") != "no",
            parent=os.getpid(),
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of threads in the forking process: a rank uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            # So that the end of the test's process closes this rank's pipe.
            for inherited in (orders_write, reports_read, *self._orders.values(), *self._buffers):
                os.close(inherited)
            Rank(pipes, self._request, self._item).run()
        end = RankEnd(rank=rank, process=process, folder=self._folder)
        self.ends.append(end)
        self._orders[rank] = orders_write
        self._buffers[reports_read] = b""
        os.close(orders_read)
        os.close(reports_write)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)  # as the rank does itself, whichever is first
        self._selector.register(reports_read, selectors.EVENT_READ, end)

    def watch(self) -> None:
        """Read reports until all ranks are done, or one failed and the others had time to notice, or a deadline."""
        timed_out = False
        while not all(end.is_over for end in self.ends):
            now_s = time.monotonic()
            if now_s > self._first_failure_s + GRACE_S:
                break
            if now_s > self._deadline_s:
                stuck = [end.rank for end in self.ends if not end.is_over]
                timed_out = True
                self.why_ended = f"ranks {stuck} were not through after {self._request.deadline_s:g} s"
                break
            if self._wait_in_vain(now_s):
                break
            self._hear(0.1)
            self._reap()
            if self._first_failure_s == inf and any(end.has_failed for end in self.ends):
                self._first_failure_s = time.monotonic()
        if all(end.is_over for end in self.ends):
            self._order(LEAVE)
        else:
            if timed_out:
                self._ask_for_a_verdict()
            self._ask_where_they_are()

    def _wait_in_vain(self, now_s: float) -> bool:
        """Return whether a rank is in a collective with one that has come to the end: no deadline is needed to know."""
        if now_s < self._next_look_s or not any(end.report for end in self.ends):
            return False
        states = {end.rank: end.last_state for end in self.ends if end.last_state}
        finished = {end.rank for end in self.ends if end.report}
        if waiting := waiting_for_the_finished(states, finished):
            self.why_ended = waiting
            return True
        self._next_look_s = now_s + LOOK_S
        self._order(EXPLAIN)
        return False

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            end: RankEnd = key.data
            received = os.read(key.fd, 2**20)
            if not received:
                self._selector.unregister(key.fd)
            *lines, self._buffers[key.fd] = (self._buffers[key.fd] + received).split(b"\n")
            for line in lines:
                message = from_line(line)
                if isinstance(message, RankReport):
                    end.report = message
                elif isinstance(message, RankState):
                    end.state = message
                else:
                    self._verdict = message

    def _reap(self) -> None:
        for end in self.ends:
            if end.status is None and (reaped := os.waitpid(end.process, os.WNOHANG))[0]:
                self._hear(0)
                end.status = os.waitstatus_to_exitcode(reaped[1])

    def _ask_for_a_verdict(self) -> None:
        """Ask one rank after the other, until one answers: its monitor asks all others."""
        for end in self.ends:
            until_s = time.monotonic() + VERDICT_S
            self._order(JUDGE, only=end)
            while self._verdict is None and time.monotonic() < until_s and end.is_there and not end.is_stopped:
                self._hear(0.05)
                self._reap()
            if self._verdict and self._verdict.text:
                self.why_ended += f"\n\n{self._verdict.text}"
            if self._verdict:
                return

    def _ask_where_they_are(self) -> None:
        """Ask every rank still there for its collectives and stacks; take the bare stacks of one that is silent."""
        self._order(EXPLAIN)
        until_s = time.monotonic() + EXPLAIN_S
        asked = [end for end in self.ends if end.is_there and end.report is None]
        while time.monotonic() < until_s and any(end.state is None and end.is_there for end in asked):
            self._hear(0.05)
            self._reap()
        silent = [end for end in asked if end.state is None and end.is_there]
        for end in silent:
            os.kill(end.process, STACKS_SIGNAL)
        if silent:
            time.sleep(0.2)
        for end in silent:
            condition = "it is stopped (SIGSTOP)" if end.is_stopped else "it does not answer"
            end.state = RankState(stacks=f"{condition}\n{end.output('stacks')}")

    def _order(self, order: bytes, *, only: RankEnd | None = None) -> None:
        for rank, pipe in self._orders.items():
            # A rank that is gone shows it by its exit status.
            with suppress(BrokenPipeError):
                if only is None or only.rank == rank:
                    os.write(pipe, order)

    def _wait(self, process: int) -> int:
        """Return the exit status; a process that does not leave in time is killed. Its remaining output is read.

        A rank that was asked for its state a moment ago may be blocked in the write of an answer larger than the pipe.
        """
        until_s = time.monotonic() + GRACE_S
        while time.monotonic() < until_s:
            reaped, status = os.waitpid(process, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(status)
            self._hear(0.002)
        os.kill(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def end(self) -> None:
        """Leave nothing behind: no process, pipe or thread."""
        leaving = all(end.is_over and not end.has_failed for end in self.ends)
        for end in self.ends:
            end.was_killed = end.status is None and end.report is None
        for end in self.ends:
            if end.status is None and not leaving:
                os.kill(end.process, signal.SIGKILL)
        for end in self.ends:
            if end.status is None:
                end.status = self._wait(end.process)
        for end in self.ends:
            _end_group(end.process)
        for descriptor in (*self._orders.values(), *self._buffers):
            os.close(descriptor)
        self._selector.close()
        self._store = None


def _end_group(process: int) -> None:
    """End what a rank has started; Python's own resource tracker gets the time to remove shared memory."""
    until_s = time.monotonic() + 1.0
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until_s:
            os.killpg(process, 0)
            time.sleep(0.01)
        os.killpg(process, signal.SIGKILL)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
