"""Everything a run writes down while it runs, opened and closed as one; completions for people to read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from offbeat_run._config.sections import LogConfig
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lines import JsonlFile, cut_lines, read_lines
from offbeat_run._log.progress import Progress
from offbeat_run._log.timeline import Timeline, clock_s
from offbeat_run._metrics.metrics import MetricsLog, MetricValue, Tracker
from offbeat_run._metrics.prometheus import PrometheusServer
from offbeat_run._metrics.trackers import open_trackers
from offbeat_run._validation.items import AnswersLog, ItemAnswers

GenerationKind = Literal["train", "validation"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One completion.

    Args:
        step: updates done when it was written down.
        kind: "train" or "validation".
        set: name of the validation set.
        version: policy version of its oldest token.
        prompt: text, with special tokens.
        completion: text.
        reward: its reward.
        rewards: the parts of a reward that is a sum, by name.
        answer: what was expected, where that is known.
        stop_reason: as in `Completion`.
        num_tokens: of the completion.
        images: of the prompt, small copies for people: `data:` addresses of image files.
    """

    step: int
    kind: GenerationKind
    set: str = ""
    version: int
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float] = {}
    answer: str = ""
    stop_reason: str = ""
    num_tokens: int = 0
    images: tuple[str, ...] = ()


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is probably wrong with a run that continues.

    Args:
        step: updates done when it was noticed.
        text: one line.
    """

    step: int
    text: str


def read_alarms(run: RunFolder, damaged: list[str] | None = None) -> list[Alarm]:
    """Read the alarms of a run, in order; a missing file has none. `damaged` is that of `read_generations`."""
    return list(read_lines(run.alarms, lambda line: msgspec.convert(line, Alarm), "an alarm", damaged))


_ROWS_OF_A_TABLE: Final = 64
"""Completions trained on go to trackers in tables of so many; those of a validation in one each."""


class GenerationsLog:
    """Writes generations/train.jsonl and generations/validation.jsonl.

    Args:
        run: where.
        resume_step: on resume, the step of the checkpoint: generations after it vanish.
        trackers: get them as tables; see `open_trackers`.
    """

    def __init__(self, run: RunFolder, *, resume_step: int | None = None, trackers: Sequence[Tracker] = ()) -> None:
        self._folder, self._trackers = run.generations, trackers
        self._waiting: list[Generation] = []
        self._files: dict[str, JsonlFile] = {}
        if resume_step is not None:
            for path in self._folder.glob("*.jsonl"):
                cut_lines(path, lambda line: int(line["step"]) <= resume_step)

    def write(self, generations: Iterable[Generation]) -> None:
        """Append generations, each flushed."""
        generations = list(generations)
        validated = [each for each in generations if each.kind == "validation"]
        self._waiting += [each for each in generations if each.kind == "train"]
        self._send_to_trackers("validation", validated)
        if len(self._waiting) >= _ROWS_OF_A_TABLE:
            self._send_training()
        for generation in generations:
            name = generation.kind
            if name not in self._files:
                self._files[name] = JsonlFile(self._folder / f"{name}.jsonl")
            self._files[name].write(msgspec.structs.asdict(generation))

    def _send_training(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._send_to_trackers("train", waiting)

    def _send_to_trackers(self, kind: GenerationKind, generations: Sequence[Generation]) -> None:
        rows = [msgspec.structs.asdict(each) for each in generations] if self._trackers else []
        for tracker in self._trackers:
            tracker.write_table(f"generations/{kind}", max(row["step"] for row in rows) if rows else 0, rows)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._send_training()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "GenerationsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_generations(run: RunFolder, kind: GenerationKind, damaged: list[str] | None = None) -> list[Generation]:
    """Read what was written of one kind, in order; a missing file has none.

    Args:
        run: where.
        kind: of generation.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, and `damaged` is None.
    """
    return list(iter_generations(run, kind, damaged))


def iter_generations(run: RunFolder, kind: GenerationKind, damaged: list[str] | None = None) -> Iterator[Generation]:
    """Yield what `read_generations` lists, a completion at a time."""
    path = run.generations / f"{kind}.jsonl"
    return read_lines(path, lambda line: msgspec.convert(line, Generation), "a generation", damaged)


class RunLog:
    """Writes to the run folder and to the terminal, as the section `log` says. Use it in a `with` block.

    Args:
        run: open for writing.
        log: the settings.
        num_updates: of the whole run, for the progress.
        resume_step: updates done at the checkpoint this continues from: what was written after it vanishes. -1 begins
            anew; None is a new run.
    """

    def __init__(self, run: RunFolder, log: LogConfig, num_updates: int, resume_step: int | None) -> None:
        self._run, self._log, self._num_updates, self._resume_step = run, log, num_updates, resume_step
        self._timeline: Timeline | None = None
        self._prometheus: PrometheusServer | None = None

    def __enter__(self) -> "RunLog":
        run, log, resume_step = self._run, self._log, self._resume_step
        with ExitStack() as opened:
            trackers = open_trackers(log, run)
            metrics = MetricsLog(run, tensorboard=log.tensorboard, trackers=trackers, resume_step=resume_step)
            self._metrics = opened.enter_context(metrics)
            generations = GenerationsLog(run, resume_step=resume_step, trackers=trackers)
            self._generations = opened.enter_context(generations)
            if resume_step is not None:
                cut_lines(run.alarms, lambda line: int(line["step"]) <= resume_step)
                run.checkpoints.forget_scores(resume_step)
            self._answers = opened.enter_context(AnswersLog(run.validation, resume_step=resume_step))
            if log.timeline:
                self._timeline = opened.enter_context(Timeline(run.timeline))
            progress = Progress(self._num_updates, start=max(resume_step or 0, 0))
            self._progress = opened.enter_context(progress)
            if log.prometheus_port is not None:
                server = PrometheusServer(log.prometheus_port, log.prometheus_host, run.path.name)
                self._prometheus = opened.enter_context(server)
                self._progress.message(f"metrics for Prometheus: {server.url} (for {server.access})")
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def write(self, step: int, values: Mapping[str, MetricValue]) -> None:
        """Add what was measured at a step to the metrics, and show it."""
        numbers = self._metrics.write(step, values)
        if self._prometheus:
            self._prometheus.write(step, numbers)
        self._progress.update(step, values)

    def write_validation(
        self, step: int, values: Mapping[str, MetricValue], items: Mapping[str, Sequence[ItemAnswers]]
    ) -> None:
        """Add what a validation that began at `step` has measured, and what each item of its sets was answered."""
        for name, answers in items.items():
            self._answers.write(name, answers)
        self.write(step, values)

    def write_generations(self, generations: Iterable[Generation]) -> None:
        """Add completions."""
        self._generations.write(generations)

    def span(self, track: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Add a stretch of work to the timeline: see `Timeline.span`."""
        if self._timeline:
            self._timeline.span(track, name, start_s, end_s, args)

    @contextmanager
    def measure(self, track: str, name: str) -> Iterator[None]:
        """Add a block to the timeline, also when it raises."""
        start_s = clock_s()
        try:
            yield
        finally:
            self.span(track, name, start_s, clock_s())

    def alarm(self, step: int, text: str) -> None:
        """Print a line above the progress, and keep it for the report."""
        file = JsonlFile(self._run.alarms)
        file.write(msgspec.structs.asdict(Alarm(step=step, text=text)))
        file.close()
        self.message(text)

    def message(self, text: str) -> None:
        """Print a line above the progress."""
        self._progress.message(text)
