"""The training loop."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from offbeat_objectives import sft_loss
from offbeat_run import MetricsLog, Progress, RunFolder, Timeline, open_trackers
from offbeat_types import Metric, Metrics, RunFolderError, TrainEngine, TrainSequence, load_backend
from sft_app._preflight import Preflight

STATE_FILE = "loop.json"


def train(preflight: Preflight, run: RunFolder, *, resume: bool = False) -> list[tuple[int, float]]:
    """Train to the end of the data.

    Args:
        preflight: checked.
        run: open for writing.
        resume: go on from the latest checkpoint.

    Returns:
        (update, held-out loss in nats) of each validation of this session.

    Raises:
        RunFolderError: nothing to resume.
    """
    config = preflight.config
    engine: TrainEngine = load_backend("offbeat.engine", config.engine.backend).create(
        config.train_engine(preflight.num_updates)
    )
    try:
        start = _restore(engine, preflight, run) if resume else 0
        with _Session(preflight, run, engine, start, resumed=resume) as session:
            session.run()
        return session.validations
    finally:
        engine.close()


def _restore(engine: TrainEngine, preflight: Preflight, run: RunFolder) -> int:
    checkpoint = run.checkpoints.latest()
    if checkpoint is None:
        raise RunFolderError(f"{run.path} holds no whole checkpoint: start the run again in a new folder")
    if not preflight.config.checkpoint.save_optimizer:
        raise RunFolderError(f"{run.path} was run with checkpoint.save_optimizer = false: it cannot be resumed")
    engine.load(checkpoint.path)
    return int(json.loads((checkpoint.path / STATE_FILE).read_text())["updates"])


class _Session:
    """One process's part of a run."""

    def __init__(self, preflight: Preflight, run: RunFolder, engine: TrainEngine, start: int, *, resumed: bool) -> None:
        log, step = preflight.config.log, start if resumed else None
        self._preflight, self._config, self._run, self._engine = preflight, preflight.config, run, engine
        self._start, self._order = start, preflight.order
        self._metrics = MetricsLog(run, tensorboard=log.tensorboard, trackers=open_trackers(log, run), resume_step=step)
        self._timeline = Timeline(run.timeline) if log.timeline else None
        self._progress = Progress(preflight.num_updates, start=start, every_s=log.progress_every_s)
        self.validations: list[tuple[int, float]] = []

    def __enter__(self) -> "_Session":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(None, None, None)
        self._metrics.close()
        if self._timeline:
            self._timeline.close()

    def run(self) -> None:
        if not self._start:
            self._validate(0)
        saved = self._start
        with _profiler(self._config.profile.range, self._run.path / "profile.json") as tick:
            for update in range(self._start, self._preflight.num_updates):
                self._update(update)
                tick(update)
                done = update + 1
                self._validate(done)
                if self._config.checkpoint.every and done % self._config.checkpoint.every == 0:
                    self._save(done)
                    saved = done
        if saved < self._preflight.num_updates:
            self._save(self._preflight.num_updates)

    def _update(self, update: int) -> None:
        started_s = time.monotonic()
        batch = list(self._batch(update))
        with self._timeline.measure("trainer-0", "update") if self._timeline else nullcontext():
            losses = self._engine.forward_backward(batch, sft_loss)
            stepped = self._engine.step()
        if (update + 1) % self._config.log.every == 0:
            seconds = max(time.monotonic() - started_s, 1e-9)
            tokens = sum(len(sequence.ids) for sequence in batch)
            values: Metrics = {
                "train/loss": losses.get("loss/nll", Metric(value=math.nan)),
                **{f"engine/{name}": metric for name, metric in stepped.items()},
                "perf/tokens_per_s": Metric(value=tokens / seconds),
                "perf/samples_per_s": Metric(value=len(batch) / seconds),
                "data/epoch": Metric(value=self._order(update * self._config.engine.batch_size)[0], how="last"),
            }
            self._metrics.write(update + 1, values)
            self._progress.update(update + 1, values)

    def _batch(self, update: int) -> Iterator[TrainSequence]:
        size, sequences = self._config.engine.batch_size, self._preflight.conversations.train
        end = self._order.num_positions(self._config.data.epochs) if self._config.data.epochs else math.inf
        for position in range(update * size, (update + 1) * size):
            if position < end:
                yield sequences[self._order(position)[1]]

    def _validate(self, update: int) -> None:
        every = self._config.eval.every_updates
        if not every or (update % every and update != self._preflight.num_updates):
            return
        loss = held_out_loss(self._engine, self._preflight.held_out)
        self.validations.append((update, loss))
        self._metrics.write(update, {"eval/loss": loss})
        self._progress.update(update, {"eval/loss": loss})
        self._run.checkpoints.set_score(update, -loss)

    def _save(self, update: int) -> None:
        checkpoint = self._config.checkpoint
        with self._run.checkpoints.write(update) as folder:
            if checkpoint.save_optimizer:
                self._engine.save(folder)
            else:
                self._engine.save_weights(folder)
            (folder / STATE_FILE).write_text(json.dumps({"updates": update}))
        self._run.checkpoints.prune(checkpoint.keep, keep_best=checkpoint.keep_best)


def held_out_loss(engine: TrainEngine, sequences: tuple[TrainSequence, ...]) -> float:
    """Mean cross entropy over all loss tokens, nats."""
    logprobs = engine.logprobs(sequences)
    total = sum(float(-found[sequence.loss_mask].sum()) for found, sequence in zip(logprobs, sequences, strict=True))
    return total / max(int(np.sum([sequence.loss_mask.sum() for sequence in sequences])), 1)


@contextmanager
def _profiler(steps: range, path: Path) -> Iterator[Callable[[int], None]]:
    """Trace the steps asked for; the file opens in Perfetto and chrome://tracing."""
    if not len(steps):
        yield lambda update: None
        return
    profile = torch.profiler.profile()

    def tick(update: int) -> None:
        if update + 1 == steps.start:
            profile.start()
        elif update + 1 == steps.stop:
            profile.stop()
            profile.export_chrome_trace(str(path))

    if steps.start == 0:
        profile.start()
    yield tick
