"""Traces of a rollout engine: a stretch of what it does under the weights of an update."""

import asyncio
from pathlib import Path
from typing import Protocol

from offbeat_mesh import Profiler, TraceFiles, open_device
from offbeat_types import TracePlan


class Recorder(Protocol):
    """What traces an engine; see `TracingEngine`, which does so itself."""

    async def begin_trace(self) -> None:
        """Trace from here on."""
        ...

    async def end_trace(self) -> list[Path]:
        """Trace no further; the files."""
        ...


class ProcessRecorder:
    """Traces this process and its device, for an engine that computes in it.

    Args:
        device: of the engine.
        path: takes each trace, which is taken away before the next comes.
    """

    _profiler: Profiler

    def __init__(self, device: str, path: Path) -> None:
        self._device, self._path = open_device(device), path

    async def begin_trace(self) -> None:
        """See `Recorder`."""
        self._profiler = self._device.profiler()
        self._profiler.start()

    async def end_trace(self) -> list[Path]:
        """See `Recorder`."""
        self._device.synchronize()
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._profiler.export_chrome_trace, str(self._path))  # the role must answer meanwhile
        return [self._path]


class VersionTrace:
    """Traces from new weights on, until the next come or the stretch is long enough. Belongs to one event loop.

    Args:
        plan: under the weights of which updates.
        recorder: of the engine.
        longest_s: of one stretch.
    """

    def __init__(self, plan: TracePlan, recorder: Recorder, longest_s: float) -> None:
        self._files, self._recorder, self._longest_s = TraceFiles(plan), recorder, longest_s
        self._over = asyncio.Event()
        self._stretch: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """These weights are served now."""
        if self._files.wants(version):
            self._over.clear()
            await self._recorder.begin_trace()
            self._stretch = asyncio.create_task(self._end_in_time(version))

    async def _end_in_time(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._longest_s):
                await self._over.wait()
        except TimeoutError:
            pass
        self._files.keep(version, await self._recorder.end_trace())

    async def end(self) -> None:
        """These weights are served no longer: what was traced is written."""
        if self._stretch is not None:
            self._over.set()
            await self._stretch
            self._stretch = None
