"""Traces of a rollout engine: a stretch of what it does under the weights of an update."""

import asyncio

from offbeat_dist import StepTracer, open_device
from offbeat_types import TracePlan


class StretchTrace:
    """Traces from new weights on, until the next come or the stretch is long enough. Belongs to one event loop.

    Engines that compute in processes of their own (vLLM in its async form) show only what this process does for them.

    Args:
        plan: under the weights of which updates.
        device: of the engine.
        longest_s: of one stretch.
    """

    def __init__(self, plan: TracePlan, device: str, longest_s: float) -> None:
        self._tracer, self._longest_s = StepTracer(open_device(device), plan), longest_s
        self._over = asyncio.Event()
        self._stretch: asyncio.Task[None] | None = None

    def begin(self, version: int) -> None:
        """These weights are served now."""
        self._over.clear()
        self._tracer.begin(version)
        self._stretch = asyncio.create_task(self._end_in_time())

    async def _end_in_time(self) -> None:
        try:
            async with asyncio.timeout(self._longest_s):
                await self._over.wait()
        except TimeoutError:
            pass
        self._tracer.stop()
        await asyncio.to_thread(self._tracer.write)  # it takes its time, and the role must answer meanwhile

    async def end(self) -> None:
        """These weights are served no longer: what was traced is written."""
        if self._stretch is not None:
            self._over.set()
            await self._stretch
            self._stretch = None
