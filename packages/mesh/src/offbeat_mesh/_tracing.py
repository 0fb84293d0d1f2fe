"""Traces of some steps of this process and its device, in Chrome's format, of bounded size."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

from offbeat_mesh._device import Device, Profiler
from offbeat_mesh._trace_files import TraceFiles
from offbeat_types import TracePlan


class StepTracer:
    """Writes each of some steps into a file of its own, `ROLE-STEP.json`; it opens in Perfetto and chrome://tracing.

    What has been traced is written as soon as its step ends, so that a role that dies loses the step it was in.

    Args:
        device: where the steps compute.
        plan: which steps, where to, how much; see `TraceFiles`.
    """

    def __init__(self, device: Device, plan: TracePlan) -> None:
        self._device, self._files = device, TraceFiles(plan)
        self._running: tuple[int, Profiler] | None = None
        self._stopped: tuple[int, Profiler] | None = None

    @property
    def left_out(self) -> str:
        """Why the last traced step was not kept; "" while all were."""
        return self._files.left_out

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block in which a step runs. One that fails is traced as far as it came."""
        self.begin(number)
        try:
            with record_function(f"update {number}"):
                yield
        finally:
            self.stop()
            self.write()

    def begin(self, number: int) -> None:
        """Trace from here on, if it is one of the steps; `stop` in the same thread, and then `write` in any."""
        if self._files.wants(number):
            self._running = number, self._device.profiler()
            self._running[1].start()

    def stop(self) -> None:
        """Trace no further; nothing where nothing is traced."""
        if self._running is not None:
            self._stopped, self._running = self._running, None
            self._device.synchronize()
            self._stopped[1].stop()

    def write(self) -> None:
        """Write what was traced, and let go of it."""
        if self._stopped is None:
            return
        (number, profiler), self._stopped = self._stopped, None
        partial = self._files.unfinished(number)
        profiler.export_chrome_trace(str(partial))
        self._files.keep(number, [partial])
