"""One step of generation: forward pass, draw, bookkeeping."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat_rollout_torch._attention import Attention, Chunk, DecodeAttention, PrefillAttention
from offbeat_rollout_torch._cache import KVCache
from offbeat_rollout_torch._decoder import Sight, decode_hidden, decode_logits
from offbeat_rollout_torch._families import rotations
from offbeat_rollout_torch._samples import Ending, Sample
from offbeat_rollout_torch._sampling import draw, uniforms
from offbeat_rollout_torch._scheduler import Scheduler
from offbeat_rollout_torch._scoring import Scorer
from offbeat_rollout_torch._sight import Stretch, sight_of, turns_of
from offbeat_rollout_torch._vision import Pictures
from offbeat_rollout_torch._weights import DecoderWeights
from offbeat_types import Floats, ModelError, ScoreRequest


class Stepper:
    """Runs the scheduler's choice through the model.

    Args:
        scheduler: whose samples run.
        weights: frozen.
        ending: when samples end.
    """

    def __init__(self, scheduler: Scheduler, weights: DecoderWeights, ending: Ending) -> None:
        self.scheduler, self.weights, self._ending = scheduler, weights, ending
        self.version = 0
        self.num_tokens, self.busy_s = 0, 0.0
        self._device = weights.final_norm.device
        self._rotations = rotations(weights.architecture, ending.max_model_len).to(self._device)
        self._axes = torch.tensor(weights.architecture.axes, dtype=torch.int64, device=self._device)

    def step(self) -> None:
        """Prefill or decode once. Afterwards ask the scheduler to `retire`."""
        start_s = time.monotonic()
        scheduler = self.scheduler
        scheduler.make_room()
        scheduler.admit()
        for leader, followers in scheduler.late_followers():
            self._share(leader, followers)
        if chunks := scheduler.prefill_chunks():
            self._prefill(*zip(*chunks, strict=True))
        else:
            self._decode()
        self.busy_s += time.monotonic() - start_s

    def score(self, request: ScoreRequest, pictures: Pictures | None = None) -> list[Floats]:
        """Score tokens that others have sampled, in a cache that goes when it is done.

        It has the room that the samples leave; where that is too little they give up theirs, and are computed again.
        """
        start_s = time.monotonic()
        weights, scheduler, samples = self.weights, self.scheduler, self.scheduler.cache
        longest = samples.band_for(request.longest).capacity
        if samples.allocated_tokens + 2 * longest > samples.budget_tokens:  # the prompt, and one continuation
            samples.drop()
        room = samples.budget_tokens - samples.allocated_tokens
        cache = KVCache(weights.architecture, room, self._ending.max_model_len, weights.final_norm)
        scorer = Scorer(weights, self._rotations, self._axes, cache, scheduler.max_prefill_tokens)
        scores = scorer.score(request, pictures)
        self.busy_s += time.monotonic() - start_s
        return scores

    def _decode(self) -> None:
        scheduler = self.scheduler
        samples = scheduler.decode_order()
        scheduler.cache.allocate()
        attention = DecodeAttention(scheduler.cache.bands, self.weights.architecture, self.weights.final_norm)
        ids = [sample.tokens[-1] for sample in samples]
        hidden = self._forward(ids, attention, [_stretch(sample, 1) for sample in samples])
        for sample in samples:
            assert sample.row is not None
            sample.row.cached += 1
        self._draw(samples, hidden)

    def _prefill(self, samples: Sequence[Sample], chunks: Sequence[Chunk]) -> None:
        self.scheduler.cache.allocate()
        attention = PrefillAttention(chunks, self.weights.architecture, self.weights.final_norm)
        ids: list[int] = []
        ready: list[Sample] = []
        ends: list[int] = []
        for sample, chunk in zip(samples, chunks, strict=True):
            ids += sample.tokens[chunk.row.cached : chunk.row.cached + chunk.num_tokens]
        runs = [_stretch(sample, chunk.num_tokens) for sample, chunk in zip(samples, chunks, strict=True)]
        hidden = self._forward(ids, attention, runs, sight_of(runs, self.weights.tower, self._device))
        end = -1
        for sample, chunk in zip(samples, chunks, strict=True):
            end += chunk.num_tokens
            chunk.row.cached += chunk.num_tokens
            followers = self.scheduler.followers(sample)
            fresh = [one for one in followers if not one.num_drawn] if not sample.num_drawn else []
            if followers:
                self._share(sample, followers, fresh)
            if not sample.num_pending:
                ready += [sample, *fresh]
                ends += [end] * (1 + len(fresh))
        if ready:
            self._draw(ready, hidden.index_select(0, torch.tensor(ends, device=self._device)))

    def _share(self, leader: Sample, followers: Sequence[Sample], ready: Sequence[Sample] = ()) -> None:
        """Copy the prompt's keys and values. A follower that cannot draw with the leader computes its last token."""
        assert leader.row is not None
        prompt = len(leader.request.prompt)
        wholes = [one for one in followers if one.num_drawn or one in ready]
        others = [one for one in followers if not (one.num_drawn or one in ready)]
        for members, num_tokens in ((wholes, prompt), (others, prompt - 1)):
            if members:
                rows = [one.row for one in members if one.row is not None]
                self.scheduler.cache.share(leader.row, rows, num_tokens)

    def _forward(
        self, ids: list[int], attention: Attention, runs: Sequence[Stretch], sight: Sight | None = None
    ) -> Tensor:
        ids_N = torch.tensor(ids, device=self._device)
        turns = turns_of(runs, self._rotations, self._axes)
        return decode_hidden(self.weights, ids_N, self._rotations, attention, turns_NC2=turns, sight=sight)

    def _draw(self, samples: Sequence[Sample], hidden: Tensor) -> None:
        logits = decode_logits(self.weights, hidden)
        numbers = uniforms([one.seed for one in samples], [one.num_drawn for one in samples])
        drawn = draw(logits, [one.params for one in samples], numbers)
        if not all(-1e30 < logprob <= 0 for logprob in drawn.logprobs):
            raise ModelError(
                f"the weights of version {self.version} give logits that are not finite; "
                "training has diverged or the model folder is damaged"
            )
        for sample, token, logprob in zip(samples, drawn.ids, drawn.logprobs, strict=True):
            sample.push(token, logprob, self.version, self._ending)
        self.num_tokens += len(samples)


def _stretch(sample: Sample, num_tokens: int) -> Stretch:
    """The next tokens of a sample to compute."""
    return Stretch(sample.request.pictures, sample.num_cached, num_tokens)
