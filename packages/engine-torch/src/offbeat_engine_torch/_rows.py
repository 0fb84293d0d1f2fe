"""Turns the segments of a pack into padded rows that one attention call can take.

Rows of like length share a call. A row is padded by repeating its last index: under causal attention nothing real
sees what comes after it, and what padding computes is thrown away.

Shapes: R rows, L queries and K keys of a row (padded).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from offbeat_training import Indices, Segment

Made = TypeVar("Made")

MAX_PADDING_SHARE = 0.25
MAX_PADDING_TOKENS = 8  # a call costs about as much as this many padded tokens of a small model's rows


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One padded attention call over R rows.

    Args:
        query: [R * L] int64, packed index of each query.
        key: [R * K] int64, packed index of each key.
        num_rows: R.
        token: [n] int64, packed index of the real queries.
        real: [n] int64, where among R * L they are; None when nothing is padded.
        mask: [R, 1, L, K] bool, which keys a query sees; None when the call itself knows.
    """

    query: Tensor
    key: Tensor
    num_rows: int
    token: Tensor
    real: Tensor | None
    mask: Tensor | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to whom in one pack, in each form a kernel may want; made when first asked for.

    Args:
        segments: of the pack.
        device: where index tensors go.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared prompt included."""
        return max(_prefix_length(self.segments, segment) + segment.length for segment in self.segments)

    def own(self) -> list[Rows]:
        """Each segment as a row of its own, causal. Every packed token is a query exactly once."""
        return self._once("own", self._own_rows)

    def cross(self) -> list[Rows]:
        """Each parent's tokens as keys and all its children's tokens as queries, everything seen."""
        return self._once("cross", self._cross_rows)

    def joined(self, window: int | None) -> list[Rows]:
        """Each segment as a row whose keys are its parent's tokens and its own, masked."""
        return self._once(("joined", window), lambda: self._joined_rows(window))

    def flat(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Unpadded form: keys [sum K] int64, cumulative queries and keys [S + 1] int32, longest of each."""
        return self._once("flat", self._flat)

    def _once(self, name: Any, make: Callable[[], Made]) -> Made:
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def _own_rows(self) -> list[Rows]:
        spans = [(segment.start, segment.length) for segment in self.segments]
        return [self._rows(bucket, bucket) for bucket in _buckets(spans)]

    def _cross_rows(self) -> list[Rows]:
        by_prompt_length: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for parent_index, group in groupby(self.segments, key=lambda segment: segment.parent):
            if parent_index >= 0:
                parent, children = self.segments[parent_index], list(group)
                queries = (children[0].start, sum(child.length for child in children))
                by_prompt_length.setdefault(parent.length, []).append((queries, (parent.start, parent.length)))
        blocks: list[Rows] = []
        for pairs in by_prompt_length.values():
            keys = dict(pairs)
            blocks.extend(self._rows(bucket, [keys[span] for span in bucket]) for bucket in _buckets(keys))
        return blocks

    def _joined_rows(self, window: int | None) -> list[Rows]:
        owner = {(segment.start, segment.length): segment for segment in self.segments}
        blocks = []
        for bucket in _buckets(owner):
            keys = [_key_indices(self.segments, owner[span]) for span in bucket]
            mask = _joined_mask([length for _, length in bucket], [len(key) for key in keys], window)
            blocks.append(self._rows(bucket, keys, mask))
        return blocks

    def _flat(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        keys = [_key_indices(self.segments, segment) for segment in self.segments]
        queries = [segment.length for segment in self.segments]
        lengths = [len(key) for key in keys]
        cumulative = [np.cumsum([0, *each]).astype(np.int32) for each in (queries, lengths)]
        index, *bounds = (self._tensor(each) for each in (np.concatenate(keys), *cumulative))
        return index, bounds[0], bounds[1], max(queries), max(lengths)

    def _rows(self, queries: Sequence[tuple[int, int]], keys: Sequence[Any], mask: Any = None) -> Rows:
        query_RL, lengths = _pad([np.arange(start, start + length) for start, length in queries])
        key_RK, _ = _pad([key if isinstance(key, np.ndarray) else np.arange(key[0], key[0] + key[1]) for key in keys])
        flat = query_RL.reshape(-1)
        real = np.flatnonzero((np.arange(query_RL.shape[1])[None] < lengths[:, None]).reshape(-1))
        return Rows(
            query=self._tensor(flat),
            key=self._tensor(key_RK.reshape(-1)),
            num_rows=len(queries),
            token=self._tensor(flat[real]),
            real=None if len(real) == len(flat) else self._tensor(real),
            mask=None if mask is None else self._tensor(mask),
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _prefix_length(segments: Sequence[Segment], segment: Segment) -> int:
    return segments[segment.parent].length if segment.parent >= 0 else 0


def _key_indices(segments: Sequence[Segment], segment: Segment) -> Indices:
    own = np.arange(segment.start, segment.start + segment.length)
    if segment.parent < 0:
        return own
    parent = segments[segment.parent]
    return np.concatenate([np.arange(parent.start, parent.start + parent.length), own])


def _buckets(spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Put spans (start, length) of like length together, longest first."""
    buckets: list[list[tuple[int, int]]] = []
    longest = 0
    for span in sorted(spans, key=lambda span: (-span[1], span[0])):
        if not buckets or longest - span[1] > max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * longest):
            buckets.append([])
            longest = span[1]
        buckets[-1].append(span)
    return buckets


def _pad(rows: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Stack index rows to [R, L], each padded with its last index; and their real lengths [R]."""
    lengths = np.array([len(row) for row in rows])
    padded = np.stack([row[np.minimum(np.arange(lengths.max()), len(row) - 1)] for row in rows])
    return padded, lengths


def _joined_mask(queries: Sequence[int], keys: Sequence[int], window: int | None) -> Any:
    """[R, 1, L, K] bool: a query sees keys up to its own place, at most `window` of them. Key places are positions."""
    place_L, place_K = np.arange(max(queries)), np.arange(max(keys))
    offset_R = np.array(keys) - np.array(queries)
    distance_RLK = (place_L[None, :, None] + offset_R[:, None, None]) - place_K[None, None, :]
    seen = distance_RLK >= 0 if window is None else (distance_RLK >= 0) & (distance_RLK < window)
    return seen[:, None]
