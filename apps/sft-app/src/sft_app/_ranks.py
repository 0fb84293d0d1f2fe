"""The trainer in processes of its own: ranks here or on a Ray cluster, called as one engine by the command line."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from offbeat_actors import ActorGroup, Launcher, Notify, RestartBudget, RoleSpec, start_again, start_ranks
from offbeat_core import (
    Floats,
    LossFunction,
    Metrics,
    OffbeatError,
    PeerFailedError,
    RoleName,
    TrainEngine,
    TrainEngineConfig,
    TrainSequence,
    load_backend,
)
from offbeat_device import StepTracer, open_device
from offbeat_liveness import current_monitor
from offbeat_mesh import Rendezvous, current_world, open_rendezvous
from offbeat_objectives import PreferenceConfig, PreferenceLoss, sft_loss
from offbeat_run import (
    ProfileConfig,
    RunFolder,
    check_shared,
    counted_loss,
    log_line,
    log_loaded,
    log_start,
    so_far,
)
from sft_app._preflight import Preflight

T = TypeVar("T")


def loss_of(preference: PreferenceConfig) -> LossFunction:
    """Return what a section `preference` asks for."""
    return sft_loss if preference.loss == "sft" else PreferenceLoss(preference)


class TrainerRank:
    """The actor `trainer-N`: one rank. Every rank is asked for the same things in the same order.

    Args:
        config: of the engine. The launcher shows each rank devices of its own, so all take the same one by name.
        preference: says which loss the ranks compute.
        run: folder that takes checkpoints and traces; "" where there is none.
        dumps: folder for what the monitor of the ranks finds; "" for none.
        rendezvous: this process among the ranks; None for the only one.
    """

    def __init__(
        self,
        *,
        config: TrainEngineConfig,
        backend: str,
        preference: PreferenceConfig,
        profile: ProfileConfig,
        run: str,
        stall_after_s: float,
        dumps: str,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._has_log, began_s = bool(run), time.monotonic()
        if run:
            log_start(config.device, config.num_threads)
            check_shared(Path(run))
        create = load_backend("offbeat.engine", backend).create  # the slow import, before any rank waits
        role = RoleName("trainer", rendezvous.rank if rendezvous else 0)
        if rendezvous:
            mesh = rendezvous.join(config.device, name=str(role), stall_after_s=stall_after_s, dumps=dumps or None)
        self._engine: TrainEngine = create(config, mesh) if rendezvous else create(config)
        if run:
            log_loaded(config.model_path, config.dtype, began_s)
            log_line("ready")
        trace = profile.plan(role, Path(run) / "profile") if run else None
        self._tracer = StepTracer(open_device(config.device), trace) if trace else None
        self._loss, self._so_far, self._is_alone = loss_of(preference), "", rendezvous is None

    def forward_backward(self, sequences: list[TrainSequence]) -> Metrics:
        self._so_far = ""
        return self._engine.forward_backward(sequences, counted_loss(self._loss, self._note, is_alone=self._is_alone))

    def _note(self, so_far: str) -> None:
        self._so_far = so_far

    def step(self) -> Metrics:
        return self._engine.step()

    def logprobs(self, sequences: list[TrainSequence], reference: bool) -> list[Floats]:
        return self._engine.logprobs(sequences, reference=reference)

    def save_weights(self, folder: Path) -> None:
        self._engine.save_weights(folder)

    def save(self, folder: Path) -> None:
        self._engine.save(folder)

    def load(self, folder: Path) -> None:
        self._engine.load(folder)

    def begin_trace(self, number: int) -> None:
        if self._tracer is not None:
            self._tracer.begin(number)

    def end_trace(self) -> None:
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer.write()

    async def beat(self) -> str:
        """Answer how far a step is, also while it computes: the process is neither stopped nor stuck."""
        return self._so_far

    def close(self) -> None:
        """Free everything and leave the other ranks, when they leave as well."""
        if monitor := current_monitor():
            monitor.close()
        self._engine.close()
        if world := current_world():
            world.leave()
        if self._has_log:
            log_line("ended")


class RanksEngine:
    """All ranks as one engine: has what the training loop uses of `offbeat_core.TrainEngine`.

    A rank that fails or dies ends the call with an error that names it; there is no way on after that but `restart`,
    where one has died, or `close`.

    Args:
        preflight: of the run, with a place for each rank.
        run: takes logs, traces and what the monitors of the ranks find; None: the ranks print where we do.

    Raises:
        UserError: a setting the backend cannot follow, a model it cannot train.
        PlacementError: the cluster has not what the plan asks for.
        PeerFailedError: a rank did not start.
    """

    def __init__(self, preflight: Preflight, run: RunFolder | None) -> None:
        config, self._placement = preflight.config, preflight.placement
        self._config, self._is_in_call = config, True
        cluster = config.cluster
        self._launcher: Launcher = load_backend("offbeat.launcher", cluster.launcher)("sft-app", cluster)
        self._budget = RestartBudget(cluster.max_restarts, cluster.restart_window_s)
        self._spec, self._logs = _first_rank(preflight, run), run.logs if run else None
        self._loop = asyncio.new_event_loop()
        # It must outlive the ranks: on Linux they end with the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()
        self._ranks: ActorGroup | None = None
        try:
            self._run(self._place_and_start())
        except BaseException:
            self.close()
            raise
        self._is_in_call = False

    async def _place_and_start(self) -> None:
        await self._launcher.place(self._placement.plan, self._placement.groups)
        self._ranks = await self._start()

    async def _start(self) -> ActorGroup:
        """Start all ranks at once, and wait until all are ready. When one fails, none is left."""
        cluster, num_ranks = self._config.cluster, self._config.engine.num_ranks
        dumps = str(self._logs / time.strftime("liveness-%Y%m%d-%H%M%S")) if self._logs else ""
        spec = replace(self._spec, kwargs={**self._spec.kwargs, "dumps": dumps})
        places: list[Rendezvous] = []
        if num_ranks > 1:
            # The store is kept here, so it outlives any of the ranks.
            self._store, places = open_rendezvous(
                self._launcher.address,
                num_ranks,
                start_deadline_s=cluster.start_timeout_s,
                call_deadline_s=self._config.engine.update_deadline_s,
            )
        return ActorGroup(await start_ranks(self._launcher, spec, places), cluster.silent_after_s)

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        assert loss == loss_of(self._config.preference), "ranks compute the loss that they were started with"
        metrics: Metrics = self._call("forward_backward", list(sequences), returns=Metrics, notify=so_far)
        return metrics

    def step(self) -> Metrics:
        metrics: Metrics = self._call("step", returns=Metrics)
        return metrics

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        found: list[Floats] = self._call("logprobs", list(sequences), reference, returns=list[Floats])
        return found

    def save_weights(self, folder: Path) -> None:
        self._call("save_weights", folder)

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    @contextmanager
    def traced(self, number: int) -> Iterator[None]:
        """The block in which a step runs, traced on the ranks that shall trace it."""
        if number not in self._config.profile.range:
            yield
            return
        self._call("begin_trace", number)
        yield
        self._call("end_trace")

    @property
    def num_restarts(self) -> int:
        """Return how often all ranks were started again."""
        return self._budget.spent["trainer"]

    def death(self, error: OffbeatError) -> PeerFailedError | None:
        """Return the death of a rank that a failed call comes of; None where all live."""
        return self._run(self._living.death(getattr(error, "log_tail", "")))

    def restart(self, death: PeerFailedError, notify: Notify) -> None:
        """Start all ranks again, with the model that the run began with.

        Args:
            death: of one of them.
            notify: takes a line for each attempt.

        Raises:
            PeerFailedError: `cluster.max_restarts` allows no more; with the death.
        """
        self._is_in_call = True
        self._run(self._start_again(death, notify))
        self._is_in_call = False

    async def _start_again(self, death: PeerFailedError, notify: Notify) -> None:
        await self._living.destroy()
        cause = f"{death.peer} failed: {death.reason}"
        try:
            self._ranks = await start_again(self._budget, "trainer", cause, self._start, notify)
        except PeerFailedError as error:
            raise PeerFailedError(error.peer, error.reason, error.log_tail or death.log_tail) from death

    def close(self) -> None:
        """Free everything and end the ranks: in order, or at once when a call has not come to its end."""
        try:
            self._run(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        if self._ranks is not None:
            await self._ranks.forget()
        if self._is_in_call:
            self._launcher.kill()
        await self._launcher.close()

    @property
    def _living(self) -> ActorGroup:
        assert self._ranks is not None
        return self._ranks

    def _call(self, method: str, *args: Any, returns: Any = None, notify: Notify | None = None) -> Any:
        """Call all ranks; `notify` takes how far they are."""
        self._is_in_call = True
        answer = self._run(self._call_ranks(method, args, returns, notify))
        self._is_in_call = False
        return answer

    async def _call_ranks(self, method: str, args: tuple[Any, ...], returns: Any, notify: Notify | None) -> Any:
        async with self._living.reporting_progress(notify) if notify else nullcontext():
            deadline_s = self._config.engine.update_deadline_s
            return await self._living.call(method, *args, returns=returns, deadline_s=deadline_s)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in the thread of the ranks. A signal's handler may raise here meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _first_rank(preflight: Preflight, run: RunFolder | None) -> RoleSpec:
    """Return what rank 0 is started with; the others differ by their number."""
    config = preflight.config
    return RoleSpec(
        RoleName("trainer"),
        "sft_app._ranks:TrainerRank",
        {
            "config": config.train_engine(preflight.num_updates),
            "backend": config.engine.backend,
            "preference": config.preference,
            "profile": config.profile,
            "run": str(run.path) if run else "",
            "stall_after_s": config.liveness.stall_after_s,
        },
        num_threads=config.threads_per_rank,
        log_path=run.log("trainer-0") if run else None,
    )
