"""Traces of some steps of this process and its device, in Chrome's format, of bounded size."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import record_function

from offbeat_dist._device import Device, Profiler
from offbeat_types import TracePlan

PARTIAL = ".partial"


class StepTracer:
    """Writes each of some steps into a file of its own, `ROLE-STEP.json`; it opens in Perfetto and chrome://tracing.

    What has been traced is written as soon as its step ends, so that a role that dies loses the step it was in.

    Args:
        device: where the steps compute.
        plan: which steps, where to, how much. Files of the role's former processes count too; a step whose trace would
            exceed the bound is not kept, and is the last to be traced.

    Attributes:
        left_out: why the last traced step was not kept; "" while all were.
    """

    def __init__(self, device: Device, plan: TracePlan) -> None:
        self._device, self._plan, self._folder = device, plan, Path(plan.folder)
        held = self._folder.glob(f"{plan.role}-*.json")
        self._left_bytes = plan.max_bytes - sum(path.stat().st_size for path in held)
        self._running: tuple[int, Profiler] | None = None
        self._stopped: tuple[int, Profiler] | None = None
        self.left_out = ""

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
        if self._plan.first <= number < self._plan.last and not self.left_out:
            self._folder.mkdir(parents=True, exist_ok=True)
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
        path = self._folder / f"{self._plan.role}-{number}.json"
        partial = path.with_name(path.name + PARTIAL)
        profiler.export_chrome_trace(str(partial))
        num_bytes = partial.stat().st_size
        if num_bytes > self._left_bytes:
            partial.unlink()
            left = f"{max(self._left_bytes, 0)} of {self._plan.max_bytes} (profile.max_bytes)"
            self.left_out = (
                f"the trace of step {number} has {num_bytes} bytes, and {left} are left: it is not kept, and nothing "
                "is traced after it"
            )
            print(f"{self._plan.role}: {self.left_out}", flush=True)
            return
        partial.replace(path)
        self._left_bytes -= num_bytes
