"""Progress of this process: new collectives, new lines of Python, or work on a CPU."""

import os
import time
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process import flight_recorder
from offbeat_liveness._process.flight_recorder import StillRecorder
from offbeat_liveness._process.outside.event_loop import running_callback
from offbeat_liveness._process.proc import TreeUsage, UsageRates, is_at_work, rates, thread_cpu_s, tree_usage
from offbeat_liveness._process.process_groups import torch_call
from offbeat_liveness._process.stacks import main_thread_ident, native_ids, thread_frames

DEPTH: Final = 4
JUMP_S: Final = 1.0
"""A wall clock that gains or loses so much between two looks was set: what it has stamped before has no known age."""
LEAST_GAP_S: Final = 0.2
"""Two looks that are closer than this say little: the kernel counts in hundredths of a second."""
Position = tuple[tuple[int, int], ...]


@dataclass
class ThreadProgress:
    """Lines that one thread has been at since the last collective was issued or ended.

    A loop that polls makes no progress: it shows no line that was not seen before.
    """

    last: Position = ()
    since_s: float = 0.0
    known_from_s: float = 0.0
    native_id: int = 0
    cpu_s: float | None = None
    counted_from_s: float = 0.0
    at_work_s: float = 0.0
    seen: set[Position] = field(default_factory=set)


class ProgressTracker:
    """Looks at the process once a tick, for about 50 µs; remembers since when nothing new has happened.

    Args:
        longest_gap_s: between two looks; beyond that the process counts as having been suspended.

    Attributes:
        recorder: torch's, as far as it may be read.
        status: the recorder's, as a text; "" while groups move.
        status_since_s: when it last changed, monotonic seconds.
        watched_since_s: since when there were no gaps between the looks, and the wall clock was not set.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self.recorder = StillRecorder()
        self.status = ""
        self.status_since_s = self.watched_since_s = self._looked_s = time.monotonic()
        self._longest_gap_s = longest_gap_s
        self._wall_offset_s = time.time() - self._looked_s
        self._threads: dict[int, ThreadProgress] = {}
        self._native_ids: dict[int, int] = {}
        self._sampled = {main_thread_ident()}  # whose work is counted: with a thousand threads it cannot be all
        self._usage = TreeUsage()
        self._rates: UsageRates | None = None
        self._callback: weakref.ref[Any] | None = None  # that the event loop of the main thread runs
        self._callback_since_s = self._looked_s

    def look(self) -> None:
        now_s = time.monotonic()
        before_s, self._wall_offset_s = self._wall_offset_s, time.time() - now_s
        if abs(self._wall_offset_s - before_s) > JUMP_S:
            self.watched_since_s = now_s
        if now_s - self._looked_s > self._longest_gap_s:
            self._begin_anew(now_s)
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        frames = thread_frames()
        self._look_at_loop(frames.get(main_thread_ident()), now_s)
        advanced = self._has_advanced(frames)
        self._native_ids = native_ids()
        for ident, frame in frames.items():
            if self._is_another(ident, self._native_ids.get(ident, 0)):
                self._threads.pop(ident, None)
            if not self._look_at(ident, frame, now_s, forget=advanced) and ident in self._sampled:
                self._threads[ident].at_work_s += gap_s * is_at_work(os.getpid(), self._native_ids.get(ident, 0))
        for ident in self._threads.keys() - frames.keys():
            del self._threads[ident]

    def _look_at_loop(self, frame: FrameType | None, now_s: float) -> None:
        """Note which callback the event loop of the main thread runs; a later one may lie at the same address."""
        callback = running_callback(frame)
        if callback is None:
            self._callback = None
        elif self._callback is None or self._callback() is not callback:
            self._callback, self._callback_since_s = weakref.ref(callback), now_s

    def held_up_s(self) -> float:
        """Return for how long one callback has held up the event loop of the main thread, without a new line.

        0.0 for one that was seen once only: short callbacks that follow each other hold up nothing.
        """
        if self._callback is None or self._callback_since_s == self._looked_s:
            return 0.0
        return min(time.monotonic() - self._callback_since_s, self.thread_still_s(main_thread_ident()))

    def _has_advanced(self, frames: dict[int, FrameType]) -> bool:
        """Return whether collectives were issued or have ended.

        The first status after a movement is no news of its own.
        """
        text = self.recorder.status_text(frames)
        ended = bool(text) and self.status not in ("", text)
        advanced = ended or self.recorder.moved_s > self.status_since_s
        if advanced:
            self.status_since_s = time.monotonic()
        self.status = text or ""
        return advanced

    def _begin_anew(self, now_s: float) -> None:
        """After a suspension of the process or the machine: earlier looks say nothing about now."""
        self.status_since_s = self.watched_since_s = now_s
        self._threads.clear()
        self._callback = None

    def stamped_s(self, created_ns: int) -> float:
        """Return when the wall clock stamped something, monotonic; if it was set back since, when that was seen."""
        now_s = time.monotonic()
        age_s = time.time() - created_ns / 1e9
        return self.watched_since_s if age_s < -JUMP_S else now_s - max(0.0, age_s)

    def has_pending(self) -> bool:
        return bool(self.status) and flight_recorder.has_pending(self.status)

    def has_thread_in_torch(self, still_s: float) -> bool:
        """Return whether any thread has stood for as long in a call of torch.distributed."""
        now_s = time.monotonic()
        standing = [ident for ident, each in self._threads.items() if now_s - each.since_s >= still_s]
        if not standing:
            return False
        frames = thread_frames()
        return any(torch_call(frames.get(ident)) is not None for ident in standing)

    def thread_still_s(self, ident: int) -> float:
        """Seconds since a thread was last seen on a new line; that of the main thread for threads without Python."""
        progress = self._threads.get(ident) or self._threads.get(main_thread_ident())
        return time.monotonic() - progress.since_s if progress else 0.0

    def has_begun_since(self, ident: int, native_id: int, since_s: float) -> bool:
        """Return whether a thread was first seen at a time, monotonic seconds, or later."""
        progress = self._threads.get(ident)
        return progress is None or progress.known_from_s >= since_s or self._is_another(ident, native_id)

    def _is_another(self, ident: int, native_id: int) -> bool:
        """Return whether a thread has got the ident of one that has ended: the kernel's number is not used again."""
        progress = self._threads.get(ident)
        return progress is not None and native_id != progress.native_id and 0 not in (native_id, progress.native_id)

    def still_s(self, worker: int = 0) -> float:
        """Seconds since the process last moved; `worker` is the ident of the thread that makes its collectives."""
        threads_s = (self.thread_still_s(ident) for ident in (main_thread_ident(), worker))
        return min(time.monotonic() - self.status_since_s, *threads_s)

    def busy(self, worker: int = 0) -> float:
        """Share of the time since its last new line that its main thread or its worker has had work.

        That is time on a core, or ready for one, or in the kernel for a disk: a thread that writes a large file stays
        on one line, uses no core, and is not stuck. What the looks have seen counts beside the kernel's own sums.
        """
        self._sampled = {main_thread_ident(), worker}
        return max(self._thread_busy(ident) for ident in self._sampled)

    def tree_busy(self) -> float:
        """Return how many cores the process and its descendants have used since the last call but one.

        1 if they moved data.

        A process that stands may have a pool, a compiler or a download at work.
        """
        now = tree_usage(os.getpid())
        if now.time_s - self._usage.time_s >= LEAST_GAP_S:
            self._rates = rates(self._usage, now) if self._usage.num_processes else None
            self._usage = now
        if self._rates is None:
            return 0.0
        return max(self._rates.cores, float(self._rates.at_work or self._rates.moves_data))

    def _thread_busy(self, ident: int) -> float:
        progress = self._threads.get(ident)
        if progress is None:
            return 0.0
        if progress.cpu_s is None:  # counted from now on
            progress.cpu_s, progress.counted_from_s = self._thread_cpu_s(ident), time.monotonic()
        passed_s = time.monotonic() - progress.counted_from_s
        return max(self._thread_cpu_s(ident) - progress.cpu_s, progress.at_work_s) / passed_s if passed_s > 0 else 0.0

    def _thread_cpu_s(self, ident: int) -> float:
        """CPU that a thread has used or waited for; of the whole process where the platform does not report it."""
        native_id = self._native_ids.get(ident)
        return (thread_cpu_s(os.getpid(), native_id) or time.process_time()) if native_id else 0.0

    def _look_at(self, ident: int, frame: FrameType, now_s: float, *, forget: bool) -> bool:
        """Note where a thread stands; whether that is another place than last time."""
        progress = self._threads.get(ident)
        position = _position(frame)
        if progress is None:
            native_id = self._native_ids.get(ident, 0)
            progress = self._threads[ident] = ThreadProgress(since_s=now_s, known_from_s=now_s, native_id=native_id)
        elif position == progress.last:
            if forget:
                progress.seen = {position}
            return False
        elif forget:
            progress.seen.clear()
        progress.last = position
        if position not in progress.seen:
            progress.seen.add(position)
            progress.since_s = now_s
            progress.at_work_s, progress.counted_from_s = 0.0, now_s
            progress.cpu_s = self._thread_cpu_s(ident) if ident in self._sampled else None
        return True


def _position(frame: FrameType | None) -> Position:
    places: list[tuple[int, int]] = []
    while frame is not None and len(places) < DEPTH:
        places.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(places)
