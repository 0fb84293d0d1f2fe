"""Requests in flight and the samples they are made of."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from offbeat_rollout_torch._cache import Row
from offbeat_rollout_torch._text import StopStrings
from offbeat_rollout_torch._vision import Pictures
from offbeat_types import Completion, GenerateRequest, SamplingParams, StopReason, TellToken, VersionSegment


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What ends a sample, beyond its own parameters."""

    eos_ids: frozenset[int]
    max_model_len: int


class Sample:
    """One sample: the prompt, what has been drawn, and where its keys and values lie."""

    def __init__(self, request: "RequestInFlight", index: int, seed: int, stops: StopStrings | None) -> None:
        self.request, self.index, self.seed = request, index, seed
        self.params: SamplingParams = request.params
        self.tokens: list[int] = request.prompt.copy()
        self.logprobs: list[float] = []
        self.segments: list[list[int]] = []
        self.stop_reason: StopReason | None = None
        self.row: Row | None = None
        self._stops = stops

    @property
    def num_drawn(self) -> int:
        """Tokens sampled so far."""
        return len(self.logprobs)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are held."""
        return self.row.cached if self.row else 0

    @property
    def num_pending(self) -> int:
        """Tokens still to go through the model before the next can be drawn."""
        return len(self.tokens) - self.num_cached

    def push(self, token: int, logprob: float, version: int, ending: Ending) -> None:
        """Add a drawn token and decide whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.segments and self.segments[-1][0] == version:
            self.segments[-1][1] += 1
        else:
            self.segments.append([version, 1])
        text_ends = self._stops is not None and self._stops.push(token)
        if token in ending.eos_ids and not self.params.ignore_eos:
            self.stop_reason = "eos"
        elif text_ends or token in self.params.stop_token_ids:
            self.stop_reason = "stop"
        elif self.num_drawn >= self.params.max_tokens or len(self.tokens) >= ending.max_model_len:
            self.stop_reason = "length"
        if self.request.tell is not None:
            self.request.tell(self.index, token, logprob)

    def completion(self, tokenizer: Tokenizer) -> Completion:
        """Return what the sample became; unfinished ones are marked aborted."""
        ids = self.tokens[len(self.request.prompt) :]
        return Completion(
            ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            segments=tuple(VersionSegment(version=version, num_tokens=n) for version, n in self.segments),
            stop_reason=self.stop_reason or "aborted",
            text=tokenizer.decode(ids, skip_special_tokens=True),
        )


class RequestInFlight:
    """A request and its samples.

    Args:
        request: as asked.
        tokenizer: for stop strings and text.
        deliver: called once with the completions, or with the error that ended the request.
        pictures: the request's images, prepared; None without any.
        tell: called for each token in the engine's thread; None: nobody listens.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        deliver: Callable[[list[Completion] | Exception], None],
        pictures: Pictures | None = None,
        tell: TellToken | None = None,
    ) -> None:
        self.pictures, self.tell = pictures, tell
        self.request_id, self.params = request.request_id, request.params
        self.prompt: list[int] = np.asarray(request.prompt_ids).tolist()
        self._tokenizer, self._deliver = tokenizer, deliver
        seed = self.params.seed
        first = int.from_bytes(os.urandom(6), "little") if seed is None else seed
        self.samples = [
            Sample(self, i, first + i, StopStrings(tokenizer, self.params.stop) if self.params.stop else None)
            for i in range(request.num_samples)
        ]

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.stop_reason for sample in self.samples)

    def finish(self) -> None:
        """Hand the completions over."""
        self._deliver([sample.completion(self._tokenizer) for sample in self.samples])

    def fail(self, error: Exception) -> None:
        """Hand an error over."""
        self._deliver(error)
