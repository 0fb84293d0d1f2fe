"""Adds up how long each kind of work ran, and how long two kinds ran at once."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """A stopwatch over kinds of work; several pieces of one kind at once count once.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = self._counted_to = clock()
        self._running: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._overlap_s = 0.0

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Count the time inside the block as `kind`."""
        self._count()
        self._running[kind] += 1
        try:
            yield
        finally:
            self._count()
            self._running[kind] -= 1

    def is_doing(self, *kinds: str) -> bool:
        """Whether work of one of these kinds runs now."""
        return any(self._running[kind] for kind in kinds)

    def seconds(self, kind: str) -> float:
        """Time in which at least one piece of this kind ran, in s."""
        self._count()
        return self._seconds[kind]

    @property
    def overlap_s(self) -> float:
        """Time in which groups were generated and an update ran, in s."""
        self._count()
        return self._overlap_s

    @property
    def elapsed_s(self) -> float:
        """Time since the stopwatch was made, in s."""
        self._count()
        return self._counted_to - self._started_at

    def _count(self) -> None:
        now = self._clock()
        passed, self._counted_to = now - self._counted_to, now
        for kind, num_running in self._running.items():
            if num_running:
                self._seconds[kind] += passed
        if self._running["generating"] and self._running["updating"]:
            self._overlap_s += passed
