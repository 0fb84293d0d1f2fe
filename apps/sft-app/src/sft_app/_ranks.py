"""The trainer on several ranks: each a process of its own, called as one engine by the process of the command line."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from offbeat_actors import ActorGroup, ClusterConfig, LocalLauncher, RoleSpec, start_all
from offbeat_liveness import current_monitor
from offbeat_mesh import Rendezvous, StepTracer, current_world, open_device, open_rendezvous, rank_device
from offbeat_objectives import sft_loss
from offbeat_types import (
    Floats,
    LossFunction,
    Metrics,
    TracePlan,
    TrainEngine,
    TrainEngineConfig,
    TrainSequence,
    load_backend,
)

T = TypeVar("T")


class TrainerRank:
    """The actor `trainer-N`: one rank. Every rank is asked for the same things in the same order."""

    def __init__(
        self,
        *,
        config: TrainEngineConfig,
        backend: str,
        rendezvous: Rendezvous,
        stall_after_s: float,
        dumps: str | None,
        trace: TracePlan | None,
    ) -> None:
        create = load_backend("offbeat.engine", backend).create  # the slow import, before anybody waits
        rank, device = rendezvous.rank, rank_device(config.device, rendezvous.rank, rendezvous.size)
        mesh = rendezvous.join(device, name=f"trainer-{rank}", stall_after_s=stall_after_s, dumps=dumps)
        self._engine: TrainEngine = create(config, mesh)
        self._tracer = StepTracer(open_device(device), trace) if trace else None

    def forward_backward(self, sequences: list[TrainSequence]) -> Metrics:
        return self._engine.forward_backward(sequences, sft_loss)

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

    async def beat(self) -> None:
        """Answer, also while a step computes: the process is neither stopped nor stuck."""

    def close(self) -> None:
        """Free everything and leave the other ranks, when they leave as well."""
        if monitor := current_monitor():
            monitor.close()
        self._engine.close()
        if world := current_world():
            world.leave()


class RanksEngine:
    """All ranks as one engine: has what the training loop uses of `offbeat_types.TrainEngine`.

    A rank that fails or dies ends the call with an error that names it; there is no way on after that but `close`.

    Args:
        num_ranks: >= 2.
        deadline_s: for each call, and for each wait of one rank for another in it.
        cluster: where the ranks live.
        stall_after_s: see `LivenessConfig`.
        logs: folder for the logs of the ranks and for what their monitors find; None: they print where we do.
        trace: what each rank traces, by its name.

    Raises:
        UserError: a setting the backend cannot follow, a model it cannot train.
        PeerFailedError: a rank did not start.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        *,
        backend: str,
        num_ranks: int,
        deadline_s: float,
        cluster: ClusterConfig,
        stall_after_s: float,
        logs: Path | None,
        trace: Callable[[str], TracePlan | None] = lambda _: None,
    ) -> None:
        self._deadline_s, self._is_in_call = deadline_s, True
        self._launcher = LocalLauncher("sft-app", cluster)
        self._store, places = open_rendezvous(
            self._launcher.address, num_ranks, start_deadline_s=deadline_s, call_deadline_s=deadline_s
        )
        shared = {
            "config": config,
            "backend": backend,
            "stall_after_s": stall_after_s,
            "dumps": str(logs / time.strftime("liveness-%Y%m%d-%H%M%S")) if logs else None,
        }
        traces = [trace(f"trainer-{rank}") for rank in range(num_ranks)]
        self._is_traced = any(traces)
        specs = [
            RoleSpec(
                f"trainer-{place.rank}",
                "sft_app._ranks:TrainerRank",
                {**shared, "rendezvous": place, "trace": traces[place.rank]},
                num_threads=config.num_threads,
                log_path=logs / f"trainer-{place.rank}.log" if logs else None,
            )
            for place in places
        ]
        self._loop = asyncio.new_event_loop()
        # It must outlive the ranks: on Linux they end with the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()
        self._ranks: ActorGroup | None = None
        try:
            self._ranks = self._run(self._start(specs, cluster.silent_after_s))
        except BaseException:
            self.close()
            raise
        self._is_in_call = False

    async def _start(self, specs: Sequence[RoleSpec], silent_after_s: float) -> ActorGroup:
        return ActorGroup(await start_all(self._launcher, specs), silent_after_s)

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        assert loss is sft_loss
        metrics: Metrics = self._call("forward_backward", list(sequences), returns=Metrics)
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
        if not self._is_traced:
            yield
            return
        self._call("begin_trace", number)
        yield
        self._call("end_trace")

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

    def _call(self, method: str, *args: Any, returns: Any = None) -> Any:
        assert self._ranks is not None
        self._is_in_call = True
        answer = self._run(self._ranks.call(method, *args, returns=returns, deadline_s=self._deadline_s))
        self._is_in_call = False
        return answer

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in the thread of the ranks. A signal's handler may raise here meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
