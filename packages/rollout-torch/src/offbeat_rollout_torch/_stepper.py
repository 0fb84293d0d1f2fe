"""One step of generation: forward pass, draw, bookkeeping."""

import time
from collections.abc import Sequence

import numpy as np
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
from offbeat_rollout_torch._vision import look
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

    def score(self, request: ScoreRequest) -> list[Floats]:
        """Score tokens that others have sampled, beside the samples and in a cache that goes when it is done."""
        start_s = time.monotonic()
        weights, scheduler = self.weights, self.scheduler
        cache = KVCache(
            weights.architecture, scheduler.cache.budget_tokens, self._ending.max_model_len, weights.final_norm
        )
        scores = Scorer(weights, self._rotations, cache, scheduler.max_prefill_tokens).score(request)
        self.busy_s += time.monotonic() - start_s
        return scores

    def _decode(self) -> None:
        scheduler = self.scheduler
        samples = scheduler.decode_order()
        scheduler.cache.allocate()
        attention = DecodeAttention(scheduler.cache.bands, self.weights.architecture, self.weights.final_norm)
        ids = [sample.tokens[-1] for sample in samples]
        hidden = self._forward(ids, attention, self._turns([(sample, 1) for sample in samples]))
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
        runs = [(sample, chunk.num_tokens) for sample, chunk in zip(samples, chunks, strict=True)]
        hidden = self._forward(ids, attention, self._turns(runs), self._sight(runs))
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

    def _turns(self, runs: Sequence[tuple[Sample, int]]) -> Tensor | None:
        """[N, head_dim / 2], where positions have axes; `runs` say how many tokens of each sample the pass holds."""
        if not len(self._axes):
            return None
        positions_3N = np.concatenate([sample.positions(num_tokens) for sample, num_tokens in runs], 1)
        by_pair_CN = torch.from_numpy(positions_3N).to(self._device).index_select(0, self._axes)
        return self._rotations.gather(0, by_pair_CN.T)

    def _sight(self, runs: Sequence[tuple[Sample, int]]) -> Sight | None:
        """What the tower says to those tokens of the pass that stand for images; None where there are none."""
        parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        start = 0
        for sample, num_tokens in runs:
            if (pictures := sample.request.pictures) is not None:
                first = sample.num_cached
                there = np.flatnonzero((pictures.place_M >= first) & (pictures.place_M < first + num_tokens))
                if len(there):
                    seen = look(pictures, self.weights.tower)
                    rows = torch.from_numpy(there).to(self._device)
                    place = torch.from_numpy(pictures.place_M[there] - first + start).to(self._device)
                    parts.append((place, tuple(layer.index_select(0, rows) for layer in seen)))
            start += num_tokens
        if not parts:
            return None
        embeds, *deeper = (torch.cat(layer) for layer in zip(*(layers for _, layers in parts), strict=True))
        return Sight(torch.cat([place for place, _ in parts]), embeds, tuple(deeper))

    def _forward(
        self, ids: list[int], attention: Attention, turns: Tensor | None, sight: Sight | None = None
    ) -> Tensor:
        ids_N = torch.tensor(ids, device=self._device)
        return decode_hidden(self.weights, ids_N, self._rotations, attention, turns_NC=turns, sight=sight)

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
