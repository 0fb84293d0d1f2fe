"""Requests: given to vLLM, held while it is paused or asleep, and ended; in the thread that owns the engine."""

from concurrent.futures import Future

from offbeat_rollout_vllm._adapters import Adapters
from offbeat_rollout_vllm._flights import Flight, Flights, duplicate
from offbeat_rollout_vllm._form import EngineForm
from offbeat_rollout_vllm._sampling import vllm_params
from offbeat_rollout_vllm._workers import Workers
from offbeat_types import OffbeatError, PauseMode, PeerFailedError, WeightSyncError


class Requests:
    """Every request that has not returned.

    Args:
        form: of the engine.
        workers: of the engine.
        eos_ids: the model's end-of-sequence ids.
        max_model_len: tokens of a prompt with its completion.

    Attributes:
        adapters: of the engine; set once it has started.
        mode: how it is paused; None when it is not.
        asleep: what it has given back, "weights" and "kv_cache".
        unusable: why its weights cannot be served; "" while they can.
    """

    adapters: Adapters

    def __init__(self, form: EngineForm, workers: Workers, eos_ids: frozenset[int], max_model_len: int) -> None:
        self._form, self._workers, self._max_model_len = form, workers, max_model_len
        self.flights = Flights(eos_ids)
        self._held: list[Flight] = []
        self.mode: PauseMode | None = None
        self.asleep: set[str] = set()
        self.unusable = self._broken = ""

    @property
    def num_waiting(self) -> int:
        """Samples of which nothing was drawn yet."""
        return self.flights.num_waiting + sum(len(one.samples) for one in self._held)

    def submit(self, flight: Flight) -> None:
        """Give a request to the engine, or hold it.

        Raises:
            OffbeatError: one of its name is there.
            PeerFailedError: vLLM has failed.
            ConfigError: it names an adapter that is not there.
            WeightSyncError: there are no weights to serve.
        """
        name, adapter = flight.request.request_id, flight.request.adapter
        if name in self.flights or any(one.request.request_id == name for one in self._held):
            raise duplicate(name)
        self.refuse_if_broken()
        use = (adapter, self.adapters.number(adapter)) if adapter else None
        if self.mode is not None or self.asleep:
            self._held.append(flight)
            return
        if self.unusable:
            raise WeightSyncError(f"the rollout engine has no usable weights: {self.unusable}; send a whole update")
        room = self._max_model_len - len(flight.request.prompt_ids)
        self.flights.add(flight)
        for sample in flight.samples:
            seed = flight.first_seed + sample.index
            params = vllm_params(flight.request.params, seed, self.flights.eos_ids, room) | dict(flight.changes)
            try:
                self._form.add(sample.sample_id, flight.prompt, params, use)
            except Exception as error:  # noqa: BLE001 - the boundary: whoever waits for the request learns of it
                self.fail(sample.sample_id, error)
                self._form.abort([one.sample_id for one in flight.samples[: sample.index]])
                return

    def abort(self, request_id: str) -> None:
        """End a request as it is. Unknown ids are ignored."""
        flight = self.flights.get(request_id)
        if flight is not None:
            self._form.abort([sample.sample_id for sample in flight.unfinished()])
        for held in [one for one in self._held if one.request.request_id == request_id]:
            self._held.remove(held)
            held.done.set_result(None)

    def abort_all(self, adapter: str | None = None) -> None:
        """End what is in flight: everything, or what uses an adapter. What is held stays."""
        for flight in self.flights:
            if adapter in (None, flight.request.adapter):
                self._form.abort([sample.sample_id for sample in flight.unfinished()])

    def end_all(self) -> None:
        """End everything."""
        self.abort_all()
        for flight in self._held:
            flight.done.set_result(None)
        self._held = []

    def use(self, adapter: str) -> bool:
        """Whether one of them needs this adapter."""
        return any(flight.request.adapter == adapter for flight in [*self.flights, *self._held])

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Hold what comes from now on; done when nothing is in flight."""
        self.mode = mode
        if mode == "abort":
            self.abort_all()
        return self.flights.when_empty()

    def resume(self) -> None:
        """Hold nothing any more."""
        self.mode = None
        held, self._held = self._held, []
        for flight in held:
            try:
                self.submit(flight)
            except OffbeatError as error:
                flight.done.set_exception(error)

    def spoil(self, adapter: str, reason: str) -> None:
        """Weights of two versions are mixed: serve nothing, or nothing with an adapter, until a whole update."""
        if adapter:
            self.adapters.spoil(adapter, reason)
            self.abort_all(adapter)
        else:
            self.unusable = reason
            self.abort_all()

    def fail(self, sample_id: str, error: Exception) -> None:
        """Take note that vLLM has failed: for one sample, or with "" as a whole."""
        failure = PeerFailedError("vLLM", f"{type(error).__name__}: {error}")
        if not sample_id:
            self._broken = str(failure)
        self.flights.fail(sample_id, failure)

    def refuse_if_broken(self) -> None:
        """Raise where vLLM has failed as a whole.

        Raises:
            PeerFailedError: it has.
        """
        if reason := self._broken or self._workers.lost:
            raise PeerFailedError("vLLM", f"{reason}; close this engine and make a new one")
