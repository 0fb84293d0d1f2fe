"""The test's process: forks the ranks, hears their reports, and ends all of them whatever happens."""

import importlib
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Final

import pytest

from offbeat_testing._leaving_threads import wait_for_leaving_threads
from offbeat_testing._ranks._collectives import waiting_for_the_finished
from offbeat_testing._ranks._failure import RankEnd, give_verdict
from offbeat_testing._ranks._report import RankReport, RankState, RankVerdict, from_line
from offbeat_testing._ranks._request import PRELOAD_INI, RanksRequest

try:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore
except ImportError as error:  # pragma: no cover - torch is there wherever our own tests run
    raise pytest.UsageError('tests on several ranks need torch: pip install "offbeat-testing[ranks]"') from error

from offbeat_testing._forked_process import STACKS_SIGNAL
from offbeat_testing._ranks._child import EXPLAIN, JUDGE, LEAVE, Rank, RankSeat

# How long the others may take to notice that one rank has failed.
GRACE_S: Final = 5.0
# How long the liveness monitor may look around.
VERDICT_S: Final = 4.0
# How often ranks are asked where they are while others have come to the end.
LOOK_S: Final = 1.0
# How long a stuck rank may take to say where it is.
EXPLAIN_S: Final = 2.0


def run_on_ranks(item: pytest.Function, request: RanksRequest) -> None:
    """Run the body of `item` on its ranks; skip, fail or return as they did together."""
    if dist.is_initialized():
        pytest.fail("the test's own process has joined a torch.distributed world: destroy it before ranks fork", False)
    for module in item.config.getini(PRELOAD_INI):
        importlib.import_module(module)
    if request.axes:
        importlib.import_module("offbeat_mesh._mesh")
    if request.liveness:
        with suppress(ImportError):  # then the ranks go without
            importlib.import_module("offbeat_liveness")
    with _folder() as folder:
        crew = Crew(item, request, folder)
        try:
            crew.start()
            crew.watch()
        finally:
            crew.end()
        for end in crew.ends:
            for stream in ("stdout", "stderr"):
                if output := end.output(stream):
                    item.add_report_section("call", f"rank {end.rank} {stream}", output)
        give_verdict(request, crew.ends, why_ended=crew.why_ended)


class Crew:
    """The processes of one test."""

    def __init__(self, item: pytest.Function, request: RanksRequest, folder: Path) -> None:
        self._item = item
        self._request = request
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._orders: dict[int, int] = {}
        self._buffers: dict[int, bytes] = {}
        self._store: object = None
        self._deadline_s = time.monotonic() + request.deadline_s
        self._first_failure_s = inf
        self._next_look_s = time.monotonic() + LOOK_S
        self.ends: list[RankEnd] = []
        self._verdict: RankVerdict | None = None
        self.timed_out = False
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
        seat = RankSeat(
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
            Rank(seat, self._request, self._item).run()
        end = RankEnd(rank=rank, process=process, folder=self._folder)
        self.ends.append(end)
        self._orders[rank] = orders_write
        self._buffers[reports_read] = b""
        os.close(orders_read)
        os.close(reports_write)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)  # as the rank does itself: whoever comes first
        self._selector.register(reports_read, selectors.EVENT_READ, end)

    def watch(self) -> None:
        """Hear the ranks until all are through, or one has failed and the others had time to notice, or too late."""
        while not all(end.is_over for end in self.ends):
            now_s = time.monotonic()
            if now_s > self._first_failure_s + GRACE_S:
                break
            if now_s > self._deadline_s:
                stuck = [end.rank for end in self.ends if not end.is_over]
                self.timed_out = True
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
            if self.timed_out:
                self._ask_for_a_verdict()
            self._ask_where_they_are()

    def _wait_in_vain(self, now_s: float) -> bool:
        """Whether a rank is in a collective with one that has come to the end: no deadline is needed to know."""
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
        """Of one rank after the other, until one answers: its monitor asks all others."""
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
        """Of every rank still there: its collectives and stacks; from one that does not answer, its bare stacks."""
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
            end.state = RankState(stacks=f"{end.condition()}\n{end.output('stacks')}")

    def _order(self, order: bytes, *, only: RankEnd | None = None) -> None:
        for rank, pipe in self._orders.items():
            # A rank that is gone tells so by its exit status.
            with suppress(BrokenPipeError):
                if only is None or only.rank == rank:
                    os.write(pipe, order)

    def _wait(self, process: int) -> int:
        """Exit status; a process that does not leave in time is killed. What it still has to say is heard.

        A rank that was asked for its state a moment ago may stand in the write of an answer larger than the pipe.
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
