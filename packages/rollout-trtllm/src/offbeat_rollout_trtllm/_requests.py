"""Requests in flight: who is sampling, who waits at the gate, who has been told to end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from offbeat_types import DeadlineError, OffbeatError


class InFlight:
    """Counts samples, lets them in while the gate is open, and knows when none is left.

    A request waits here while the engine is paused, sleeps or takes weights. `busy_s` counts the time in which at least
    one sample was being decoded.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.num_running = self.num_waiting = self.num_tokens = 0
        self._shut: set[str] = set()
        self._changed = asyncio.Event()
        self._busy_s, self._busy_since_s = 0.0, 0.0
        self._aborts: dict[str, asyncio.Event] = {}

    @property
    def busy_s(self) -> float:
        """Seconds in which there was something to decode."""
        return self._busy_s + (time.monotonic() - self._busy_since_s if self.num_running else 0.0)

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not returned."""
        return list(self._aborts)

    def shut(self, reason: str) -> None:
        """Let nobody in until `open` of the same reason."""
        self._shut.add(reason)

    def open(self, reason: str) -> None:
        """Take this reason back; those who wait go in when none is left."""
        self._shut.discard(reason)
        self._tell()

    @asynccontextmanager
    async def request(self, request_id: str) -> AsyncIterator[asyncio.Event]:
        """A request's life; the event is set when it is to end.

        Raises:
            OffbeatError: a request of this id is in flight.
        """
        if request_id in self._aborts:
            raise OffbeatError(f"request_id {request_id!r} is in flight already; give each request its own")
        self._aborts[request_id] = aborted = asyncio.Event()
        try:
            yield aborted
        finally:
            del self._aborts[request_id]

    def abort(self, request_id: str) -> None:
        """Tell a request to end; unknown ids are ignored."""
        if (aborted := self._aborts.get(request_id)) is not None:
            aborted.set()
            self._tell()

    @asynccontextmanager
    async def sampling(self, aborted: asyncio.Event) -> AsyncIterator[bool]:
        """A sample's time at the engine; False if it was told to end before it got there."""
        self.num_waiting += 1
        try:
            while self._shut and not aborted.is_set():
                await self._next_change()
        finally:
            self.num_waiting -= 1
        if aborted.is_set():
            yield False
            return
        if not self.num_running:
            self._busy_since_s = time.monotonic()
        self.num_running += 1
        try:
            yield True
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._busy_s += time.monotonic() - self._busy_since_s
            self._tell()

    async def drained(self, waiting: str, deadline_s: float) -> None:
        """Return when no sample is at the engine.

        Raises:
            DeadlineError: some still are.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self.num_running:
                    await self._next_change()
        except TimeoutError as error:
            raise DeadlineError(waiting, f"{self.num_running} samples in flight", deadline_s) from error

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()
