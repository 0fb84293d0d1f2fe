"""Traces of chosen steps, in Chrome's format, of bounded size: what a device and its process did meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import record_function

from offbeat_core import TracePlan
from offbeat_device._device import Device, Profiler


class TraceFiles:
    """Keeps what was traced of a step as `ROLE-STEP.json`, and of further processes as `ROLE-STEP.rank1.json`, ....

    Args:
        plan: which steps, where to, how much. Files of the role's former processes count too; a step whose traces would
            exceed the bound is not kept, and is the last to be traced.

    Attributes:
        left_out: why the last traced step was not kept; "" while all were.
    """

    def __init__(self, plan: TracePlan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        held = self._folder.glob(f"{plan.role}-*.json")
        self._left_bytes = plan.max_bytes - sum(path.stat().st_size for path in held)
        self.left_out = ""

    def wants(self, step: int) -> bool:
        """Return whether this step is to be traced."""
        return self._plan.first <= step < self._plan.last and not self.left_out

    def unfinished(self, step: int) -> Path:
        """Return where to write the trace of a step before it is kept; its folder is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{self._plan.role}-{step}.json.partial"

    def keep(self, step: int, written: Sequence[Path]) -> None:
        """Take the traces of a step in, or remove them.

        Args:
            step: its number.
            written: whole files, one for each process that computes, on the file system of the plan's folder.
        """
        num_bytes = sum(path.stat().st_size for path in written)
        if num_bytes > self._left_bytes:
            for path in written:
                path.unlink()
            self._log_left_out(step, num_bytes)
            return
        for rank, path in enumerate(written):
            of_rank = f".rank{rank}" * (rank > 0)
            path.replace(self._folder / f"{self._plan.role}-{step}{of_rank}.json")
        self._left_bytes -= num_bytes

    def _log_left_out(self, step: int, num_bytes: int) -> None:
        left = f"{max(self._left_bytes, 0)} of {self._plan.max_bytes} (profile.max_bytes)"
        self.left_out = (
            f"the trace of step {step} has {num_bytes} bytes, and {left} are left: it is not kept, and nothing "
            "is traced after it"
        )
        print(f"{self._plan.role}: {self.left_out}", flush=True)


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
