"""Decides which samples run, and what the next forward pass computes. No tensors but those of the cache."""

from collections import deque
from collections.abc import Iterable

from offbeat_rollout_torch._attention import Chunk, prefill_group
from offbeat_rollout_torch._cache import KVCache
from offbeat_rollout_torch._samples import RequestInFlight, Sample


class Scheduler:
    """Continuous batching: samples join when there is room and leave when they end.

    A step is either a prefill (samples with more than one token to compute, up to a token budget) or, when there is
    none, a decoding step of every running sample. What must be computed again, after new weights or after a sample
    was set back for lack of room, is a prefill like any other.

    Args:
        cache: rows and budget.
        max_running: samples decoded together at most.
        max_prefill_tokens: tokens of one prefill step at most; longer prompts take several.
    """

    def __init__(self, cache: KVCache, max_running: int, max_prefill_tokens: int) -> None:
        self.cache, self._max_running, self.max_prefill_tokens = cache, max_running, max_prefill_tokens
        self.requests: dict[str, RequestInFlight] = {}
        self.running: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self._hold_admission = False

    def add(self, request: RequestInFlight) -> None:
        """Queue the samples of a request."""
        self.requests[request.request_id] = request
        self.waiting.extend(request.samples)

    def remove(self, request: RequestInFlight) -> None:
        """Forget a request, whatever its samples are doing."""
        del self.requests[request.request_id]
        self._hold_admission = False
        for sample in request.samples:
            self._leave(sample)
        self.running = [sample for sample in self.running if sample.request is not request]
        self.waiting = deque(sample for sample in self.waiting if sample.request is not request)

    def retire(self) -> list[RequestInFlight]:
        """Take ended samples out; return the requests that are complete."""
        ended = [sample for sample in self.running if sample.stop_reason]
        if not ended:
            return []
        for sample in ended:
            self._leave(sample)
        self.running = [sample for sample in self.running if not sample.stop_reason]
        self._hold_admission = False
        done = {sample.request.request_id: sample.request for sample in ended if sample.request.is_done}
        for request_id in done:
            del self.requests[request_id]
        return list(done.values())

    def admit(self) -> None:
        """Start waiting samples, oldest first, while there is room."""
        while self.waiting and len(self.running) < self._max_running:
            length = len(self.waiting[0].tokens) + 1
            if self.running and (self._hold_admission or not self.cache.fits(length)):
                return
            sample = self.waiting.popleft()
            sample.row = self.cache.add(length)
            self.running.append(sample)

    def prefill_chunks(self) -> list[tuple[Sample, Chunk]]:
        """Choose what to prefill next, sorted for attention; empty when all running samples can decode.

        Of the samples of one request that hold nothing yet, only the first computes; the others copy its prompt.
        """
        chosen, budget, leading = [], self.max_prefill_tokens, set[str]()
        for sample in self.running:
            if sample.num_pending < 2 or not budget:
                continue
            request = sample.request
            if sample.num_cached < len(request.prompt) and len(request.prompt) > 1:
                if request.request_id in leading:
                    continue
                leading.add(request.request_id)
            assert sample.row is not None
            chunk = Chunk(sample.row, min(sample.num_pending, budget))
            budget -= chunk.num_tokens
            chosen.append((sample, chunk))
        return sorted(chosen, key=lambda pair: (prefill_group(pair[1]), pair[1].row.index))

    def followers(self, leader: Sample) -> list[Sample]:
        """Siblings that hold nothing and want the leader's prompt, once it has all of it."""
        prompt = leader.request.prompt
        if leader.num_cached < len(prompt) or len(prompt) < 2:
            return []
        return [
            sample
            for sample in leader.request.samples
            if sample is not leader and sample.row is not None and not sample.num_cached and not sample.stop_reason
        ]

    def late_followers(self) -> Iterable[tuple[Sample, list[Sample]]]:
        """Samples admitted after a sibling's prefill, with that sibling."""
        for request in {sample.request.request_id: sample.request for sample in self._empty()}.values():
            leader = max(request.samples, key=lambda sample: sample.num_cached)
            if followers := self.followers(leader):
                yield leader, followers

    def _empty(self) -> list[Sample]:
        return [sample for sample in self.running if not sample.num_cached]

    def make_room(self) -> None:
        """Give every running sample a row that holds its tokens; set the youngest back when the budget ends."""
        for sample in list(self.running):
            row = sample.row
            if row is None or len(sample.tokens) <= row.band.capacity:
                continue
            while not self.cache.fits(len(sample.tokens), row.band.capacity) and self.running[-1] is not sample:
                self._set_back(self.running[-1])
            if self.cache.fits(len(sample.tokens), row.band.capacity):
                sample.row = self.cache.grow(row, len(sample.tokens))
            else:
                self._set_back(sample)

    def _set_back(self, sample: Sample) -> None:
        """Return a sample to the queue with its tokens; it is computed again when there is room."""
        self._leave(sample)
        self.running.remove(sample)
        self.waiting.appendleft(sample)
        self._hold_admission = True

    def _leave(self, sample: Sample) -> None:
        if sample.row is not None:
            self.cache.remove(sample.row)
            sample.row = None

    def decode_order(self) -> list[Sample]:
        """Return running samples in the order of their rows, band by band."""
        by_row = {id(sample.row): sample for sample in self.running}
        return [by_row[id(row)] for band in self.cache.bands for row in band.rows]
