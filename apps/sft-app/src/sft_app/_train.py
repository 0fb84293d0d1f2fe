"""The training loop, and signals held back until an update is done."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from offbeat_core import (
    ConfigError,
    Metric,
    Metrics,
    OffbeatError,
    PeerFailedError,
    RoleName,
    RunFolderError,
    TrainEngine,
    load_backend,
)
from offbeat_device import StepTracer, open_device
from offbeat_run import EndRequests, RunFolder, RunLog, doing, ending_signals, reading
from sft_app._learners import create_learner
from sft_app._preflight import Preflight, Progress
from sft_app._ranks import RanksEngine
from sft_app._reference import Engine

_NOTICE = "\n{name}: the update in hand is finished and saved, within {within_s:g} s; once more to end at once\n"
_CUT_OFF = "\n{within_s:g} s (checkpoint.on_signal_s) are over: not saved, it is trained again\n"


@contextmanager
def deferred_interrupts(within_s: float) -> Iterator[Callable[[], bool]]:
    """Turn the first signal into an answer; the second raises KeyboardInterrupt at once.

    Args:
        within_s: so long after the first signal KeyboardInterrupt is raised all the same; 0: at once.

    Yields:
        Whether the run was asked to end.
    """
    asked, is_over, requests = False, False, EndRequests()
    main = threading.main_thread().ident or 0

    def cut_off() -> None:
        nonlocal is_over
        is_over = True
        os.write(2, _CUT_OFF.format(within_s=within_s).encode())
        signal.pthread_kill(main, signal.SIGINT)  # wakes it also where it waits for the ranks

    timer = threading.Timer(within_s, cut_off)
    timer.daemon = True

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not is_over and requests.is_repeated(number):
            return
        if asked or not within_s:
            timer.cancel()
            raise KeyboardInterrupt
        asked = True
        timer.start()
        # Not print: the signal may have come in the middle of one.
        os.write(2, _NOTICE.format(name=signal.Signals(number).name, within_s=within_s).encode())

    previous = {number: signal.signal(number, ask) for number in ending_signals()}
    try:
        yield lambda: asked
    finally:
        timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


STATE_FILE = "loop.json"

UpdateTracer = Callable[[int], AbstractContextManager[None]]
"""Called with the number of an update, from 0: the block in which it runs."""


def create_engine(preflight: Preflight, run: RunFolder | None = None) -> Engine:
    """Load the model into the trainer, on as many ranks as the configuration says; `run` takes logs and traces."""
    config = preflight.config
    ranks = f"starting {config.engine.num_ranks} ranks, each with the model"
    doing(ranks if config.has_ranks else "loading the model", config.model.path)
    if config.has_ranks:
        return RanksEngine(preflight, run)
    create = load_backend("offbeat.engine", config.engine.backend).create
    engine: TrainEngine = create(config.train_engine(preflight.num_updates))
    return engine


def open_tracer(preflight: Preflight, run: RunFolder, engine: Engine) -> UpdateTracer:
    """Traces the updates that section `profile` names, on all ranks that it names."""
    if isinstance(engine, RanksEngine):
        return engine.traced
    plan = preflight.config.profile.plan(RoleName("trainer"), run.profile)
    if plan is None:
        return lambda _: nullcontext()
    return StepTracer(open_device(preflight.config.engine.device), plan).step


def train(preflight: Preflight, run: RunFolder, engine: Engine) -> None:
    """Train to the end of the data. KeyboardInterrupt: asked to end; the updates done are saved."""
    _train(preflight, run, engine, start=0, resume_step=None)


@dataclass(frozen=True)
class Start:
    """Point from which a run continues; the beginning where it has no checkpoint yet.

    Args:
        folder: of the checkpoint; None at the beginning.
        progress: where it was written.
        state: what `_loop_state` returned then.
    """

    folder: Path | None = None
    progress: Progress = Progress()
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Updates done."""
        return self.progress.updates


def find_start(run: RunFolder) -> Start:
    """Read the latest checkpoint whose bytes are whole, and print which it is; see `Checkpoints.read_latest`."""
    found = run.checkpoints.read_latest(_read_start)
    return Start() if found is None else found[1]


def _read_start(folder: Path) -> Start:
    with reading(STATE_FILE):
        state = dict(json.loads((folder / STATE_FILE).read_bytes()))
        numbers = {name: int(state[name]) for name in ("updates", "batch_size")}
        position = int(state.get("position", numbers["updates"] * numbers["batch_size"]))  # older ones do not name it
        return Start(folder, Progress(updates=numbers["updates"], position=position), state)


def resume(preflight: Preflight, run: RunFolder, engine: Engine, start: Start) -> None:
    """Continue from a start that `find_start` has found."""
    _restore(engine, preflight, run, start)
    # Without a checkpoint the run begins anew: not even the line of update 0 stays.
    _train(preflight, run, engine, start=start.updates, resume_step=start.updates or -1)


def _train(preflight: Preflight, run: RunFolder, engine: Engine, *, start: int, resume_step: int | None) -> None:
    """Train to the end. When a rank dies, all are started again, and continue as a resumed run does."""
    death: PeerFailedError | None = None
    restart = Start()
    with deferred_interrupts(preflight.config.checkpoint.on_signal_s) as is_asked_to_end:
        while True:
            with RunLog(run, preflight.config.log, preflight.num_updates, resume_step) as log:
                if death is not None:
                    assert isinstance(engine, RanksEngine)
                    engine.restart(death, log.message)
                    _restore(engine, preflight, run, restart)
                    start = restart.updates
                    log.message(f"the run continues from update {start}: what was trained since is trained again")
                try:
                    return _Session(preflight, run, engine, log, start, is_asked_to_end).run()
                except OffbeatError as error:
                    death = engine.death(error) if isinstance(engine, RanksEngine) else None
                    if death is None or is_asked_to_end() or not preflight.config.checkpoint.save_optimizer:
                        raise
            restart = find_start(run)
            resume_step = restart.updates or -1


def _restore(engine: Engine, preflight: Preflight, run: RunFolder, start: Start) -> None:
    if not preflight.config.checkpoint.save_optimizer:
        raise RunFolderError(f"{run.path} was run with checkpoint.save_optimizer = false: it cannot be resumed")
    if start.folder is None:
        return
    for name, required in _loop_state(preflight, start.updates).items():
        if name in start.state and start.state[name] != required:
            raise ConfigError(
                f"{run.path} was begun with {name} = {start.state[name]} and would continue with {required}: some "
                "sequences would be trained twice and others never; resume with the data and the settings it was "
                "begun with"
            )
    engine.load(start.folder)


def _loop_state(preflight: Preflight, updates: int) -> dict[str, int | str]:
    """Return where in the data a run is: the order is a function of these."""
    config = preflight.config
    return {
        "updates": updates,
        "position": preflight.position_at(updates),
        "batch_size": config.engine.batch_size,
        "num_sequences": len(preflight.examples.train),
        "preference.loss": config.preference.loss,
        "data_seed": config.data.seed,
        "shuffle": config.data.shuffle,
    }


class _Session:
    """One process's part of a run."""

    def __init__(
        self,
        preflight: Preflight,
        run: RunFolder,
        engine: Engine,
        log: RunLog,
        start: int,
        is_asked_to_end: Callable[[], bool],
    ) -> None:
        self._preflight, self._config, self._run = preflight, preflight.config, run
        self._engine, self._log, self._start, self._is_asked_to_end = engine, log, start, is_asked_to_end
        self._learner = create_learner(preflight, engine, run, start)

    def run(self) -> None:
        """Train to the end, or until asked to end.

        A checkpoint comes after the validation of its update, so what a resumed run finds saved is validated too.
        """
        trace = open_tracer(self._preflight, self._run, self._engine)
        with self._log.measure("trainer-0", "prepare"):
            self._learner.prepare(self._is_asked_to_end)
        if not self._start:
            self._validate(0)
        for update in range(self._start, self._preflight.num_updates):
            if self._is_asked_to_end():
                raise KeyboardInterrupt
            self._update(update, trace)
            if is_asked := self._is_asked_to_end():
                self._save(update + 1)  # first of all: a validation may take longer than is left
            self._validate(update + 1)
            if not is_asked and (self._is_saved_at(update + 1) or self._is_asked_to_end()):
                self._save(update + 1)

    def _is_saved_at(self, done: int) -> bool:
        every = self._config.checkpoint.every
        is_due = done == self._preflight.num_updates or bool(every and done % every == 0)
        return is_due or self._run.checkpoints.is_asked

    def _update(self, update: int, trace: UpdateTracer) -> None:
        doing(f"update {update + 1} of {self._preflight.num_updates}")
        batch = self._preflight.batch(update)
        started_s = time.monotonic()
        with self._log.measure("trainer-0", "update"), trace(update):
            loss, metrics = self._learner.learn(batch)
            stepped = self._engine.step()
        seconds = max(time.monotonic() - started_s, 1e-9)
        train = self._preflight.examples.train
        tokens = sum(len(sequence.ids) for index in batch for sequence in train[index].sequences)
        # The engine's own names have no slash: see `TrainEngine.forward_backward`.
        engines = {name: metric for name, metric in metrics.items() if "/" not in name and name != "loss"}
        values: Metrics = {
            "train/loss": loss,
            **{name: metric for name, metric in metrics.items() if "/" in name and name != "loss/total"},
            **{f"engine/{name}": metric for name, metric in (engines | stepped).items()},
            "perf/update_s": Metric(value=seconds),
            "perf/tokens_per_s": Metric(value=tokens / seconds),
            "perf/samples_per_s": Metric(value=len(batch) / seconds),
            "data/epoch": Metric(value=self._preflight.epochs_at(update + 1), how="last"),
        }
        if isinstance(self._engine, RanksEngine) and (restarts := self._engine.num_restarts):
            values["trainer/restarts"] = Metric(value=float(restarts), how="last")
        self._log.write(update + 1, values)

    def _validate(self, done: int) -> None:
        every = self._config.validates_every
        if not every or (done % every and done != self._preflight.num_updates):
            return
        doing("validating", f"{len(self._preflight.held_out)} {self._config.rows_name} after update {done}")
        with self._log.measure("trainer-0", "validate"):
            values = self._learner.validate()
        self._log.write(done, {f"eval/{name}": value for name, value in values.items()})
        loss = values["loss"]
        if math.isfinite(loss):  # not a number is neither better nor worse than any other: it must not be the best
            self._run.checkpoints.set_score(done, -loss)

    def _save(self, done: int) -> None:
        checkpoint = self._config.checkpoint
        doing("saving the checkpoint", f"after update {done}")
        with self._log.measure("trainer-0", "checkpoint"), self._run.checkpoints.write(done) as folder:
            if checkpoint.save_optimizer:
                self._engine.save(folder)
            else:
                self._engine.save_weights(folder)
            (folder / STATE_FILE).write_text(json.dumps(_loop_state(self._preflight, done)))
        self._run.checkpoints.prune(checkpoint.keep)
