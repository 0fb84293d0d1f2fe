"""The trainer on several ranks, as the training loop sees it: one engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import offbeat_liveness as liveness
from offbeat_actors import RoleSpec
from offbeat_objectives import sft_loss
from offbeat_types import Floats, LossFunction, Metrics, PeerFailedError, TracePlan, TrainEngineConfig, TrainSequence
from sft_app._crew import Crew
from sft_app._ranks import Place, Rank


class TeamEngine:
    """Rank 0 in this process, the others in processes of their own: implements `offbeat_types.TrainEngine`.

    Every call is made on all ranks at the same time. A rank that fails or dies ends the call with an error that names
    it; there is no way on after that but `close`.

    Args:
        config: of the engine, the same for all ranks.
        backend: name of the training engine.
        num_ranks: >= 2.
        deadline_s: for each call, and for each wait of one rank for another in it.
        stall_after_s: see `LivenessConfig`.
        logs: folder for the logs of the other ranks and for what the monitor finds; None: they print where we do.
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
        stall_after_s: float,
        logs: Path | None,
        trace: Callable[[str], TracePlan | None] = lambda _: None,
    ) -> None:
        dumps = str(logs / time.strftime("liveness-%Y%m%d-%H%M%S")) if logs else None
        places = [
            Place(
                rank=rank,
                size=num_ranks,
                backend=backend,
                deadline_s=deadline_s,
                stall_after_s=stall_after_s,
                dumps=dumps,
                trace=trace(f"trainer-{rank}"),
            )
            for rank in range(num_ranks)
        ]
        self._is_traced = any(place.trace for place in places)
        self._own = Rank(config, places[0])
        self._crew = Crew(self._own.stop_watching, deadline_s)
        self._error: BaseException | None = None
        self._in_call = True
        try:
            self._crew.start([_role(config, place, logs) for place in places[1:]])
            port = self._crew.call_first("open_store", int)
            with self._all("join", port):
                self._own.join(port)
        except BaseException:
            self.close()
            raise

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Add up gradients of the supervised loss, the only one that the other ranks know."""
        assert loss is sft_loss
        with self._all("forward_backward", list(sequences)):
            return self._own.engine.forward_backward(sequences, loss)

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients."""
        with self._all("step"):
            return self._own.engine.step()

    @contextmanager
    def traced(self, number: int) -> Iterator[None]:
        """The block in which a step runs, traced on the ranks that shall trace it."""
        if not self._is_traced:
            yield
            return
        with self._all("begin_trace", number):
            self._own.begin_trace(number)
        yield
        with self._all("end_trace"):
            self._own.end_trace()

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """Log-probability of each loss token: see `TrainEngine.logprobs`."""
        with self._all("logprobs", list(sequences), reference):
            return self._own.engine.logprobs(sequences, reference=reference)

    def weights(self) -> Iterator[Any]:
        """Iterate (Hugging Face name, tensor), to the end: every tensor is gathered from all ranks."""
        with self._all("pass_weights"):
            yield from self._own.engine.weights()

    def save_weights(self, folder: Path) -> None:
        """Write a folder in Hugging Face format."""
        with self._all("save_weights", folder):
            self._own.engine.save_weights(folder)

    def save(self, folder: Path) -> None:
        """Write what `save_weights` writes, and optimizer, schedule and random state beside it."""
        with self._all("save", folder):
            self._own.engine.save(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on whatever number of ranks."""
        with self._all("load", folder):
            self._own.engine.load(folder)

    def close(self) -> None:
        """Free everything and end the other ranks: in order, or at once when a call has not come to its end."""
        error: BaseException | None = None
        if self._in_call:
            self._own.stop_watching()
            self._crew.kill()
            error = self._error or PeerFailedError("trainer-0", "was interrupted")
        stopping = self._crew.begin_to_stop()
        try:
            self._own.close(error)
            stopping.result()
        finally:
            self._crew.close()

    @contextmanager
    def _all(self, method: str, *args: Any) -> Iterator[None]:
        """Have the other ranks make a call, of which the block is this rank's part, and wait for them."""
        self._in_call = True
        answers = self._crew.send(method, *args)
        try:
            yield
            with liveness.waiting(f"answers to {method}", on="trainer"):
                self._crew.collect(answers)
        except Exception as error:
            if self._crew.is_interrupted:
                raise KeyboardInterrupt from error
            self._error = self._crew.find_cause(error)
            if self._error is error:
                raise
            raise self._error from error
        self._in_call = False


def _role(config: TrainEngineConfig, place: Place, logs: Path | None) -> RoleSpec:
    return RoleSpec(
        place.name,
        "sft_app._ranks:Rank",
        {"config": config, "place": place},
        num_threads=config.num_threads,
        log_path=logs / f"{place.name}.log" if logs else None,
    )
