"""A thread that gets the ident of one that has ended is another thread: real threads, without torch."""

import contextlib
import threading
import time

import pytest

from offbeat_liveness._process import reading
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import Collective, GroupSnapshot

STALL_S = 1.0
MAX_TRIES = 100


class Standing:
    """A thread that stands in a wait until it is set to end."""

    def __init__(self) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.stand)
        self.begun_s = time.monotonic()
        self.thread.start()
        self.ident = self.thread.ident or 0
        self.begun.wait()

    def stand(self) -> None:
        self.begun.set()
        self.ends.wait()

    def end(self) -> None:
        self.ends.set()
        self.thread.join()

    def followed(self) -> "Standing":
        """End it, and start another one with its ident: the next as a rule, at times one after that."""
        self.end()
        others = [Standing()]
        while others[-1].ident != self.ident and len(others) < MAX_TRIES:
            others.append(Standing())
        *rest, last = others
        for each in rest:
            each.end()
        assert last.ident == self.ident
        return last


def look(tracker: ProgressTracker) -> None:
    looking = threading.Thread(target=tracker.look, name="offbeat-liveness")
    looking.start()
    looking.join()


def test_a_thread_has_not_stood_as_long_as_the_one_before_with_its_ident() -> None:
    tracker = ProgressTracker(60.0)
    first = Standing()
    look(tracker)
    time.sleep(0.5)
    second = first.followed()
    try:
        look(tracker)
        assert tracker.thread_still_s(second.ident) <= time.monotonic() - second.begun_s
    finally:
        second.end()


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_thread_with_the_ident_of_one_that_has_ended_may_take_a_group_over(is_looked_at: bool) -> None:
    tracker = ProgressTracker(60.0)
    first = Standing()
    look(tracker)
    entry = Collective(
        group="0", seq=1, op="all_reduce", created_ns=int(time.time() * 1e9), thread=threading.get_ident()
    )
    group = GroupSnapshot(name="0", ranks=(0, 1), backend="gloo", entered=1, recent=(entry,))
    assert issuer(tracker, group) == "MainThread"
    second = first.followed()
    try:
        if is_looked_at:
            look(tracker)
        assert issuer(tracker, group) == ""
    finally:
        second.end()


def issuer(tracker: ProgressTracker, group: GroupSnapshot) -> str:
    with contextlib.closing(reading._Threads(tracker, STALL_S)) as threads:
        return threads.issuer(group)
