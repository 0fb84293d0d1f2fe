"""Lays sequences out without padding to a common length: which go together, and where each token lies on each rank.

A pack is a row of sequences. What comes after the last loss token's predecessor predicts nothing and is left out.
Context parallel ranks share every sequence: it is cut into 2·cp chunks, and rank r holds chunks r and 2·cp - 1 - r, so
that causal attention costs all of them the same. Source: Megatron-LM, the zigzag layout of TransformerEngine's thd.

Shapes: T packed tokens, L of them on one rank, N loss tokens, t a token's index in its own sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offbeat_engine_megatron._parallel import Parallel
from offbeat_types import TrainSequence

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One micro-batch, laid out for all context parallel ranks.

    Args:
        ids_T: token ids, padding included.
        lengths: of the sequences, each padded to a multiple of 2·cp; those without a member are padding.
        predictor_N: packed index of the token whose hidden state predicts each loss token.
        target_N: id of each loss token.
        sequence_N: which of `members` each loss token belongs to, sorted.
        members: index of each sequence among those given.
    """

    ids_T: Indices
    lengths: tuple[int, ...]
    predictor_N: Indices
    target_N: Indices
    sequence_N: Indices
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalPack:
    """What one context parallel rank computes of a pack.

    Args:
        ids_L: its tokens.
        lengths: of the whole sequences.
        predictor_n: index among its tokens of the predictors that it holds.
        target_n: the ids they predict.
        place_N: for each loss token of the pack its place in the ranks' answers laid end to end, each `width` long.
        width: the most loss tokens that a rank holds.
        gathered_T: for each token of the pack its place in the ranks' tokens laid end to end; None for one rank.
    """

    ids_L: Indices
    lengths: tuple[int, ...]
    predictor_n: Indices
    target_n: Indices
    place_N: Indices
    width: int
    gathered_T: Indices | None = None


def used_tokens(sequence: TrainSequence) -> int:
    """Tokens that have to be computed: up to the predecessor of the last loss token."""
    places = np.flatnonzero(sequence.loss_mask)
    return int(places[-1]) if len(places) else 0


def lay_out(sequences: Sequence[TrainSequence], members: Sequence[int], parallel: Parallel, *, length: int = 0) -> Pack:
    """Lay out one micro-batch; one without members is padding, for a rank that keeps the others company.

    Args:
        sequences: of the whole update.
        members: those of this micro-batch, each with a loss token.
        parallel: says what lengths are padded to.
        length: tokens of the pack at least.
    """
    ids: list[npt.NDArray[np.int32]] = []
    lengths: list[int] = []
    predictor: list[Indices] = []
    target: list[npt.NDArray[np.int32]] = []
    numbers: list[Indices] = []
    start = 0
    for number, member in enumerate(members):
        sequence, used = sequences[member], used_tokens(sequences[member])
        token = np.flatnonzero(sequence.loss_mask)
        size = _padded(used, parallel.sequence_multiple)
        ids.append(np.pad(sequence.ids[:used], (0, size - used)))
        lengths.append(size)
        predictor.append(token - 1 + start)
        target.append(sequence.ids[token])
        numbers.append(np.full(len(token), number))
        start += size
    if rest := _padded(max(start, length, 1), parallel.pack_multiple) - start:
        ids.append(np.zeros(rest, np.int32))
        lengths.append(rest)
    return Pack(
        ids_T=np.concatenate(ids).astype(np.int64),
        lengths=tuple(lengths),
        predictor_N=_joined(predictor),
        target_N=_joined([each.astype(np.int64) for each in target]),
        sequence_N=_joined(numbers),
        members=tuple(members),
    )


def lay_out_all(sequences: Sequence[TrainSequence], share: Sequence[Sequence[int]], parallel: Parallel) -> list[Pack]:
    """Lay out the micro-batches of a share; for interleaved stages all of one length."""
    packs = [lay_out(sequences, members, parallel) for members in share]
    if parallel.vpp > 1:
        longest = max((len(pack.ids_T) for pack in packs), default=0)
        packs = [lay_out(sequences, members, parallel, length=longest) for members in share]
    return packs


def cut(pack: Pack, rank: int, num_ranks: int) -> LocalPack:
    """The part of one context parallel rank.

    Args:
        pack: with lengths divisible by twice the number of ranks.
        rank: in [0, num_ranks).
        num_ranks: that share the pack.
    """
    places = [zigzag(pack.lengths, each, num_ranks) for each in range(num_ranks)]
    owner_T, index_T = np.empty(len(pack.ids_T), np.int64), np.empty(len(pack.ids_T), np.int64)
    for each, held in enumerate(places):
        owner_T[held], index_T[held] = each, np.arange(len(held))
    owner_N = owner_T[pack.predictor_N]
    width = int(np.bincount(owner_N, minlength=num_ranks).max()) if len(owner_N) else 0
    place_N = np.empty(len(owner_N), np.int64)
    for each in range(num_ranks):
        mine = np.flatnonzero(owner_N == each)
        place_N[mine] = each * width + np.arange(len(mine))
    here = owner_N == rank
    return LocalPack(
        ids_L=pack.ids_T[places[rank]],
        lengths=pack.lengths,
        predictor_n=index_T[pack.predictor_N[here]],
        target_n=pack.target_N[here],
        place_N=place_N,
        width=width,
        gathered_T=np.argsort(np.concatenate(places)) if num_ranks > 1 else None,
    )


def zigzag(lengths: Sequence[int], rank: int, num_ranks: int) -> Indices:
    """Packed indices of the tokens that a rank holds, in its order: chunk r and chunk 2n - 1 - r of each sequence."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    if num_ranks == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    parts: list[Indices] = []
    for start, length in zip(starts, lengths, strict=True):
        chunk = length // (2 * num_ranks)
        numbers = (rank, 2 * num_ranks - 1 - rank)
        parts += [np.arange(start + number * chunk, start + (number + 1) * chunk) for number in numbers]
    return np.concatenate(parts)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
