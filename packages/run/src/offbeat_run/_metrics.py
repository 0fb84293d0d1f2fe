"""Metrics of a run: one JSON line a step, TensorBoard's own file beside it, cut back when a run resumes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat_run._files import JsonlFile, cut_lines, read_lines
from offbeat_run._folder import RunFolder
from offbeat_types import Metric


@dataclass(frozen=True)
class MetricName:
    """One metric of a run.

    Args:
        name: as written in metrics.jsonl; the part before the slash groups it.
        doc: what it is, in one sentence.
        unit: empty for a pure number or a share of 1.
    """

    name: str
    doc: str
    unit: str = ""


def _mismatch_names() -> Iterator[MetricName]:
    """Names of trainer against rollout engine: of all tokens, of those without lag, of the others."""
    figures = (
        MetricName("kl", "KL(rollout ‖ train), estimator k3, a token", "nats"),
        MetricName("abs_p99_nats", "|log r| that 99 of 100 tokens do not exceed, r = trainer / engine", "nats"),
        MetricName("abs_max_nats", "Largest |log r|, r = trainer's probability / engine's", "nats"),
        MetricName("ess_share", "Effective sample size under the weights r, as a share of the tokens"),
    )
    tokens = {"": "", "_lag0": ", of tokens sampled by the weights being trained", "_lagged": ", of all other tokens"}
    for suffix, which in tokens.items():
        for figure in figures:
            yield MetricName(f"mismatch/{figure.name}{suffix}", f"{figure.doc}{which}.", figure.unit)
    yield MetricName("mismatch/lagged_share", "Share of the tokens that other weights than those in training sampled.")


METRIC_NAMES: Final = {
    metric.name: metric
    for metric in (
        MetricName("train/reward", "Mean reward of the completions trained on."),
        MetricName("train/loss", "Mean loss over the loss tokens of the update.", "nats"),
        MetricName("train/entropy", "Mean entropy of the policy at the tokens trained on.", "nats"),
        MetricName("train/kl_ref", "Mean KL divergence from the reference policy.", "nats"),
        MetricName("train/clip_fraction", "Share of tokens whose ratio was clipped."),
        MetricName("train/ratio_max", "Largest probability ratio of new to old policy."),
        MetricName("train/response_tokens", "Mean length of a completion.", "tokens"),
        MetricName("train/lag_mean", "Mean lag: versions between sampling the oldest token and training.", "versions"),
        MetricName("train/lag_max", "Largest lag of the update.", "versions"),
        *_mismatch_names(),
        MetricName("async/lag_histogram", "Completions by lag: element i counts those of lag i."),
        MetricName("async/trainer_idle_share", "Share of the time the trainer waited for samples."),
        MetricName("async/rollout_idle_share", "Share of the time the rollout engines sampled nothing."),
        MetricName("async/overlap_share", "Share of the time trainer and rollout worked at once."),
        MetricName("perf/tokens_per_s", "Tokens sampled (GRPO) or trained on (SFT) per second.", "tokens/s"),
        MetricName("perf/samples_per_s", "Samples trained on per second.", "samples/s"),
        MetricName("eval/accuracy", "Share of held-out prompts answered rightly."),
        MetricName("eval/reward", "Mean reward on held-out prompts."),
        MetricName("eval/loss", "Mean loss on held-out sequences.", "nats"),
        MetricName("groups/filtered", "Groups left out because all their rewards are equal.", "groups"),
        MetricName("groups/dropped", "Groups left out because their lag was too large.", "groups"),
        MetricName("engines/restarts", "Times a rollout engine died and was started again.", "restarts"),
        MetricName("engines/stragglers", "Rollout engines much slower than the others.", "engines"),
        MetricName("engines/serving", "Rollout engines, once they are not as many as configured.", "engines"),
        MetricName("curriculum/known", "Share of the prompts whose success rate is known."),
        MetricName("curriculum/too_easy", "Share of the prompts that lately succeed too often: curriculum.high."),
        MetricName("curriculum/too_hard", "Share of the prompts that lately succeed too seldom: curriculum.low."),
        MetricName("distillation/kl", "Divergence of the policy from its teacher on its own samples.", "nats"),
        MetricName("distillation/kl_k3", "The same, estimated without negative values.", "nats"),
        MetricName("distillation/teacher_logprob", "Log-probability the teacher gives what was sampled.", "nats"),
        MetricName("critic/loss", "Loss of the critic: half the squared error of its values.", "reward²"),
        MetricName("critic/explained_variance", "Share of the returns' variance that the critic's values explain."),
        MetricName("critic/value", "Mean value of a token.", "reward"),
        MetricName("critic/return", "Mean of what a token's value should be.", "reward"),
        MetricName("critic/clip_fraction", "Share of the tokens whose value was held back."),
        MetricName("critic/grad_norm", "Norm of the critic's gradient before clipping."),
        MetricName("critic/learning_rate", "Learning rate of the critic's last step."),
        MetricName("critic/steps_refused", "Steps of the critic that were refused.", "steps"),
        MetricName("teacher/restarts", "Times a replica of the teacher died and was started again.", "restarts"),
        MetricName("reward_model/restarts", "Times a replica of the reward model was started again.", "restarts"),
        MetricName("scoring/latency_p50_s", "Time from asking for a score to having it: half took less.", "s"),
        MetricName("scoring/latency_p95_s", "The same: 95 of 100 took less.", "s"),
        MetricName("scoring/latency_max_s", "The same: the longest.", "s"),
        MetricName("scoring/queue", "Completions that wait for a scorer.", "completions"),
        MetricName("scoring/busy_share", "Share of the time that a process that scores was at work."),
        MetricName("scoring/processes", "Processes that score.", "processes"),
        MetricName("scoring/restarts", "Times such a process was ended, or died, and was started again.", "restarts"),
        MetricName("judge/requests", "Replies of the judge since the start.", "requests"),
        MetricName("judge/retries", "Requests to the judge that failed in passing.", "requests"),
        MetricName("judge/cached", "Replies that were known from before.", "requests"),
        MetricName("judge/prompt_tokens", "Tokens that the judge has read.", "tokens"),
        MetricName("judge/completion_tokens", "Tokens that the judge has written.", "tokens"),
        MetricName("trainer/restarts", "Times the trainer died and was started again.", "restarts"),
        MetricName("engine/grad_norm", "Norm of the gradient before clipping."),
        MetricName("engine/learning_rate", "Learning rate of the last optimizer step."),
        MetricName("engine/steps_refused", "Optimizer steps refused because the gradient was not finite.", "steps"),
    )
}
"""By name. Others are welcome; those under `correction/` and any of a known group appear in the report too."""

CORRECTION_PREFIX: Final = "correction/"


class EventFile:
    """The event file of a folder: it takes the place of those that processes before this one have written.

    A killed process leaves a file that lacks its last seconds and holds steps which the resumed run does again. So
    nothing is mended: whoever opens this one writes down again what metrics.jsonl holds.

    Source: the formats are those of tensorboardX, an `Event` in each record, with all that was measured at one step.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: Path) -> None:
        # Imported late: a report or a plan writes no events.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        old = list(folder.glob("events.out.tfevents.*"))
        for path in old:  # emptied, not removed: a TensorBoard that is running would stay with it, and not see ours
            path.write_bytes(b"")
        self._writer = EventsWriter(str(folder / "events"))
        if old:  # a TensorBoard that is running has them in memory: it is to forget every step of them
            self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time_s: float, values: Mapping[str, float | list[float]]) -> None:
        """Add what was measured at one step; it is in the file before this returns.

        Args:
            step: updates done.
            time_s: wall clock, seconds since 1970.
            values: numbers and histograms by name; numbers that are not finite are left out: TensorBoard draws none.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        found = [summary for name, value in values.items() for summary in _summaries(name, value)]
        self._writer.write_event(Event(step=step, wall_time=time_s, summary=Summary(value=found)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _summaries(name: str, value: float | list[float]) -> list[Any]:
    from tensorboardX.summary import histogram_raw, scalar

    if isinstance(value, list):
        return list(histogram_raw(name, *_histogram(value)).value) if sum(value) > 0 else []
    return list(scalar(name, value).value) if math.isfinite(value) else []


def _histogram(counts: list[float]) -> tuple[float, float, float, float, float, list[float], list[float]]:
    """Least, greatest, count, sum, sum of squares, upper bounds and counts, where element i counts what had i."""
    return (
        0.0,
        float(len(counts) - 1),
        sum(counts),
        sum(i * count for i, count in enumerate(counts)),
        sum(i * i * count for i, count in enumerate(counts)),
        [i + 0.5 for i in range(len(counts))],
        counts,
    )


MetricValue = float | int | Metric | Sequence[float]
"""A number, a `Metric`, or a histogram: element i counts what had the whole number i."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one step.

    Args:
        step: updates done.
        time_s: wall clock, seconds since 1970.
        values: numbers and histograms by name.
    """

    step: int
    time_s: float
    values: dict[str, float | list[float]]


class Tracker:
    """Something else that wants the numbers, such as W&B: see `open_trackers`.

    Args:
        write: takes the finite numbers of one step, and the step; histograms are left out.
        close: sends what is held back.
        write_table: takes the name of a table, the step, and completions as plain data by the names of `Generation`.
    """

    def __init__(
        self,
        write: Callable[[dict[str, float], int], Any],
        close: Callable[[], Any],
        write_table: Callable[[str, int, Sequence[Mapping[str, Any]]], Any],
    ) -> None:
        self._write, self.close, self._write_table = write, close, write_table

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on the numbers that are finite, if there are any."""
        if finite := {name: value for name, value in values.items() if math.isfinite(value)}:
            self._write(finite, step)

    def write_table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass on a table of completions, if there are any."""
        if rows:
            self._write_table(name, step, rows)


class MetricsLog:
    """Writes metrics.jsonl, one flushed line a step, and TensorBoard.

    Args:
        run: where; lines after a kill in the middle of one are mended.
        tensorboard: write an event file too.
        trackers: others to tell, see `open_trackers`.
        resume_step: on resume, the step of the checkpoint: what was written after it vanishes.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
        resume_step: int | None = None,
    ) -> None:
        if resume_step is not None:
            cut_lines(run.metrics, lambda line: int(line["step"]) <= resume_step)
        self._file = JsonlFile(run.metrics)
        self._trackers = tuple(trackers)
        self._events = EventFile(run.tensorboard) if tensorboard else None
        if self._events:
            for before in read_metrics(run.metrics):
                self._events.write(before.step, before.time_s, before.values)

    def write(self, step: int, metrics: Mapping[str, MetricValue], *, time_s: float | None = None) -> dict[str, float]:
        """Add what was measured at `step`; a number that is not finite is kept as such.

        Args:
            step: updates done.
            metrics: by name, see `METRIC_NAMES`.
            time_s: wall clock; now when None.

        Returns:
            The numbers among them, without histograms.
        """
        now_s = time.time() if time_s is None else time_s
        values = {name: _plain(value) for name, value in metrics.items()}
        line = {name: _jsonable(value) for name, value in values.items()}
        self._file.write({"step": step, "time_s": round(now_s, 3), **line})
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        for tracker in self._trackers:
            tracker.write(step, numbers)
        if self._events:
            self._events.write(step, now_s, values)
        return numbers

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        self._file.close()
        if self._events:
            self._events.close()
            self._events = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = ()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path | str, damaged: list[str] | None = None) -> list[MetricsLine]:
    """Read metrics.jsonl, in the order written; a line cut short by a kill is left out, a missing file is empty.

    Args:
        path: of the file.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, with its number, and nobody takes note of it.
    """
    return list(read_lines(Path(path), _metrics_line, "a line of metrics", damaged))


def _metrics_line(line: dict[str, Any]) -> MetricsLine:
    held = {name: _from_json(value) for name, value in line.items() if name not in ("step", "time_s")}
    return MetricsLine(step=int(line["step"]), time_s=float(line["time_s"]), values=held)


def _plain(value: MetricValue) -> float | list[float]:
    if isinstance(value, Metric):
        return float(value.value)
    if isinstance(value, Iterable):
        return [float(item) for item in value]
    return float(value)


def _jsonable(value: float | list[float]) -> Any:
    """JSON has no NaN and no infinity, so they are written as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _from_json(value: Any) -> float | list[float]:
    return [float(item) for item in value] if isinstance(value, list) else float(value)
