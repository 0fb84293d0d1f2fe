"""A wall clock that is set, by hours and in either direction, makes no wait older or younger than it is."""

import contextlib
import dataclasses
import re
import subprocess
import sys
import threading
import time

import pytest

from offbeat_liveness._process import progress, reading
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import Collective, GroupSnapshot

STALL_S, HOUR_S = 1.0, 3600.0


class WallClock:
    """Real seconds, and what the clock was set by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set_by_s, self._time = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: self._time() + self.set_by_s)

    def collective(self) -> Collective:
        """One that is issued now, stamped as torch does it: with the wall clock."""
        return Collective(group="0", seq=1, op="all_reduce", created_ns=int(time.time() * 1e9))


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def look(tracker: ProgressTracker, seconds: float = 0.0) -> None:
    """Look at least once from another thread, as the monitor does, for so many seconds.

    The first look comes when this thread has started the other: how it does so are lines of threading's, seen before.
    """
    has_started = threading.Lock()

    def looks() -> None:
        with has_started:
            end_s = time.monotonic() + seconds
        tracker.look()
        while time.monotonic() < end_s:
            time.sleep(0.05)
            tracker.look()

    looking = threading.Thread(target=looks)
    with has_started:
        looking.start()
    looking.join()


def group_with(entry: Collective) -> GroupSnapshot:
    return GroupSnapshot(name="0", ranks=(0, 1), backend="gloo", entered=1, recent=(entry,))


def age_s(entry: Collective, tracker: ProgressTracker) -> float:
    with contextlib.closing(reading._Threads(tracker, STALL_S)) as threads:
        return reading._recorded_wait(group_with(entry), entry, threads).age_s


@pytest.mark.parametrize("hours", [3, -3])
def test_a_call_is_never_older_than_it_is(wall: WallClock, hours: int) -> None:
    tracker = ProgressTracker(60.0)
    look(tracker, 2.5 * STALL_S)  # so long that what is pending counts, whatever its thread does
    begun_s, entry = time.monotonic(), wall.collective()
    wall.set_by_s = hours * HOUR_S
    look(tracker)
    assert age_s(entry, tracker) <= time.monotonic() - begun_s


@pytest.mark.parametrize("hours", [3, -3])
def test_a_call_that_does_not_end_grows_old_all_the_same(wall: WallClock, hours: int) -> None:
    tracker = ProgressTracker(60.0)
    look(tracker)
    begun_s, entry = time.monotonic(), wall.collective()
    wall.set_by_s = hours * HOUR_S
    look(tracker, 2.5 * STALL_S)
    assert 2 * STALL_S <= age_s(entry, tracker) <= time.monotonic() - begun_s


@pytest.mark.parametrize("hours", [0, 3, -3])
def test_a_thread_that_has_begun_since_may_take_a_group_over_whatever_the_clock_says(
    wall: WallClock, hours: int
) -> None:
    tracker = ProgressTracker(60.0)
    tracker.look()
    entry = dataclasses.replace(wall.collective(), thread=threading.get_ident())
    wall.set_by_s = hours * HOUR_S
    ends = threading.Event()
    computing = threading.Thread(target=compute_until, args=(ends,))
    computing.start()
    try:
        tracker.look()
        with contextlib.closing(reading._Threads(tracker, STALL_S)) as threads:
            assert threads.issuer(group_with(entry)) == ""
    finally:
        ends.set()
        computing.join()


def compute_until(ends: threading.Event) -> None:
    while not ends.is_set():
        sum(range(100))


def test_a_clock_that_is_kept_right_little_by_little_is_not_set(wall: WallClock) -> None:
    tracker = ProgressTracker(60.0)
    tracker.look()
    since_s = tracker.watched_since_s
    for _ in range(20):
        wall.set_by_s += progress.JUMP_S / 4
        tracker.look()
    assert tracker.watched_since_s == since_s


PAUSE = """
import time
import offbeat_liveness as liveness

really = time.time
monitor = liveness.watch(1.0, name="trainer")
with liveness.waiting("samples.get"):
    while monitor.verdict is None:
        time.sleep(0.1)
    time.time = lambda: really() + 3600
while monitor.verdict is not None:
    time.sleep(0.1)
"""


def test_a_pause_has_lasted_for_what_it_has_lasted() -> None:
    begun_s = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", PAUSE], capture_output=True, text=True, timeout=120, check=True)
    line = re.search(r"it moves again: .* after (\d+) s", ran.stderr)
    assert line, ran.stderr
    assert int(line[1]) - 0.5 <= time.monotonic() - begun_s  # reported in whole seconds, rounded
