"""One sample as it grows: tokens, log-probabilities, versions, and the stop string that ends it."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from offbeat_rollout_trtllm._links import Delta
from offbeat_types import Completion, PeerFailedError, SamplingParams, StopReason, VersionSegment

LOOK_BACK_TOKENS: Final = 8
"""Decoded before a possible stop string, so that characters of several tokens are whole."""


class Sample:
    """Adds up the deltas of one sample.

    Args:
        params: what was asked for.
        eos_ids: tokens that end a sample as `eos`.
        tokenizer: for stop strings and text.
    """

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._stops, self._tokenizer = params.stop, tokenizer
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids) - frozenset(params.stop_token_ids)
        self._window = max((len(stop.encode()) for stop in params.stop), default=0) + LOOK_BACK_TOKENS
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._segments: list[VersionSegment] = []
        self.ended: StopReason | None = None

    def add(self, delta: Delta) -> int:
        """Take what came; returns how many of its tokens count. After a stop string `ended` is set, and none do."""
        for number, (token, logprob) in enumerate(zip(delta.ids, delta.logprobs, strict=True)):
            if self.ended:
                return number
            self.ids.append(token)
            self._logprobs.append(logprob)
            self._count(delta.version)
            if self._stops and self._holds_stop():
                self.ended = "stop"
        if self.ended is None and delta.ended:
            self.ended = self._reason(delta)
        return len(delta.ids)

    def completion(self) -> Completion:
        """What it has become; `aborted` if it has not ended."""
        return Completion(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self._logprobs, np.float32),
            segments=tuple(self._segments),
            stop_reason=self.ended or "aborted",
            text=self._tokenizer.decode(self.ids, skip_special_tokens=True),
        )

    def _count(self, version: int) -> None:
        num_tokens = 1
        if self._segments and self._segments[-1].version == version:
            num_tokens += self._segments.pop().num_tokens
        self._segments.append(VersionSegment(version=version, num_tokens=num_tokens))

    def _holds_stop(self) -> bool:
        text = self._tokenizer.decode(self.ids[-self._window :], skip_special_tokens=True)
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
