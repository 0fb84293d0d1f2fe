"""One pass through the model: a step of generation, or scores of given tokens.

Shapes: N tokens of a pass.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat_core import Floats, ModelError, ScoreRequest
from offbeat_rollout_torch._adapters import Adapters
from offbeat_rollout_torch._attention import (
    Attention,
    Chunk,
    DecodeAttention,
    PrefillAttention,
    prefill_group,
)
from offbeat_rollout_torch._cache import KVCache, Row
from offbeat_rollout_torch._decoder import DecoderWeights, decode_hidden, decode_logits
from offbeat_rollout_torch._families import rotations
from offbeat_rollout_torch._images import RequestImages, TokenRange, gather_image_inputs, token_rotations
from offbeat_rollout_torch._inspection import NO_NOTES, PointNotes
from offbeat_rollout_torch._sampling import draw, exact_logprobs, scaled, uniforms
from offbeat_rollout_torch._scheduler import Sample, Scheduler, StopCriteria
from offbeat_rollout_torch._static_rows.decoder import StaticDecoder, StepInFlight

HEAD_TOKENS: Final = 256
"""Scores' logits are made for so many tokens at a time: all of a long pass would take more memory than the model."""


class ModelRunner:
    """Runs what the scheduler chooses.

    Args:
        scheduler: of the samples.
        weights: frozen.
        stop_criteria: of the engine.
        static: decodes where it can, one step ahead of what the samples know; over the scheduler's cache. None: every
            step is read before the next.
        notes_routes: samples learn which experts their tokens took.

    Attributes:
        num_decoding: samples that the present step draws a token for; 0 in a prefill. Other threads read it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        weights: DecoderWeights,
        stop_criteria: StopCriteria,
        static: StaticDecoder | None = None,
        *,
        notes_routes: bool = False,
    ) -> None:
        self._notes_routes = notes_routes
        self.scheduler, self.weights, self._stop_criteria = scheduler, weights, stop_criteria
        self._static = static
        self._in_flight: StepInFlight | None = None
        self.adapters = Adapters()
        self.num_tokens, self.num_prefilled, self.busy_s = 0, 0, 0.0
        self.num_decoding = 0
        self._device = weights.final_norm.device
        self._rotations = rotations(weights.architecture, stop_criteria.max_model_len).to(self._device)
        self._axes = torch.tensor(weights.architecture.axes, dtype=torch.int64, device=self._device)

    @property
    def version(self) -> int:
        """Version of the last update, of the model or of an adapter."""
        return self.adapters.last_version

    def step(self) -> None:
        """Prefill or decode once, or read what is in flight. Afterwards ask the scheduler to `retire`."""
        start_s = time.monotonic()
        scheduler = self.scheduler
        # Before others are admitted: these must not take the room that running samples need to grow.
        scheduler.make_room()
        scheduler.admit()
        scheduler.copy_prompts()
        is_plain = not any(one.request.adapter or one.request.images is not None for one in scheduler.running)
        if self._static is not None and is_plain:
            self._step_ahead(self._static)
        elif self._in_flight is not None:  # others begin with what the host knows
            self.settle()
        elif chunks := scheduler.prefill_chunks():
            self.num_decoding = 0
            self._draw_along(*self._prefill(chunks))
        else:
            self.num_decoding = len(scheduler.running)
            self._decode()
        self.busy_s += time.monotonic() - start_s

    def settle(self) -> None:
        """Read what is in flight, so that every sample has all its tokens. Afterwards ask the scheduler to `retire`."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        # Others have ended, or were aborted, or waited.
        drawn = [
            (sample, token, logprob)
            for sample, token, logprob in zip(step.samples, step.ids().tolist(), step.logprobs().tolist(), strict=True)
            if sample is not None and sample.row is not None
        ]
        if drawn:
            self._push(*zip(*drawn, strict=True))

    def release_cache(self) -> None:
        """Give the memory of keys and values back, and that of recorded steps unless these stay where they are."""
        self.scheduler.cache.release()
        if self._static is not None and not self._static.cache.keeps_addresses:
            self._static.forget()

    def restore_cache(self) -> None:
        """Have the memory of keys and values again that has a size of its own; other comes as it is needed."""
        if self._static is not None:
            self._static.cache.restore()

    def release_weights(self) -> None:
        """Give the memory of the weights back, and that of recorded steps unless these stay where they are."""
        self.weights.release()
        if self._static is not None and not self.weights.keeps_addresses:
            self._static.forget()

    def score(
        self,
        request: ScoreRequest,
        images: RequestImages | None = None,
        adapter: str = "",
        notes: PointNotes = NO_NOTES,
    ) -> list[Floats]:
        """Score tokens that others have sampled, in a cache that goes when it is done.

        It has the room that the samples leave; where that is too little they give up theirs, and are computed again.
        """
        start_s = time.monotonic()
        weights, samples = self.weights, self.scheduler.cache
        longest = samples.cost(request.longest)
        samples.make_free(2 * longest)  # the prompt, and one continuation
        if samples.allocated_tokens + 2 * longest > samples.budget_tokens:
            self.release_cache()
        room = samples.budget_tokens - samples.allocated_tokens
        cache = KVCache(weights.architecture, room, self._stop_criteria.max_model_len, weights.final_norm)
        scores = _Scorer(self, cache, images, request.temperature, adapter, notes).score(request)
        self.busy_s += time.monotonic() - start_s
        return scores

    def forward(
        self,
        ids: list[int],
        attention: Attention,
        ranges: Sequence[TokenRange],
        samples: Sequence[Sample] = (),
        adapter: str = "",
        notes: PointNotes = NO_NOTES,
    ) -> Tensor:
        """[N, hidden] of the tokens of a pass, which lie where `ranges` says and belong to these samples.

        Tokens of no sample have the adapter that is named here.
        """
        names = [sample.request.adapter for sample in samples] or [adapter] * len(ranges)
        uses = [(name, each.num_tokens) for name, each in zip(names, ranges, strict=True)]
        routes: list[Tensor] | None = [] if self._notes_routes and samples else None
        hidden = decode_hidden(
            self.weights,
            torch.tensor(ids, device=self._device),
            self._rotations,
            attention,
            rotations_NC2=token_rotations(ranges, self._rotations, self._axes),
            image_inputs=gather_image_inputs(ranges, self.weights.tower, self._device),
            adapters=self.adapters.rows(uses, self._device),
            routes=routes,
            notes=notes,
        )
        if routes:
            ids_NLK = torch.stack(routes, 1).to(torch.int16).cpu().numpy()
            parts = np.split(ids_NLK, np.cumsum([each.num_tokens for each in ranges])[:-1])
            for sample, each, part in zip(samples, ranges, parts, strict=True):
                sample.note_routes(each.first, part)
        return hidden

    def _step_ahead(self, static: StaticDecoder) -> None:
        """Queue some of the prompts that wait, and the next decoding step beside them.

        The device does both after what is in flight, and nothing here waits for it: the last token of a prompt is left
        to a decoding step, which draws from it.
        """
        chunks = self.scheduler.prefill_chunks_ahead()
        if chunks:
            self._prefill_ahead(static, chunks)
            self.scheduler.copy_prompts()  # to the others of a group, which begin with the first of it
        order = [None if one.num_pending > 1 else one for one in self.scheduler.decode_order()]
        self.num_decoding = sum(one is not None for one in order)
        if self.num_decoding:
            self._decode_ahead(static, order)

    def _prefill_ahead(self, static: StaticDecoder, chosen: Sequence[tuple[Sample, Chunk]]) -> None:
        """Queue chunks of prompts, in passes that can be recorded where the device records work."""
        if not static.records:
            self._prefill(chosen)
            return
        self.scheduler.cache.allocate()
        static.prefill(self.weights, self._rotations, chosen)
        for _, chunk in chosen:
            chunk.row.cached += chunk.num_tokens
            self.num_prefilled += chunk.num_tokens

    def _decode_ahead(self, static: StaticDecoder, order: Sequence[Sample | None]) -> None:
        """Queue the next step, and only then read the one in flight."""
        samples, before = [one for one in order if one is not None], self._in_flight
        # The step in flight ends all of them, so there is nothing to draw after it.
        if all(not one.num_pending and one.is_full(self._stop_criteria, 1) for one in samples):
            self.settle()
            return
        self.scheduler.cache.allocate()
        started = static.start(self.weights, self._rotations, order, before.samples if before else ())
        for sample in samples:
            assert sample.row is not None
            sample.row.cached += 1
        self.settle()
        # A step of samples that have all ended meanwhile is thrown away unread.
        if not all(one.stop_reason for one in samples):
            self._in_flight = started

    def _decode(self) -> None:
        scheduler = self.scheduler
        samples = scheduler.decode_order()
        scheduler.cache.allocate()
        weights, bands = self.weights, scheduler.cache.sample_bands
        attention = DecodeAttention(bands, weights.architecture, weights.final_norm, exact=weights.exact)
        ids = [sample.tokens[-1] for sample in samples]
        ranges = [TokenRange(sample.request.images, sample.num_cached, 1) for sample in samples]
        hidden = self.forward(ids, attention, ranges, samples)
        for sample in samples:
            assert sample.row is not None
            sample.row.cached += 1
        self._draw(samples, hidden)

    def _prefill(self, chosen: Sequence[tuple[Sample, Chunk]]) -> tuple[list[tuple[Sample, int]], Tensor]:
        """Take chunks of prompts through the model.

        Returns:
            Samples whose last token was among them, each with its place, and the hidden values, [tokens, hidden].
        """
        samples, chunks = zip(*chosen, strict=True)
        self.scheduler.cache.allocate()
        weights = self.weights
        attention = PrefillAttention(chunks, weights.architecture, weights.final_norm, exact=weights.exact)
        ids: list[int] = []
        for sample, chunk in chosen:
            ids += sample.tokens[chunk.row.end : chunk.row.end + chunk.num_tokens]
        ranges = [TokenRange(sample.request.images, chunk.row.end, chunk.num_tokens) for sample, chunk in chosen]
        hidden = self.forward(ids, attention, ranges, samples)
        self.num_prefilled += len(ids)
        ended: list[tuple[Sample, int]] = []
        end = -1
        for sample, chunk in chosen:
            end += chunk.num_tokens
            chunk.row.cached += chunk.num_tokens
            if not sample.num_pending:
                ended.append((sample, end))
        return ended, hidden

    def _draw_along(self, ended: Sequence[tuple[Sample, int]], hidden: Tensor) -> None:
        """Draw the first token of samples whose prompt has ended, and of those of their group that wait for it."""
        ready = [(one, end) for sample, end in ended for one in (sample, *self.scheduler.draw_along(sample))]
        if ready:
            samples, ends = zip(*ready, strict=True)
            self._draw(samples, hidden.index_select(0, torch.tensor(ends, device=self._device)))

    def _draw(self, samples: Sequence[Sample], hidden: Tensor) -> None:
        logits = decode_logits(self.weights, hidden)
        numbers = uniforms([one.seed for one in samples], [one.num_drawn for one in samples])
        drawn = draw(logits, [one.params for one in samples], numbers, exact=self.weights.exact)
        self._push(samples, drawn.ids, drawn.logprobs)

    def _push(self, samples: Sequence[Sample], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add a token to each sample."""
        # Written so that NaN, for which every comparison is false, is refused too.
        if not all(-1e30 < logprob <= 0 for logprob in logprobs):
            raise ModelError(
                f"the weights of version {self.version} give logits that are not finite; "
                "training has diverged or the model folder is damaged"
            )
        for sample, token, logprob in zip(samples, ids, logprobs, strict=True):
            version = self.adapters.version_of(sample.request.adapter)
            sample.push(token, logprob, version, self._stop_criteria)
        self.num_tokens += len(samples)


@dataclass
class _ScoredTokens:
    """Tokens that go through the model one after the other in one row, and what each of them should predict."""

    row: Row
    ids: list[int]
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Scorer:
    """Scores one request by prefills whose every token is asked for; the prompt is computed once for all continuations.

    Args:
        runner: runs the passes.
        cache: empty; its budget bounds how many continuations are scored together.
        images: of the prompt.
        temperature: of the scores.
        adapter: of all tokens.
        notes: takes what is computed on the way.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        images: RequestImages | None,
        temperature: float,
        adapter: str,
        notes: PointNotes,
    ) -> None:
        self._runner, self._cache, self._images, self._temperature = runner, cache, images, temperature
        self._adapter, self._notes = adapter, notes

    def score(self, request: ScoreRequest) -> list[Floats]:
        prompt = np.asarray(request.prompt_ids).tolist()
        continuations = [np.asarray(ids).tolist() for ids in request.continuations]
        # The prompt's last token predicts the first of each continuation, so it goes with each of them.
        leader = _ScoredTokens(self._cache.add(len(prompt)), prompt[:-1])
        self._run([leader])
        scored: list[_ScoredTokens] = []
        while len(scored) < len(continuations):
            wave = self._start_wave(leader.row, prompt, continuations[len(scored) :])
            self._run(wave)
            for one in wave:
                self._cache.remove(one.row)
            scored += wave
        if not all(-1e30 < logprob <= 0 for one in scored for logprob in one.logprobs):
            raise ModelError("the weights give logits that are not finite; the model folder is damaged")
        return [np.asarray(one.logprobs, np.float32) for one in scored]

    def _start_wave(self, leader: Row, prompt: list[int], continuations: Sequence[list[int]]) -> list[_ScoredTokens]:
        """As many continuations as the cache has room for, at least one; each holds what all of them share."""
        wave: list[_ScoredTokens] = []
        for ids in continuations:
            length = len(prompt) + len(ids)
            if wave and not self._cache.fits(length):
                break
            # Each token predicts the next; what the last one predicts is not asked for.
            fed = [prompt[-1], *ids[:-1]] if ids else []
            wave.append(_ScoredTokens(self._cache.add(length), fed, list(ids)))
        if len(prompt) > 1:
            self._cache.share(leader, [one.row for one in wave], len(prompt) - 1)
        return wave

    def _run(self, wave: Sequence[_ScoredTokens]) -> None:
        """Take tokens through the model to their ends."""
        while pending := [one for one in wave if one.ids]:
            budget, chosen = self._runner.scheduler.max_prefill_tokens, list[tuple[_ScoredTokens, Chunk]]()
            for one in pending:
                if budget:
                    chosen.append((one, Chunk(one.row, min(len(one.ids), budget))))
                    budget -= chosen[-1][1].num_tokens
            self._pass(sorted(chosen, key=lambda pair: (prefill_group(pair[1]), pair[1].row.index)))

    def _pass(self, chosen: Sequence[tuple[_ScoredTokens, Chunk]]) -> None:
        self._cache.allocate()
        weights = self._runner.weights
        chunks = [chunk for _, chunk in chosen]
        attention = PrefillAttention(chunks, weights.architecture, weights.final_norm, exact=weights.exact)
        ids = [token for one, chunk in chosen for token in one.ids[: chunk.num_tokens]]
        ranges = [TokenRange(self._images, chunk.row.cached, chunk.num_tokens) for _, chunk in chosen]
        hidden = self._runner.forward(ids, attention, ranges, adapter=self._adapter, notes=self._notes)
        targets: list[int] = []
        for one, chunk in chosen:
            targets += one.targets[len(one.logprobs) : len(one.logprobs) + chunk.num_tokens]
        logprobs = self._logprobs(hidden, targets)
        for one, chunk in chosen:
            chunk.row.cached += chunk.num_tokens
            one.ids = one.ids[chunk.num_tokens :]
            if one.targets:
                one.logprobs += logprobs[: chunk.num_tokens]
                logprobs = logprobs[chunk.num_tokens :]

    def _logprobs(self, hidden: Tensor, targets: list[int]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(targets), HEAD_TOKENS):
            wanted = torch.tensor(targets[start : start + HEAD_TOKENS], device=hidden.device)
            weights, some = self._runner.weights, hidden[start : start + HEAD_TOKENS]
            logits = scaled(
                decode_logits(weights, some, self._notes), [self._temperature] * len(some), exact=weights.exact
            )
            if weights.exact:
                found += exact_logprobs(logits, wanted).tolist()
                continue
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            # Rounding may lift the difference of two nearly equal numbers above 0.
            found += (chosen - logits.logsumexp(-1)).clamp_(max=0).tolist()
        return found
