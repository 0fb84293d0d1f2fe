"""Plan of packed attention: which tokens attend to which, in each form that a kernel wants.

For a kernel the segments of a pack become padded rows. Rows of like length share a call. A row is padded by repeating
its last index: under causal attention nothing real sees what comes after it, and what padding computes is thrown
away.

Shapes: T packed tokens, R rows, L queries and K keys of a row (padded).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_device import copy_to_device
from offbeat_engine_torch._layers.exchange import SharedTokens
from offbeat_training import Indices, Segment, VarlenBounds

Made = TypeVar("Made")

MAX_PADDING_SHARE = 0.25
MAX_PADDING_TOKENS = 8  # a call costs about as much as this many padded tokens of a small model's rows


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One padded attention call over R rows, those of each key head one after the other.

    Args:
        query: [R * L] int64, packed index of each query. The tokens of key head j have j * T added.
        key: [R * K] int64, packed index of each key, likewise.
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


@dataclass(frozen=True, kw_only=True)
class VarlenKeys:
    """Places of the keys of each sequence of a pack, for variable-length attention.

    Args:
        index: [sum K] int64, packed index of every sequence's keys; None where these are the packed tokens as they are.
        bounds: where queries and keys of each sequence begin and end.
        token: packed index of the queries of blocks; None where they are all of the pack, as they are.
        blocks: queries of blocks, each a sequence here, with all that they see; None where the pack has none.
    """

    index: Tensor | None
    bounds: VarlenBounds
    token: Tensor | None = None
    blocks: "VarlenKeys | None" = None


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Sequences of a pack with their shared prompts, as rows: those of like length in one block, padded.

    Args:
        indices: [R, L] int64 of each block, packed index of each token. A row ends with its last index, repeated.
        place_T: [T] int64, where each packed token is in all blocks one after the other.
    """

    indices: tuple[Tensor, ...]
    place_T: Tensor


@dataclass(frozen=True, kw_only=True)
class WholeLine:
    """Sequences of a pack with their shared prompts, one after the other in one row of F tokens.

    Args:
        rows: of one block [1, F].
        bounds: [n + 1] int64, where each sequence begins, and F.
        sequence_1F: [1, F] int32, number of each token's sequence.
    """

    rows: WholeRows
    bounds: Tensor
    sequence_1F: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of one pack: which tokens attend to which, in each form a kernel may want; made on first use.

    Args:
        segments: of the pack.
        device: to attend on.
        ranks: that share the pack's tokens; None where this one has all of them.
        run: first token whose query is here, and the one after the last; None for all of the pack.
        blocks: (start, stop) of runs of tokens that see each other, also what comes later, such as those of an image;
            each within one segment.
        in_windows_alone: they do so in layers with a sliding window, and in no others.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    ranks: SharedTokens | None = None
    run: tuple[int, int] | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    in_windows_alone: bool = False
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared prompt included."""
        return max(_prefix_length(self.segments, segment) + segment.length for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(segment.length for segment in self.segments)

    def own(self, num_heads: int) -> list[Rows]:
        """Each segment as a row of its own, causal. Every packed token is a query of each key head exactly once."""
        return self._once(("own", num_heads), lambda: self._own_rows(num_heads))

    def cross(self, num_heads: int) -> list[Rows]:
        """Each parent's tokens as keys and all its children's tokens as queries, everything seen, by key head."""
        return self._once(("cross", num_heads), lambda: self._cross_rows(num_heads))

    def aligned(self) -> list[tuple[Rows, list[int]]]:
        """Return rows as those of `joined`, without a mask; how many keys come before the first query of each."""
        return self._once("aligned", self._aligned_rows)

    def joined(self, window: int | None) -> list[Rows]:
        """Each segment as a row whose keys are its parent's tokens and its own, masked."""
        return self._once(("joined", window), lambda: self._masked_rows(self._keys_of_runs(), window, causal=True))

    def both_ways(self, window: int | None) -> list[Rows]:
        """Each block as a row whose keys are what comes before it and all of its own, masked."""
        return self._once(
            ("both ways", window), lambda: self._masked_rows(self._keys_of_blocks(), window, causal=False)
        )

    def shared(self, ranks: SharedTokens, num_tokens: int, run: tuple[int, int] | None) -> "AttentionPlan":
        """Return the plan of a pack that these ranks share, with padding up to `num_tokens`; see `run` above."""
        missing = num_tokens - self.num_tokens
        padding = (Segment(start=self.num_tokens, length=missing),) if missing else ()
        return replace(self, segments=(*self.segments, *padding), ranks=ranks, run=run, _made={})

    def arguments(self, kernel: str) -> dict[str, Any]:
        """Return what `packed_attention` is given by name to attend by a kernel."""
        # Two calls of `split`, of which the second knows no order, take whole segments.
        kernel = "rows" if kernel == "split" and self.run is not None else kernel
        return {"plan": self, "kernel": kernel, "keys": self.varlen() if kernel == "varlen" else None}

    def varlen(self) -> VarlenKeys:
        """Keys of each segment, its parent's and its own, without padding."""
        return self._once("varlen", self._varlen_keys)

    def whole_rows(self) -> WholeRows:
        """Sequences for what reads one from its beginning, as padded rows."""
        return self._once("whole rows", self._whole_rows)

    def whole_line(self) -> WholeLine:
        """Sequences for what reads one from its beginning, without padding."""
        return self._once("whole line", self._whole_line)

    def _once(self, name: Any, make: Callable[[], Made]) -> Made:
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def _own_rows(self, num_heads: int) -> list[Rows]:
        spans = [(segment.start, segment.length) for segment in self.segments]
        return [self._rows(bucket, bucket, num_heads=num_heads) for bucket in _buckets(spans)]

    def _cross_rows(self, num_heads: int) -> list[Rows]:
        # Parents of one length alone share a call: without a mask a padded key would be seen.
        by_prompt_length: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for parent_index, group in groupby(self.segments, key=lambda segment: segment.parent):
            if parent_index >= 0:
                parent, children = self.segments[parent_index], list(group)
                queries = (children[0].start, sum(child.length for child in children))
                by_prompt_length.setdefault(parent.length, []).append((queries, (parent.start, parent.length)))
        blocks: list[Rows] = []
        for pairs in by_prompt_length.values():
            keys = dict(pairs)
            blocks.extend(
                self._rows(bucket, [keys[span] for span in bucket], num_heads=num_heads) for bucket in _buckets(keys)
            )
        return blocks

    def _aligned_rows(self) -> list[tuple[Rows, list[int]]]:
        keys_of, found = self._keys_of_runs(), []
        for bucket in _buckets(keys_of):
            keys = [keys_of[span] for span in bucket]
            starts = [len(key) - length for key, (_, length) in zip(keys, bucket, strict=True)]
            found.append((self._rows(bucket, keys), starts))
        return found

    def _masked_rows(self, keys_of: dict[tuple[int, int], Indices], window: int | None, *, causal: bool) -> list[Rows]:
        blocks = []
        for bucket in _buckets(keys_of):
            keys = [keys_of[span] for span in bucket]
            lengths = [length for _, length in bucket], [len(key) for key in keys]
            blocks.append(self._rows(bucket, keys, _joined_mask(*lengths, window, causal=causal)))
        return blocks

    def _keys_of_runs(self) -> dict[tuple[int, int], Indices]:
        """Return spans of queries, counted from the first that is here, with packed indices of the keys of each.

        Those are its prompt's and its own, up to the last query.
        """
        first, stop = self.run or (0, self.num_tokens)
        found = {}
        for segment in self.segments:
            begin, end = max(segment.start, first), min(segment.start + segment.length, stop)
            if begin < end:
                keys = _key_indices(self.segments, segment)
                found[begin - first, end - begin] = keys[: len(keys) - (segment.start + segment.length - end)]
        return found

    def _keys_of_blocks(self) -> dict[tuple[int, int], Indices]:
        """Return the span of each block, with packed indices of its keys: its prompt's and its own, up to its end."""
        found = {}
        for start, stop in self.blocks:
            segment = next(each for each in self.segments if each.start <= start < each.start + each.length)
            keys = _key_indices(self.segments, segment)
            found[start, stop - start] = keys[: len(keys) - (segment.start + segment.length - stop)]
        return found

    def _varlen_keys(self) -> VarlenKeys:
        made = self._line_up(self._keys_of_runs())
        if not self.blocks:
            return made
        token = np.concatenate([np.arange(start, stop) for start, stop in self.blocks])
        return replace(made, blocks=replace(self._line_up(self._keys_of_blocks()), token=self._tensor(token)))

    def _line_up(self, keys_of: dict[tuple[int, int], Indices]) -> VarlenKeys:
        """Put the keys of spans of queries one after the other."""
        keys, queries = list(keys_of.values()), [length for _, length in keys_of]
        lengths, index = [len(key) for key in keys], np.concatenate(keys)
        first_query, first_key = (self._tensor(np.cumsum([0, *each]).astype(np.int32)) for each in (queries, lengths))
        return VarlenKeys(
            index=None if np.array_equal(index, np.arange(self.num_tokens)) else self._tensor(index),
            bounds=VarlenBounds(
                queries=first_query, keys=first_key, longest_query=max(queries), longest_key=max(lengths)
            ),
        )

    def _whole_sequences(self) -> list[Indices]:
        parents = {segment.parent for segment in self.segments}
        return [_key_indices(self.segments, each) for number, each in enumerate(self.segments) if number not in parents]

    def _whole_rows(self) -> WholeRows:
        sequences = self._whole_sequences()
        blocks, place_T, begin = [], np.empty(self.num_tokens, np.int64), 0
        for bucket in _buckets([(number, len(each)) for number, each in enumerate(sequences)]):
            index_RL, _ = _pad([sequences[number] for number, _ in bucket])
            for row, (number, length) in enumerate(bucket):
                place_T[sequences[number]] = begin + row * index_RL.shape[1] + np.arange(length)
            blocks.append(self._tensor(index_RL))
            begin += index_RL.size
        return WholeRows(indices=tuple(blocks), place_T=self._tensor(place_T))

    def _whole_line(self) -> WholeLine:
        sequences = self._whole_sequences()
        lengths, index_F = [len(each) for each in sequences], np.concatenate(sequences)
        place_T = np.empty(self.num_tokens, np.int64)
        place_T[index_F] = np.arange(len(index_F))
        number_F = np.repeat(np.arange(len(sequences), dtype=np.int32), lengths)
        return WholeLine(
            rows=WholeRows(indices=(self._tensor(index_F[None]),), place_T=self._tensor(place_T)),
            bounds=self._tensor(np.cumsum([0, *lengths])),
            sequence_1F=self._tensor(number_F[None]),
        )

    def _rows(
        self, queries: Sequence[tuple[int, int]], keys: Sequence[Any], mask: Any = None, num_heads: int = 1
    ) -> Rows:
        query_RL, lengths = _pad([np.arange(start, start + length) for start, length in queries])
        key_RK, _ = _pad([key if isinstance(key, np.ndarray) else np.arange(key[0], key[0] + key[1]) for key in keys])
        flat = query_RL.reshape(-1)
        real = np.flatnonzero((np.arange(query_RL.shape[1])[None] < lengths[:, None]).reshape(-1))
        num_tokens = self.num_tokens
        return Rows(
            query=self._tensor(_for_each_head(flat, num_heads, num_tokens)),
            key=self._tensor(_for_each_head(key_RK.reshape(-1), num_heads, num_tokens)),
            num_rows=num_heads * len(queries),
            token=self._tensor(_for_each_head(flat[real], num_heads, num_tokens)),
            real=None if len(real) == len(flat) else self._tensor(_for_each_head(real, num_heads, len(flat))),
            mask=None if mask is None else self._tensor(mask),
        )

    def _tensor(self, array: Any) -> Tensor:
        return to_device(array, self.device)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, without waiting for it."""
    return copy_to_device(torch.from_numpy(np.ascontiguousarray(array)), device)


def _for_each_head(index: Indices, num_heads: int, step: int) -> Indices:
    """Return the index, and then again with `step` added for each head after the first."""
    return (np.arange(num_heads)[:, None] * step + index).reshape(-1)


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


def _joined_mask(queries: Sequence[int], keys: Sequence[int], window: int | None, *, causal: bool) -> Any:
    """[R, 1, L, K] bool, which keys a query sees: with `causal` those up to its own place, else all of its row.

    Of these at most `window`, counted back from its own. Key places are positions, and the last query is at the last of
    them; so is padding.
    """
    queries_R1, keys_R1, place_K = np.array(queries)[:, None], np.array(keys)[:, None], np.arange(max(keys))
    place_RL = np.minimum(np.arange(max(queries)), queries_R1 - 1) + keys_R1 - queries_R1
    distance_RLK = place_RL[:, :, None] - place_K
    seen = distance_RLK >= 0 if causal else (place_K < keys_R1)[:, None]
    return (seen if window is None else seen & (distance_RLK < window))[:, None]
