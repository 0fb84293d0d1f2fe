"""Requests in flight and their samples: which run, which wait, what was asked, and what each sample has become."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from tokenizers import Tokenizer

from offbeat_core import (
    Completion,
    ConfigError,
    DeadlineError,
    OffbeatError,
    PeerFailedError,
    SamplingParams,
    StopReason,
)
from offbeat_rollout_trtllm._local_link import Delta

SEED_MASK: Final = (1 << 64) - 1
MAX_TOP_K: Final = 1024
"""Source: TOP_K_MAX and clampTopK in cpp/tensorrt_llm/kernels/samplingTopKKernels.h (stored 264519637)."""


def to_engine_params(params: SamplingParams, *, seed: int, eos_ids: Iterable[int], max_tokens: int) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's SamplingParams for one sample.

    top_k and top_p are always given. The C++ runtime's defaults are topK = 0 and topP = 0.0, and it takes the two
    together for greedy decoding, whatever the temperature; tensorrt_llm/sampling_params.py, which says that top_p
    defaults to 1, passes None on. topK = 0 with topP = 1 is the whole distribution.
    Source: getTopK and getTopP in cpp/include/tensorrt_llm/layers/defaultDecodingParams.h (21c8b6d4);
    regularizeTopKTopP in cpp/tensorrt_llm/kernels/samplingTopKKernels.h (stored 264519637), called by
    cpp/tensorrt_llm/layers/topKSamplingLayer.cpp (89fd9b74) and topPSamplingLayer.cpp (57fc4a8a);
    SamplingParams._get_sampling_config (a98a9061).

    A seed is always given: the engine's own would come from one generator, which starts alike in every process.
    Source: generateRandomSeed in cpp/include/tensorrt_llm/layers/defaultDecodingParams.h, called by
    cpp/include/tensorrt_llm/runtime/samplingConfig.h.

    The end of sequence is given as a stop token, for then the token stays in the output; stop strings are found by the
    adapter, because the engine compares tokens and would miss a string that lies across a token border.
    """
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    chosen: dict[str, Any] = {
        "end_id": -1,
        "pad_id": min(eos_ids, default=0),
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(ends) or None,
        "include_stop_str_in_output": True,
        "seed": seed & SEED_MASK,
        "logprobs": 1,
        "detokenize": False,
        "add_special_tokens": False,
    }
    if params.temperature == 0:
        return chosen | {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
    chosen |= {"top_k": params.top_k, "top_p": params.top_p, "temperature": params.temperature}
    return chosen | ({"min_p": params.min_p} if params.min_p else {})


def check_cut(params: SamplingParams, *, allow_cut: bool) -> None:
    """Refuse a cut that the engine would change, and one that its log-probabilities do not show, if not allowed."""
    if params.top_k > MAX_TOP_K:
        raise ConfigError(f"top_k must be at most {MAX_TOP_K}, to which TensorRT-LLM clips it, got {params.top_k}")
    is_cut = params.top_p < 1 or params.top_k > 1 or params.min_p > 0
    if params.temperature and is_cut and not allow_cut:
        raise ConfigError(
            "top_p, top_k and min_p cut the distribution, and TensorRT-LLM 1.2 gives log-probabilities before the cut: "
            "leave them out, or set the option allow_cut_sampling where the log-probabilities are not used"
        )


LOOK_BACK_TOKENS: Final = 8
"""Decoded before a possible stop string, so that characters of several tokens are whole."""


class Sample:
    """Adds up the deltas of one sample."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._stops, self._tokenizer = params.stop, tokenizer
        self._eos_ids = (frozenset() if params.ignore_eos else eos_ids) - frozenset(params.stop_token_ids)
        self._window = max((len(stop.encode()) for stop in params.stop), default=0) + LOOK_BACK_TOKENS
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.ended: StopReason | None = None

    def add(self, delta: Delta) -> int:
        """Take what came; returns how many of its tokens count. After a stop string `ended` is set, and none do."""
        for number, (token, logprob) in enumerate(zip(delta.ids, delta.logprobs, strict=True)):
            if self.ended:
                return number
            self.ids.append(token)
            self._logprobs.append(logprob)
            self._versions.append(delta.version)
            if self._stops and self._holds_stop():
                self.ended = "stop"
        if self.ended is None and delta.ended:
            self.ended = self._reason(delta)
        return len(delta.ids)

    def completion(self) -> Completion:
        """Return what it has become; `aborted` if it has not ended."""
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        return Completion.join(self.ids, self._logprobs, [(version, 1) for version in self._versions], self.ended, text)

    def _holds_stop(self) -> bool:
        # Special tokens count as text here, so that "<|im_end|>" can stop a sample.
        text = self._tokenizer.decode(self.ids[-self._window :], skip_special_tokens=False)
        return any(stop in text for stop in self._stops)

    def _reason(self, delta: Delta) -> StopReason:
        match delta.ended:
            case "stop":
                last = self.ids[-1] if self.ids else delta.stop_reason
                return "eos" if last in self._eos_ids else "stop"
            case "length":
                return "length"
            case "cancelled" | "timeout":
                return "aborted"
        raise PeerFailedError("TensorRT-LLM", f"a sample ended for an unknown reason: {delta.ended!r}")


class InFlight:
    """Counts samples, lets them in while the gate is open, and knows when none is left.

    A request waits here while the engine is paused, sleeps or takes weights. `busy_s` counts the time in which at least
    one sample was being decoded.

    A sample is being decoded from its first token on. The first samples of all are from their second token on, as the
    engine may get its kernels ready for it.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.num_running = self.num_waiting = self.num_tokens = 0
        self._decoding: set[str] = set()
        self._has_decoded = False
        self._shut: set[str] = set()
        self._changed = asyncio.Event()
        self._busy_s, self._busy_since_s = 0.0, 0.0
        self._aborts: dict[str, asyncio.Event] = {}

    @property
    def busy_s(self) -> float:
        return self._busy_s + (time.monotonic() - self._busy_since_s if self.num_running else 0.0)

    @property
    def num_decoding(self) -> int:
        """Samples that the engine must soon send a token of."""
        return len(self._decoding) if self._has_decoded else 0

    def note_tokens(self, sample_id: str, count: int) -> None:
        """Count tokens that have come for a sample."""
        self.num_tokens += count
        if count:
            self._has_decoded = self._has_decoded or sample_id in self._decoding
            self._decoding.add(sample_id)

    def forget_sample(self, sample_id: str) -> None:
        """Note that no more tokens of a sample are to come."""
        self._decoding.discard(sample_id)

    @property
    def request_ids(self) -> list[str]:
        return list(self._aborts)

    def shut(self, reason: str) -> None:
        """Admit no request until `open` of the same reason."""
        self._shut.add(reason)

    def open(self, reason: str) -> None:
        """Take this reason back; waiting requests are admitted when none is left."""
        self._shut.discard(reason)
        self._notify()

    @asynccontextmanager
    async def request(self, request_id: str) -> AsyncIterator[asyncio.Event]:
        """A request's life; the event is set when it is to end."""
        if request_id in self._aborts:
            raise OffbeatError(f"request_id {request_id!r} is in flight already; give each request its own")
        self._aborts[request_id] = aborted = asyncio.Event()
        try:
            yield aborted
        finally:
            del self._aborts[request_id]

    def abort(self, request_id: str) -> None:
        """Ask a request to end; unknown ids are ignored."""
        if (aborted := self._aborts.get(request_id)) is not None:
            aborted.set()
            self._notify()

    @asynccontextmanager
    async def sampling(self, aborted: asyncio.Event) -> AsyncIterator[bool]:
        """A sample's time at the engine; False if it was aborted before it got there."""
        self.num_waiting += 1
        try:
            while self._shut and not aborted.is_set():
                await self._next_change()
        finally:
            self.num_waiting -= 1
        if aborted.is_set():
            yield False
            return
        if not self.num_running:
            self._busy_since_s = time.monotonic()
        self.num_running += 1
        try:
            yield True
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._busy_s += time.monotonic() - self._busy_since_s
            self._notify()

    async def drained(self, waiting: str, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while self.num_running:
                    await self._next_change()
        except TimeoutError as error:
            raise DeadlineError(waiting, f"{self.num_running} samples in flight", deadline_s) from error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()
