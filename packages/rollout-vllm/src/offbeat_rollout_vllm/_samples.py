"""Requests in flight and their samples, put together from what vLLM sends a step at a time. Nothing of vLLM here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat_types import Completion, GenerateRequest, StopReason, VersionSegment

Decode = Callable[[Sequence[int]], str]
Versions = Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int, int]]]
"""From (vLLM's label, number of tokens) to (policy version, number of tokens)."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to a sample.

    Args:
        ids: new tokens.
        logprobs: of each.
        label: vLLM's, of what sampled them; None while it is not known.
        spans: with the last step, where `label` is None: (label, number of tokens) of the whole sample.
        finish_reason: vLLM's, when the sample has ended: "stop", "length", "abort".
        stop_string: the string that ended it, or "".
        prompt_logprobs: where they were asked for, of the prompt's tokens from the second on; else empty.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    label: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    finish_reason: str | None = None
    stop_string: str = ""
    prompt_logprobs: Sequence[float] = ()


class Sample:
    """One sample: what has been drawn so far, and under which labels of vLLM's."""

    def __init__(self, sample_id: str, request: GenerateRequest, index: int) -> None:
        self.sample_id, self.request, self.index = sample_id, request, index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: Sequence[float] = ()
        self.segments: list[tuple[int, int]] = []
        self.stop_reason: StopReason | None = None

    def push(self, delta: Delta, eos_ids: frozenset[int]) -> None:
        """Add what a step drew."""
        self.ids.extend(delta.ids)
        self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.label is not None and delta.ids:
            self._extend_segments(delta.label, len(delta.ids))
        if delta.spans:
            self.segments = list(delta.spans)
        if delta.finish_reason is not None:
            self.stop_reason = self._why(delta, eos_ids)

    def _extend_segments(self, label: int, count: int) -> None:
        if self.segments and self.segments[-1][0] == label:
            count += self.segments.pop()[1]
        self.segments.append((label, count))

    def _why(self, delta: Delta, eos_ids: frozenset[int]) -> StopReason:
        if delta.finish_reason == "abort":
            return "aborted"
        if delta.finish_reason == "length":
            return "length"
        ended_by_eos = bool(self.ids) and self.ids[-1] in eos_ids and not self.request.params.ignore_eos
        return "eos" if ended_by_eos and not delta.stop_string else "stop"

    def completion(self, decode: Decode, versions: Versions) -> Completion:
        """What the sample became; unfinished ones are marked aborted."""
        return Completion(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            segments=tuple(
                VersionSegment(version=version, num_tokens=count) for version, count in versions(self.segments)
            ),
            stop_reason=self.stop_reason or "aborted",
            text=decode(self.ids),
        )
