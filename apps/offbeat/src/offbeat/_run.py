"""A run of an application: its events as they come, its figures and files, its end."""

import atexit
import html
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from offbeat._process import CommandProcess, output_of
from offbeat._rewards import RewardArgument, read_reward
from offbeat._sections import override_words
from offbeat_core import DeadlineError, OffbeatError
from offbeat_run import MetricsTail, RunFolder, application_of, read_metrics, save_running

LOOK_EVERY_S: Final = 0.5
"""Longest time between two looks at the files of a run; its output is read as it comes."""
MAX_EVENTS: Final = 10_000
"""Events that are kept for a loop over them; of more, the oldest go. The run's files have them all."""
_PAGE_PIXELS: Final = 800
"""Height of the report in a notebook: a screen."""
_READ_BYTES: Final = 1 << 16
_EXIT_WITHIN_S: Final = 60.0
"""Longest wait, at the end of a program, for runs that it has left: they save first, for checkpoint.on_signal_s."""


@dataclass(frozen=True)
class MetricsEvent:
    """Measurements of one step, numbers and histograms by name."""

    step: int
    values: dict[str, float | list[float]]


@dataclass(frozen=True)
class CheckpointEvent:
    """A whole checkpoint, a folder that transformers loads."""

    step: int
    path: Path


@dataclass(frozen=True)
class MessageEvent:
    """A line that the command has printed."""

    text: str


@dataclass(frozen=True)
class EndedEvent:
    """The end of the command: 0 success, 130 interrupted, else an error; the last event."""

    code: int


Event: TypeAlias = MetricsEvent | CheckpointEvent | MessageEvent | EndedEvent


class Run:
    """A run in a process of its own. Iterating over it yields its events, each once; a `with` block stops it.

    Args:
        application: whose run it is.
        words: of the command.
        folder: of the run.
        text: configuration of a new run.
        functions: reward functions, by name.
        resume_step: of a run that is resumed, the step of its latest checkpoint.
        made: files made for it outside the folder, which go again where the command refuses the run and makes none.

    Attributes:
        folder: of the run.
    """

    def __init__(
        self,
        application: str,
        words: Sequence[object],
        folder: Path,
        *,
        text: str | None = None,
        functions: Mapping[str, Callable[..., Any]],
        resume_step: int | None = None,
        made: Sequence[Path] = (),
    ) -> None:
        self.folder, self._application, self._functions = folder, application, dict(functions)
        self._files = RunFolder(folder, None)
        self._tail, self._values = MetricsTail(self._files.metrics, resume_step), dict[str, float | list[float]]()
        if resume_step is not None:
            for line in read_metrics(self._files.metrics, []):
                self._values |= line.values if line.step <= resume_step else {}
        self._seen = {each.step for each in self._files.checkpoints.all()} if resume_step is not None else set[int]()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._changed = threading.Condition()
        self._code: int | None = None
        self._error: OffbeatError | None = None
        self._was_killed, self._made = False, tuple(made)
        self._command = CommandProcess(application, words, text=text, functions=functions)
        threading.Thread(target=self._follow, name=f"offbeat {folder.name}", daemon=True).start()
        _running.add(self)

    @property
    def code(self) -> int | None:
        """Exit code of the command; None while it runs."""
        return self._code

    @property
    def metrics(self) -> dict[str, float | list[float]]:
        """The last value of each metric, by name."""
        return dict(self._values)

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the best checkpoint by validation, else of the latest; None before there is one."""
        found = self._files.checkpoints.best() or self._files.checkpoints.latest()
        return found.path if found else None

    @property
    def report(self) -> Path:
        """The page that a run writes at its end."""
        return self._files.report

    def __iter__(self) -> Iterator[Event]:
        while (event := self._next_event()) is not None:
            yield event

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end.

        Args:
            timeout_s: longest wait, seconds; None: the run has deadlines of its own.

        Raises:
            OffbeatError: that of the command, of its own class; not after `stop` or `kill`.
            DeadlineError: it has not ended in time, and goes on.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._code is None:
                left_s = LOOK_EVERY_S if end_s is None else min(LOOK_EVERY_S, end_s - time.monotonic())
                if left_s <= 0:
                    raise DeadlineError("Run.wait", f"the end of {self.folder}", timeout_s or 0.0)
                self._changed.wait(left_s)
        if self._error and not self._was_killed:
            raise self._error

    def save(self, timeout_s: float | None = None) -> Path:
        """Have a checkpoint written after the update in progress, wait for it, and return its folder; the run goes on.

        Args:
            timeout_s: longest wait, seconds; None: as long as the run lives.

        Raises:
            RunFolderError: the run trains no more.
            DeadlineError: it is not written in time; the run still writes it.
        """
        return save_running(self._files, timeout_s).path

    def stop(self, timeout_s: float | None = None) -> None:
        """Ask the command to end, as Ctrl-C does, and wait: it finishes and saves the update in progress.

        Raises:
            OffbeatError, DeadlineError: as `wait`.
        """
        self.interrupt()
        self.wait(timeout_s)

    def interrupt(self) -> None:
        """Ask the command to end, and return at once; a second time it ends without saving."""
        self._command.interrupt()

    def kill(self) -> None:
        """End all processes of the run at once. Its latest checkpoint can be resumed."""
        self._was_killed = True
        self._command.kill()
        self.wait()

    def evaluate(self, *, sets: Sequence[str] = (), step: int | None = None, **sections: Mapping[str, Any]) -> str:
        """Evaluate a checkpoint by the command `eval`, and return what it prints: a table.

        Args:
            sets: names of [eval.sets.NAME] or held-out; empty: all. Only of runs of GRPO.
            step: that of the checkpoint; None: the best one. Only of runs of GRPO.
            sections: settings in which it differs from the run.

        Raises:
            OffbeatError: that of the command.
        """
        words = ["eval", self.folder, *(["--set", ",".join(sets)] if sets else [])]
        words += [] if step is None else ["--step", step]
        return output_of(self._application, [*words, *override_words(sections)], functions=self._functions)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            self.stop()

    def __repr__(self) -> str:
        state = "running" if self._code is None else f"ended with code {self._code}"
        return f"<Run {self.folder}, {state}>"

    def _repr_html_(self) -> str:
        """Return the page of the run, or its last metrics while there is none, for a notebook."""
        head = f"<p>{html.escape(repr(self))}</p>"
        if self._code is not None and self.report.is_file():
            page = html.escape(self.report.read_text(encoding="utf-8"), quote=True)
            return f'{head}<iframe srcdoc="{page}" width="100%" height="{_PAGE_PIXELS}"></iframe>'
        numbers = {name: value for name, value in self.metrics.items() if isinstance(value, float)}
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>" for name, value in numbers.items())
        return f"{head}<table>{rows}</table>"

    def _next_event(self) -> Event | None:
        """Return the next event, waiting for it; None after the last one."""
        with self._changed:
            while not self._events:
                if self._code is not None:
                    return None
                self._changed.wait(LOOK_EVERY_S)
            return self._events.popleft()

    def _follow(self) -> None:
        """Pass on what comes until the command has ended; the end is noted whatever happens."""
        try:
            self._pass_on()
        except BaseException:
            self._command.kill()  # its output is read no more
            raise
        finally:
            self._end(self._command.process.wait())

    def _pass_on(self) -> None:
        """Pass on the command's output and the changes of the run's files."""
        process, rest = self._command.process, b""
        assert process.stdout is not None
        output, is_open = process.stdout.fileno(), True
        while is_open or process.poll() is None:
            ready, _, _ = select.select([output] if is_open else [], [], [], LOOK_EVERY_S)
            if ready:
                read = os.read(output, _READ_BYTES)
                is_open = bool(read)
                *lines, rest = (rest + read).split(b"\n")
                if rest and (not is_open or len(rest) > _READ_BYTES):
                    lines, rest = [*lines, rest], b""
                self._add([MessageEvent(line.decode(errors="replace")) for line in lines])
            elif process.poll() is not None:  # a process that it has left behind holds the pipe
                is_open = False
            self._add(self._changes())
        process.wait()
        self._add(self._changes())

    def _end(self, code: int) -> None:
        error = self._command.error()
        try:
            self._tail.close()
            self._command.close()
            if not self.folder.exists():
                _remove(self._made)
        finally:
            with self._changed:
                self._code, self._error = code, error
                self._events.append(EndedEvent(code))
                self._changed.notify_all()

    def _add(self, events: Sequence[Event]) -> None:
        if events:
            with self._changed:
                self._events.extend(events)
                self._changed.notify_all()

    def _changes(self) -> list[Event]:
        """Return what has come to the run's files, by step, a checkpoint after what was measured at its step."""
        lines = self._tail.read()
        for line in lines:
            self._values = {**self._values, **line.values}
        found: list[MetricsEvent | CheckpointEvent] = [MetricsEvent(line.step, line.values) for line in lines]
        with suppress(OSError):  # an old one is just being removed
            new = [each for each in self._files.checkpoints.all() if each.step not in self._seen]
            self._seen |= {each.step for each in new}
            found += [CheckpointEvent(each.step, each.path) for each in new]
        return [*sorted(found, key=lambda each: each.step)]


def resume(folder: str | Path, *, reward: RewardArgument = None, **sections: Mapping[str, Any]) -> Run:
    """Continue a run from its latest checkpoint, and return at once.

    Args:
        folder: of the run.
        reward: the functions with which the run was begun; not needed where none was a function.
        sections: settings to change, such as `engine={"max_updates": 200}`.

    Raises:
        RunFolderError: it is not the folder of a run.
    """
    with RunFolder.open(folder, write=False) as run:
        application = application_of(run)
        latest = run.checkpoints.latest()
    words = ["resume", run.path, *override_words(sections)]
    return Run(
        application, words, run.path, functions=read_reward(reward)[1], resume_step=latest.step if latest else -1
    )


def _remove(files: Sequence[Path]) -> None:
    with suppress(OSError):  # the folder holds other files too
        for file in files:
            file.unlink()
        for folder in {file.parent for file in files}:
            folder.rmdir()


_running: "weakref.WeakSet[Run]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the runs that a program leaves, as Ctrl-C would: their reward functions are gone with it."""
    left = [run for run in _running if run.code is None]
    for run in left:
        run.interrupt()
    for run in left:
        try:
            run.wait(_EXIT_WITHIN_S)
        except DeadlineError:
            run.kill()
        except OffbeatError:
            pass
