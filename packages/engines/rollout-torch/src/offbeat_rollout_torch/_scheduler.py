"""Requests in flight, the samples they are made of, and which of these the next forward pass computes."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from offbeat_core import (
    Completion,
    GenerateRequest,
    OnToken,
    RouteIds,
    Routes,
    SamplingParams,
    StopReason,
    new_future,
)
from offbeat_rollout_torch._attention import Chunk, prefill_group
from offbeat_rollout_torch._cache import KVCache, Prefix, Row
from offbeat_rollout_torch._images import RequestImages


class StopStrings:
    """Finds stop strings in a sample's text; special tokens count as text, so that "<|im_end|>" can stop a sample."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=False)
        # So much of a stop string may lie before the piece that completes it.
        self._keep = max(map(len, stops)) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Add one token; say whether a stop string is complete. Bytes of an unfinished character are held back."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[-self._keep :] if self._keep else ""
        return any(stop in text for stop in self._stops)


@dataclass(frozen=True, kw_only=True)
class StopCriteria:
    """Criteria that end a sample, beyond its own parameters."""

    eos_ids: frozenset[int]
    max_model_len: int


class Sample:
    """One sample: the prompt, what has been drawn, and where its keys and values lie."""

    def __init__(self, request: "RequestState", index: int, seed: int, stops: StopStrings | None) -> None:
        self.request, self.index, self.seed = request, index, seed
        self.params: SamplingParams = request.params
        self.tokens: list[int] = request.prompt.copy()
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_reason: StopReason | None = None
        self.row: Row | None = None
        self._stops = stops
        self._routes: list[tuple[int, RouteIds]] = []

    @property
    def num_drawn(self) -> int:
        return len(self.logprobs)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are held."""
        return self.row.end if self.row else 0

    @property
    def num_pending(self) -> int:
        """Tokens still to go through the model before the next can be drawn."""
        return len(self.tokens) - self.num_cached

    def push(self, token: int, logprob: float, version: int, criteria: StopCriteria) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        text_ends = self._stops is not None and self._stops.push(token)
        if token in criteria.eos_ids and not self.params.ignore_eos:
            self.stop_reason = "eos"
        elif text_ends or token in self.params.stop_token_ids:
            self.stop_reason = "stop"
        elif self.is_full(criteria):
            self.stop_reason = "length"
        if self.request.notify is not None:
            self.request.notify(self.index, token, logprob)

    def note_routes(self, start: int, ids_NLK: RouteIds) -> None:
        """Remember the experts of tokens just computed, the first of them at `start` in prompt and completion.

        A token keeps the route by which the one after it was drawn. What is computed again since then, under new
        weights or for lack of room, does not count; before the first draw, what came before does not.
        """
        lists = [self._routes] if start >= len(self.request.prompt) else [self._routes, self.request.routes]
        for each in lists:
            each.insert(len(each) if self.num_drawn else 0, (start, ids_NLK))

    def routes(self) -> Routes | None:
        """Return what is known of its tokens; of a prompt, what others of its request have computed as well."""
        noted = [*self._routes, *self.request.routes]
        if not noted:
            return None
        found = np.full((len(self.tokens), *noted[0][1].shape[1:]), -1, np.int16)
        for start, ids_NLK in noted:
            here = found[start : start + len(ids_NLK)]
            unknown = here[:, 0, 0] < 0
            here[unknown] = ids_NLK[: len(here)][unknown]
        return Routes.pack(found)

    def is_full(self, criteria: StopCriteria, num_more: int = 0) -> bool:
        """Return whether it may draw no further token after so many more."""
        if self.num_drawn + num_more >= self.params.max_tokens:
            return True
        return len(self.tokens) + num_more >= criteria.max_model_len

    def completion(self, tokenizer: Tokenizer) -> Completion:
        ids = self.tokens[len(self.request.prompt) :]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        runs = [(version, 1) for version in self.versions]
        return Completion.join(ids, self.logprobs, runs, self.stop_reason, text, self.routes())


class RequestState:
    """A request and its samples.

    Args:
        request: as asked.
        tokenizer: for stop strings and text.
        images: the request's images, prepared; None without any.
        notify: called for each token in the engine's thread; None: no caller wants them.

    Attributes:
        prefix: what its samples share of a long prompt, while one of them has a row: all but the last token, which
            each sample computes for itself and draws from. A short prompt is computed by one sample and copied.
        routes: of tokens of the prompt, by where they begin; see `Sample.note_routes`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        images: RequestImages | None = None,
        notify: OnToken | None = None,
    ) -> None:
        self.images, self.notify = images, notify
        self.request_id, self.params, self.adapter = request.request_id, request.params, request.adapter
        self.prompt: list[int] = np.asarray(request.prompt_ids).tolist()
        self.prefix: Prefix | None = None
        self.routes: list[tuple[int, RouteIds]] = []
        self.done: Future[list[Completion]] = new_future()
        self._tokenizer, first, stop = tokenizer, self.params.first_seed(), self.params.stop
        self.samples = [
            Sample(self, i, first + i, StopStrings(tokenizer, stop) if stop else None)
            for i in range(request.num_samples)
        ]

    @property
    def is_done(self) -> bool:
        return all(sample.stop_reason for sample in self.samples)

    @property
    def shared_tokens(self) -> int:
        """Tokens that more than one sample begins with, and none draws from."""
        return len(self.prompt) - 1 if len(self.samples) > 1 else 0

    def finish(self) -> None:
        """Hand the completions over; samples that have not ended are marked aborted."""
        self.done.set_result([sample.completion(self._tokenizer) for sample in self.samples])


class Scheduler:
    """Continuous batching: samples join when there is room and leave when they end.

    A step is either a prefill (samples with more than one token to compute, up to a token budget) or, when there is
    none, a decoding step of every running sample. Where rows are static, a step may be both: see
    `prefill_chunks_ahead`. What must be computed again, after new weights or after a sample was set back for lack of
    room, is a prefill like any other.

    Args:
        cache: of the samples.
        max_running: samples at most.
        max_prefill_tokens: of one step.
        tokens_beside_decoding: of one step in which other samples decode.
        segment_tokens: tokens that a chunk beside decoding is computed in multiples of.
    """

    def __init__(
        self,
        cache: KVCache,
        max_running: int,
        max_prefill_tokens: int,
        tokens_beside_decoding: int = 512,
        segment_tokens: int = 1,
    ) -> None:
        self.cache, self._max_running, self.max_prefill_tokens = cache, max_running, max_prefill_tokens
        self._tokens_beside_decoding, self._segment_tokens = tokens_beside_decoding, segment_tokens
        self.requests: dict[str, RequestState] = {}
        self.running: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self._hold_admission = False

    def add(self, request: RequestState) -> None:
        self.requests[request.request_id] = request
        self.waiting.extend(request.samples)

    def remove(self, request: RequestState) -> None:
        del self.requests[request.request_id]
        self._hold_admission = False
        for sample in request.samples:
            self._leave(sample)
        self.running = [sample for sample in self.running if sample.request is not request]
        self.waiting = deque(sample for sample in self.waiting if sample.request is not request)

    def retire(self) -> list[RequestState]:
        """Take ended samples out; return the requests that are complete."""
        ended = [sample for sample in self.running if sample.stop_reason]
        if not ended:
            return []
        for sample in ended:
            # Kept rows are found by their tokens, which do not say what an image shows.
            if sample.row is not None and sample.request.images is None:
                self.cache.keep(sample.tokens, sample.row, sample.request.adapter)
            self._leave(sample)
        self.running = [sample for sample in self.running if not sample.stop_reason]
        # Rows have become free, so what was set back may start again.
        self._hold_admission = False
        done = {sample.request.request_id: sample.request for sample in ended if sample.request.is_done}
        for request_id in done:
            del self.requests[request_id]
        return list(done.values())

    def admit(self) -> None:
        """Start waiting samples, oldest first, while there is room."""
        while self.waiting and len(self.running) < self._max_running:
            sample = self.waiting[0]
            request = sample.request
            shared = request.shared_tokens if self._has_prefix(request) else 0
            new = 0 if request.prefix else shared
            # One more, for the token that is drawn next.
            own = len(sample.tokens) + 1 - shared
            # Where none runs, none could end and make room: then the oldest starts, whatever it takes.
            if self.running and (self._hold_admission or not self.cache.fits(own, prefix_tokens=new)):
                return
            if new:
                request.prefix = self.cache.add_prefix(new)
            sample.row = self.cache.add(own, request.prefix)
            self.running.append(self.waiting.popleft())
            if request.images is not None:
                continue
            if new and request.prefix:
                self.cache.reuse(request.prompt[:new], request.prefix.row, request.adapter)
            elif not request.prefix and not self._siblings(sample):
                # One with siblings gets what they compute of the prompt instead: see `copy_prompts`.
                self.cache.reuse(sample.tokens[:-1], sample.row, request.adapter)

    def _has_prefix(self, request: RequestState) -> bool:
        """Return whether its samples share one prefix: not where it and one sample might exceed the budget."""
        shared = request.shared_tokens
        own = min(len(request.prompt) + request.params.max_tokens, self.cache.longest) - shared
        return self.cache.shares(shared) and shared + self.cache.capacity_for(own) <= self.cache.budget_tokens

    @staticmethod
    def _siblings(sample: Sample) -> list[Sample]:
        """Return the other samples of its request that have rows."""
        return [one for one in sample.request.samples if one is not sample and one.row is not None]

    def prefill_chunks(self) -> list[tuple[Sample, Chunk]]:
        """Choose what to prefill next, sorted for attention; empty when all running samples can decode.

        What the samples of a request share is computed with the first of them; the others wait for it.
        """
        return self._choose_chunks(self.max_prefill_tokens, leaving=0, multiple=1)

    def prefill_chunks_ahead(self) -> list[tuple[Sample, Chunk]]:
        """Choose prompts to compute beside a decoding step, all but their last token, which is decoded.

        Fewer tokens are chosen while samples decode, so that these go on between the chunks of long prompts.
        """
        decodes = any(sample.num_pending < 2 for sample in self.running)
        limit = min(self._tokens_beside_decoding, self.max_prefill_tokens) if decodes else self.max_prefill_tokens
        return self._choose_chunks(limit, leaving=1, multiple=self._segment_tokens)

    def _choose_chunks(self, budget: int, leaving: int, multiple: int) -> list[tuple[Sample, Chunk]]:
        """Choose chunks of at most `budget` tokens, and of no prompt its last `leaving` tokens.

        A chunk counts as a multiple of `multiple` tokens.
        """
        chosen, leading = list[tuple[Sample, Chunk]](), set[str]()
        for sample in self.running:
            request, row, num_tokens = sample.request, sample.row, sample.num_pending
            prefix = request.prefix
            assert row is not None
            is_shared = not prefix.is_computed if prefix is not None else row.cached < request.shared_tokens
            if num_tokens < 2 or (is_shared and request.request_id in leading):  # one token left is a decoding step
                continue
            if is_shared:
                leading.add(request.request_id)
            num_tokens -= leaving
            if is_shared and self.cache.holds_states:  # ends where the others go on: states are known there alone
                num_tokens = min(num_tokens, request.shared_tokens - row.cached)
            if is_shared and prefix is not None:
                row, num_tokens = prefix.row, prefix.num_tokens - prefix.row.cached
            if num_tokens := min(num_tokens, budget):
                budget = max(budget - -(-num_tokens // multiple) * multiple, 0)
                chosen.append((sample, Chunk(row, num_tokens)))
        return sorted(chosen, key=lambda pair: (prefill_group(pair[1]), pair[1].row.index))

    def copy_prompts(self) -> None:
        """Give samples that hold nothing what a sibling has computed of their short prompt, all but the last token."""
        empty: dict[str, list[Sample]] = {}
        for sample in self.running:
            if not sample.num_cached and sample.request.shared_tokens and sample.request.prefix is None:
                empty.setdefault(sample.request.request_id, []).append(sample)
        for samples in empty.values():
            shared = samples[0].request.shared_tokens
            known = [one.row for one in self._siblings(samples[0]) if one.row and one.row.cached >= shared]
            sources = [row for row in known if row.cached == shared or not self.cache.holds_states]
            if sources:
                self.cache.share(sources[0], [one.row for one in samples if one.row], shared)

    def draw_along(self, leader: Sample) -> list[Sample]:
        """Copy a short prompt, just computed, to siblings that hold nothing; return those that draw from it, too."""
        if leader.num_drawn or leader.request.prefix is not None:
            return []
        siblings = [one for one in self._siblings(leader) if not one.num_cached and not one.num_drawn]
        if siblings and leader.row is not None:
            self.cache.share(leader.row, [one.row for one in siblings if one.row], len(leader.request.prompt))
        return siblings

    def make_room(self) -> None:
        """Give every running sample a row that holds its tokens; set the youngest back when the budget ends."""
        for sample in list(self.running):
            row = sample.row
            # Without a row: it was set back earlier in this loop.
            if row is None or len(sample.tokens) - row.band.prefix_tokens <= row.band.capacity:
                continue
            own = len(sample.tokens) - row.band.prefix_tokens
            while not self.cache.fits(own, row.band.row_tokens) and self.running[-1] is not sample:
                self._set_back(self.running[-1])
            if self.cache.fits(own, row.band.row_tokens):
                sample.row = self.cache.grow(row, own)
            else:
                self._set_back(sample)

    def _set_back(self, sample: Sample) -> None:
        """Return a sample to the queue with its tokens; it is computed again when there is room."""
        self._leave(sample)
        self.running.remove(sample)
        self.waiting.appendleft(sample)  # all that wait are younger
        self._hold_admission = True  # until one ends: admitted at once, it would only be set back again

    def _leave(self, sample: Sample) -> None:
        if sample.row is not None:
            self.cache.remove(sample.row)
            sample.row = None
        request = sample.request
        if request.prefix is not None and all(one.row is None for one in request.samples):
            self.cache.remove_prefix(request.prefix)
            request.prefix = None

    def decode_order(self) -> list[Sample]:
        """Return running samples in the order of their rows, band by band."""
        by_row = {id(sample.row): sample for sample in self.running}
        return [by_row[id(row)] for band in self.cache.sample_bands for row in band.rows]
