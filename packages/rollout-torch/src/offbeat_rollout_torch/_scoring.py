"""Scores tokens that somebody else has sampled: prefills whose every token is asked for, in a cache of their own.

The prompt is computed once for all its continuations, as for samples. Shapes: N tokens of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat_rollout_torch._attention import Chunk, PrefillAttention, prefill_group
from offbeat_rollout_torch._cache import KVCache, Row
from offbeat_rollout_torch._decoder import decode_hidden, decode_logits
from offbeat_rollout_torch._sight import Stretch, sight_of, turns_of
from offbeat_rollout_torch._vision import Pictures
from offbeat_rollout_torch._weights import DecoderWeights
from offbeat_types import Floats, ModelError, ScoreRequest

HEAD_TOKENS: Final = 256
"""Logits are made for so many tokens at a time: all of a long pass would take more memory than the model."""


@dataclass
class _Run:
    """Tokens that go through the model one after the other in one row, and what each of them should predict."""

    row: Row
    ids: list[int]
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Scorer:
    """Scores one request.

    Args:
        weights: frozen.
        rotations_PC2: see `decode_hidden`.
        axes_C: the axis of each rotation, where positions have axes; else empty.
        cache: empty; its budget bounds how many continuations are scored together.
        max_prefill_tokens: tokens of one pass at most.
    """

    def __init__(
        self, weights: DecoderWeights, rotations_PC2: Tensor, axes_C: Tensor, cache: KVCache, max_prefill_tokens: int
    ) -> None:
        self._weights, self._rotations_PC2, self._axes_C, self._cache = weights, rotations_PC2, axes_C, cache
        self._max_tokens = max_prefill_tokens
        self._pictures: Pictures | None = None

    def score(self, request: ScoreRequest, pictures: Pictures | None = None) -> list[Floats]:
        """See `ScoringEngine.score`.

        Args:
            request: checked.
            pictures: its images, prepared.

        Raises:
            ModelError: the weights give logits that are not finite.
        """
        self._pictures = pictures
        prompt = np.asarray(request.prompt_ids).tolist()
        continuations = [np.asarray(ids).tolist() for ids in request.continuations]
        # The prompt's last token predicts the first of each continuation, so it goes with each of them.
        leader = _Run(self._cache.add(len(prompt)), prompt[:-1])
        self._run([leader], request.temperature)
        scored: list[_Run] = []
        while len(scored) < len(continuations):
            wave = self._start_wave(leader.row, prompt, continuations[len(scored) :])
            self._run(wave, request.temperature)
            for run in wave:
                self._cache.remove(run.row)
            scored += wave
        if not all(-1e30 < logprob <= 0 for run in scored for logprob in run.logprobs):
            raise ModelError("the weights give logits that are not finite; the model folder is damaged")
        return [np.asarray(run.logprobs, np.float32) for run in scored]

    def _start_wave(self, leader: Row, prompt: list[int], continuations: Sequence[list[int]]) -> list[_Run]:
        """As many continuations as the cache has room for, at least one; each holds what all of them share."""
        wave: list[_Run] = []
        for ids in continuations:
            length = len(prompt) + len(ids)
            if wave and not self._cache.fits(length):
                break
            fed = [prompt[-1], *ids[:-1]] if ids else []
            wave.append(_Run(self._cache.add(length), fed, list(ids)))
        if len(prompt) > 1:
            self._cache.share(leader, [run.row for run in wave], len(prompt) - 1)
        return wave

    def _run(self, runs: Sequence[_Run], temperature: float) -> None:
        """Take runs through the model to their ends."""
        while pending := [run for run in runs if run.ids]:
            budget, chosen = self._max_tokens, list[tuple[_Run, Chunk]]()
            for run in pending:
                if budget:
                    chosen.append((run, Chunk(run.row, min(len(run.ids), budget))))
                    budget -= chosen[-1][1].num_tokens
            self._pass(sorted(chosen, key=lambda pair: (prefill_group(pair[1]), pair[1].row.index)), temperature)

    def _pass(self, chosen: Sequence[tuple[_Run, Chunk]], temperature: float) -> None:
        self._cache.allocate()
        like = self._weights.final_norm
        attention = PrefillAttention([chunk for _, chunk in chosen], self._weights.architecture, like)
        ids = [token for run, chunk in chosen for token in run.ids[: chunk.num_tokens]]
        ids_N = torch.tensor(ids, device=like.device)
        runs = [Stretch(self._pictures, chunk.row.cached, chunk.num_tokens) for _, chunk in chosen]
        turns = turns_of(runs, self._rotations_PC2, self._axes_C)
        sight = sight_of(runs, self._weights.tower, like.device)
        hidden = decode_hidden(self._weights, ids_N, self._rotations_PC2, attention, turns_NC2=turns, sight=sight)
        targets = [token for run, chunk in chosen for token in _next(run.targets, len(run.logprobs), chunk)]
        logprobs = self._logprobs(hidden, targets, temperature) if targets else []
        for run, chunk in chosen:
            chunk.row.cached += chunk.num_tokens
            run.ids = run.ids[chunk.num_tokens :]
            if run.targets:
                run.logprobs += logprobs[: chunk.num_tokens]
                logprobs = logprobs[chunk.num_tokens :]

    def _logprobs(self, hidden: Tensor, targets: list[int], temperature: float) -> list[float]:
        found: list[float] = []
        for start in range(0, len(targets), HEAD_TOKENS):
            wanted = torch.tensor(targets[start : start + HEAD_TOKENS], device=hidden.device)
            logits = decode_logits(self._weights, hidden[start : start + HEAD_TOKENS]).div_(temperature)
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            # Rounding may lift the difference of two nearly equal numbers above 0.
            found += (chosen - logits.logsumexp(-1)).clamp_(max=0).tolist()
        return found


def _next(targets: list[int], num_done: int, chunk: Chunk) -> list[int]:
    return targets[num_done : num_done + chunk.num_tokens]
