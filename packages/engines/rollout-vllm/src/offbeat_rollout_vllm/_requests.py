"""Requests in flight, their samples, and scores: given to vLLM, held while it is paused or asleep, and ended.

All of it lives in the thread that owns the engine, so nothing is locked; `EngineHealth` reads counters. vLLM returns
log-probabilities of a prompt, so a continuation to score is sent as part of one.

Source: vllm 0.32.0, vllm/v1/worker/gpu_model_runner.py (_get_prompt_logprobs_dict): of the logits as they are, whatever
the temperature and the logprobs_mode; with the first sampled token, so that there must be room for one;
vllm/v1/request.py: cached keys and values are not read for such a request.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from offbeat_core import (
    ConfigError,
    Floats,
    GenerateRequest,
    OffbeatError,
    PauseMode,
    PeerFailedError,
    RolloutCapabilities,
    Routes,
    SamplingParams,
    ScoreRequest,
    StopReason,
    WeightSyncError,
    new_future,
)
from offbeat_rollout_vllm._adapters import Adapters
from offbeat_rollout_vllm._forms import EngineForm
from offbeat_rollout_vllm._vllm_objects import Delta, vllm_params
from offbeat_rollout_vllm._workers import Workers

PROMPT_LOGPROBS: Final = {"prompt_logprobs": 0, "max_tokens": 1}
"""Parameters that return log-probabilities of the prompt's own tokens, and no others."""


class Sample:
    """One sample: what has been drawn so far, and (label of vLLM's, number of tokens) of what drew it."""

    def __init__(self, sample_id: str, request: GenerateRequest, index: int) -> None:
        self.sample_id, self.request, self.index = sample_id, request, index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: Sequence[float] = ()
        self.labels: list[tuple[int, int]] = []
        self.stop_reason: StopReason | None = None
        self.routes: Routes | None = None

    def push(self, delta: Delta, eos_ids: frozenset[int]) -> None:
        self.ids.extend(delta.ids)
        if delta.routes_TLK is not None:
            # A stop string may end a sample before tokens that were drawn with it.
            self.routes = Routes.pack(delta.routes_TLK[: len(self.request.prompt_ids) + len(self.ids)])
        self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.label is not None and delta.ids:
            self.labels.append((delta.label, len(delta.ids)))
        if delta.spans:
            self.labels = list(delta.spans)
        if delta.finish_reason is not None:
            self.stop_reason = self._why(delta, eos_ids)

    def _why(self, delta: Delta, eos_ids: frozenset[int]) -> StopReason:
        if delta.finish_reason == "abort":
            return "aborted"
        if delta.finish_reason == "length":
            return "length"
        ended_by_eos = bool(self.ids) and self.ids[-1] in eos_ids and not self.request.params.ignore_eos
        return "eos" if ended_by_eos and not delta.stop_string else "stop"


@dataclass
class RequestState:
    """A request, its samples, and the future that its caller waits for.

    Attributes:
        first_seed: of sample 0.
        done: set when every sample has ended, or with the error that ended the request.
    """

    request: GenerateRequest
    prompt: Any = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    first_seed: int = field(init=False)
    samples: list[Sample] = field(init=False)
    done: "Future[None]" = field(init=False, default_factory=new_future)

    def __post_init__(self) -> None:
        name = self.request.request_id
        self.first_seed = self.request.params.first_seed()
        self.samples = [Sample(f"{name}/{index}", self.request, index) for index in range(self.request.num_samples)]

    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.stop_reason is None]


class RequestTable:
    """Every request that vLLM has been given and that has not returned.

    A sample is being decoded from its first token on, and after `forget_computed` from the next one on: until then its
    prompt is computed. The first samples of all are from their second token on, as the step for it may be compiled.
    Prompts that wait, or are computed, stop no other sample: a step of vLLM's serves what runs first, with
    `enable_chunked_prefill` or without.

    Source: vllm 0.32.0, vllm/v1/core/sched/scheduler.py (Scheduler.schedule).

    Args:
        eos_ids: of the model.

    Attributes:
        broken: why vLLM has failed as a whole; "" while it has not.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self.eos_ids, self.broken = eos_ids, ""
        self._decoding: set[str] = set()
        self._has_decoded = False
        self._requests: dict[str, RequestState] = {}
        self._by_sample: dict[str, tuple[RequestState, Sample]] = {}
        self._when_empty: list[Future[None]] = []
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self.num_running = self.num_waiting = self.num_tokens = 0

    @property
    def busy_s(self) -> float:
        """Seconds in which something was in flight."""
        since = self._busy_since_s
        return self._busy_s + (time.monotonic() - since if since is not None else 0.0)

    @property
    def num_decoding(self) -> int:
        """Samples that the next step must draw a token for."""
        return len(self._decoding) if self._has_decoded else 0

    def forget_computed(self) -> None:
        """Note that steps have stopped: keys and values of samples in flight may be computed anew when they resume."""
        self._decoding.clear()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> RequestState | None:
        return self._requests.get(request_id)

    def add(self, state: RequestState) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        self._requests[state.request.request_id] = state
        for sample in state.samples:
            self._by_sample[sample.sample_id] = state, sample
        self.num_waiting += len(state.samples)

    def push(self, sample_id: str, delta: Delta) -> None:
        """Add what a step drew. Unknown ids are of requests that have returned already."""
        if sample_id not in self._by_sample:
            return
        state, sample = self._by_sample[sample_id]
        if delta.ids and not sample.ids:
            self.num_waiting -= 1
            self.num_running += 1
        self.num_tokens += len(delta.ids)
        if delta.ids:
            self._has_decoded = self._has_decoded or sample_id in self._decoding
            self._decoding.add(sample_id)
        sample.push(delta, self.eos_ids)
        if sample.stop_reason is not None:
            self._leave(sample)
        if not state.unfinished():
            self._remove(state)
            state.done.set_result(None)

    def fail(self, sample_id: str, error: Exception) -> None:
        """End the request of a sample because vLLM has failed, or with "" all, and take no more."""
        failure = PeerFailedError("vLLM", f"{type(error).__name__}: {error}")
        failed = [self._by_sample[sample_id][0]] if sample_id in self._by_sample else []
        if not sample_id:
            failed, self.broken = list(self), str(failure)
        for state in failed:
            for sample in state.unfinished():
                self._leave(sample)
            self._remove(state)
            state.done.set_exception(failure)

    def when_empty(self) -> "Future[None]":
        future = new_future()
        self._when_empty.append(future)
        self._notify_empty()
        return future

    def _leave(self, sample: Sample) -> None:
        del self._by_sample[sample.sample_id]
        self._decoding.discard(sample.sample_id)
        if sample.ids:
            self.num_running -= 1
        else:
            self.num_waiting -= 1

    def _remove(self, state: RequestState) -> None:
        del self._requests[state.request.request_id]
        if not self._requests and self._busy_since_s is not None:
            self._busy_s, self._busy_since_s = self.busy_s, None
        self._notify_empty()

    def _notify_empty(self) -> None:
        if not self._requests:
            for future in self._when_empty:
                future.set_result(None)
            self._when_empty = []


class Requests:
    """Gives requests to a started engine, or holds them.

    Attributes:
        mode: how it is paused; None when it is not.
        asleep: what it has given back, "weights" and "kv_cache".
        unusable: why its weights cannot be served; "" while they can.
    """

    def __init__(
        self, form: EngineForm, workers: Workers, table: RequestTable, adapters: Adapters, max_model_len: int
    ) -> None:
        self._form, self._workers, self.table = form, workers, table
        self._adapters, self._max_model_len = adapters, max_model_len
        self._held: list[RequestState] = []
        self.mode: PauseMode | None = None
        self.asleep: set[str] = set()
        self.unusable = ""

    @property
    def num_waiting(self) -> int:
        return self.table.num_waiting + sum(len(one.samples) for one in self._held)

    def submit(self, state: RequestState) -> None:
        name, adapter = state.request.request_id, state.request.adapter
        if name in self.table or any(one.request.request_id == name for one in self._held):
            raise OffbeatError(f"request_id {name!r} is in flight already; give each request its own")
        self.refuse_if_broken()
        use = (adapter, self._adapters.number(adapter)) if adapter else None
        if self.mode is not None or self.asleep:
            self._held.append(state)
            return
        if self.unusable:
            raise WeightSyncError(f"the rollout engine has no usable weights: {self.unusable}; send a whole update")
        room = self._max_model_len - len(state.request.prompt_ids)
        self.table.add(state)
        for sample in state.samples:
            seed = state.first_seed + sample.index
            params = vllm_params(state.request.params, seed, self.table.eos_ids, room) | dict(state.changes)
            try:
                self._form.add(sample.sample_id, state.prompt, params, use)
            except Exception as error:  # noqa: BLE001 - the boundary: the caller of the request gets the error
                self.table.fail(sample.sample_id, error)
                self._form.abort([one.sample_id for one in state.samples[: sample.index]])
                return

    def abort(self, request_id: str) -> None:
        """End a request as it is. Unknown ids are ignored."""
        if (state := self.table.get(request_id)) is not None:
            self._end(state)
        for held in [one for one in self._held if one.request.request_id == request_id]:
            self._held.remove(held)
            held.done.set_result(None)

    def abort_all(self, adapter: str | None = None) -> None:
        """End what is in flight: everything, or what uses an adapter. What is held stays."""
        for state in self.table:
            if adapter in (None, state.request.adapter):
                self._end(state)

    def _end(self, state: RequestState) -> None:
        self._form.abort([sample.sample_id for sample in state.unfinished()])

    def end_all(self) -> None:
        self.abort_all()
        for state in self._held:
            state.done.set_result(None)
        self._held = []

    def use(self, adapter: str) -> bool:
        return any(state.request.adapter == adapter for state in [*self.table, *self._held])

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Hold what comes from now on; done when nothing is in flight."""
        self.mode = mode
        if mode == "abort":
            self.abort_all()
        return self.table.when_empty()

    def resume(self) -> None:
        self.mode = None
        held, self._held = self._held, []
        for state in held:
            try:
                self.submit(state)
            except OffbeatError as error:
                state.done.set_exception(error)

    def mark_unusable(self, adapter: str, reason: str) -> None:
        """Weights of two versions are mixed: serve nothing, or nothing with an adapter, until a whole update."""
        if adapter:
            self._adapters.mark_unusable(adapter, reason)
            self.abort_all(adapter)
        else:
            self.unusable = reason
            self.abort_all()

    def refuse_if_broken(self) -> None:
        if reason := self.table.broken or self._workers.lost:
            raise PeerFailedError("vLLM", f"{reason}; close this engine and make a new one")


def check_scores(request: ScoreRequest, capabilities: RolloutCapabilities, vocab_size: int, max_model_len: int) -> None:
    if not capabilities.scores:
        raise ConfigError(
            "vLLM with enable_lora cannot score: its adapters reckon with one row of logits for each request, and its "
            "worker ends when there are more; take an engine without enable_lora"
        )
    if request.temperature != 1.0:
        raise ConfigError(
            f"score request {request.request_id!r}: vLLM scores at temperature 1 only, got {request.temperature:g}; "
            "sample at 1 (rollout.temperature), or take another backend for the teacher, such as torch"
        )
    request.check(vocab_size, max_model_len - 1)
    request.check_images(capabilities, "rollout-vllm")


def score_requests(request: ScoreRequest) -> list[RequestState]:
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
    states = []
    for number, ids in enumerate(request.continuations):
        if len(ids):
            whole = np.concatenate([request.prompt_ids, ids])
            one = GenerateRequest(request_id=f"{request.request_id}/{number}", prompt_ids=whole, params=params)
            states.append(RequestState(one, whole.tolist(), PROMPT_LOGPROBS))
    return states


def read_scores(request: ScoreRequest, states: Sequence[RequestState]) -> list[Floats]:
    """Return one [T] float32 for each continuation; those without tokens had no request."""
    found = iter(states)
    return [
        np.asarray(next(found).samples[0].prompt_logprobs[-len(ids) :] if len(ids) else (), np.float32)
        for ids in request.continuations
    ]


MODEL = ""
"""The model without an adapter."""


class ServedVersions:
    """Policy versions by the labels of vLLM's that stand for them.

    vLLM labels tokens with one number for the whole engine, and here the model and each adapter have versions of their
    own: so the label counts updates, and this remembers what was served after each; label 0 is the start.
    """

    def __init__(self) -> None:
        self._after: list[dict[str, int]] = [{MODEL: 0}]

    @property
    def next_label(self) -> int:
        return len(self._after)

    def update(self, version: int, adapter: str = MODEL) -> None:
        """Note an update. One of the model changes what every adapter samples."""
        before = self._after[-1]
        self._after.append(dict.fromkeys(before, version) if adapter == MODEL else before | {adapter: version})

    def segments(self, spans: Iterable[tuple[int, int]], adapter: str = MODEL) -> list[tuple[int, int]]:
        """(version, number of tokens) from (label, number of tokens).

        Tokens under a label from before the adapter's first update have that of the model.
        """
        served = ((self._after[label], count) for label, count in spans)
        return [(versions.get(adapter, versions[MODEL]), count) for versions, count in served]
