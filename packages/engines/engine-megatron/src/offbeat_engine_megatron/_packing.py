"""Micro-batches on ranks: where each token of a pack lies, and how ranks share the vocabulary and the answers.

Context parallel ranks share every sequence: it is cut into 2·cp chunks, and rank r holds chunks r and 2·cp - 1 - r, so
that causal attention costs all of them the same. Source: Megatron-LM, the zigzag layout of TransformerEngine's thd.

Shapes: T packed tokens, L of them on one rank, N loss tokens, t a token's index in its own sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import offbeat_training as training
from offbeat_core import TrainSequence
from offbeat_device import AttendedTokens, MaskedAttention
from offbeat_engine_megatron._layout import Parallel
from offbeat_mesh import Group
from offbeat_training import ImageInputs, Indices, MicroBatch, Share, VarlenBounds, varlen_attention


@dataclass(frozen=True, kw_only=True)
class MtpInputs:
    """Inputs of one layer of multi-token prediction, on this rank's device.

    The tokens k places on are laid out on the host, for all ranks alike: megatron-core's own roll exchanges them
    between context parallel ranks by sends in the order of sequences, twice a layer.

    Args:
        ids_1L: for each token of this rank the one that many places on in its sequence; 0 beyond its end.
        predictor_n: index among all tokens of this context parallel rank of those whose prediction counts.
        target_n: the ids they should predict.
    """

    ids_1L: Tensor
    predictor_n: Tensor
    target_n: Tensor


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """Inputs of one rank's pass over a micro-batch, on its device.

    Args:
        ids_1L: its tokens.
        lengths: of the whole sequences, each a multiple of 2·cp.
        predictor_n: index among its tokens of the predictors that it holds.
        target_n: the ids they predict.
        place_N: for each loss token of the pack its place in the ranks' answers laid end to end, each `width` long.
        width: the most loss tokens that a rank holds.
        gathered_T: for each token of the pack its place in the ranks' tokens laid end to end; None for one rank.
        positions_3T: of all tokens of the pack, where positions have three axes.
        seen_m: which of the pack's placeholder tokens it holds.
        place_m: index among its tokens of each.
        pixels_PC: patches of all images, as the model's image processor cuts them, where the tower takes part.
        grid_I3: patches of each image in time, height and width.
        mtp: of each layer of multi-token prediction, where they train.
        attention: by the device's own kernel under its mask; None where the engine attends itself.
        routes_TLK: of its tokens, see `MicroBatch`.
    """

    ids_1L: Tensor
    lengths: tuple[int, ...]
    predictor_n: Tensor
    target_n: Tensor
    place_N: Tensor
    width: int
    gathered_T: Tensor | None
    positions_3T: Tensor | None
    seen_m: Tensor
    place_m: Tensor
    pixels_PC: Tensor | None = None
    grid_I3: Tensor | None = None
    mtp: tuple[MtpInputs, ...] = ()
    attention: MaskedAttention | None = None
    routes_TLK: Tensor | None = None


def lay_out_all(
    sequences: Sequence[TrainSequence], share: Share, parallel: Parallel, images: ImageInputs | None = None
) -> list[MicroBatch]:
    """Lay out the micro-batches of a share; for interleaved stages all of one length."""
    multiples = {"segment_multiple": parallel.sequence_multiple, "pack_multiple": parallel.pack_multiple}
    packs = [training.lay_out(sequences, families, images, **multiples) for families in share]
    if parallel.vpp > 1 and packs:
        longest = max(len(pack.ids_T) for pack in packs)
        packs = [training.lay_out(sequences, families, images, num_tokens=longest, **multiples) for families in share]
    return packs


def cut(
    pack: MicroBatch, rank: int, num_ranks: int, device: torch.device | None = None, *, mtp_layers: int = 0
) -> PassInputs:
    """Return the part of one of the context parallel ranks that share a pack, whose lengths twice their number divides.

    Args:
        pack: of all ranks.
        rank: in [0, num_ranks).
        num_ranks: that share the pack.
        device: of the rank; None for main memory.
        mtp_layers: layers of multi-token prediction that train on it.
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
    here, seen_m = owner_N == rank, np.flatnonzero(owner_T[pack.place_M] == rank)

    def tensor(array: npt.NDArray[np.integer]) -> Tensor:
        return torch.as_tensor(array, device=device)

    def mtp_inputs(depth: int) -> MtpInputs:
        ids_T, predictor_N = _tokens_later(pack, depth)
        counts = (predictor_N >= 0) & (owner_T[predictor_N] == rank)
        predictor_n = index_T[predictor_N[counts]]
        return MtpInputs(
            ids_1L=tensor(ids_T[places[rank]])[None],
            predictor_n=tensor(predictor_n),
            target_n=tensor(pack.target_N[counts]),
        )

    return PassInputs(
        ids_1L=tensor(pack.ids_T[places[rank]])[None],
        lengths=pack.lengths,
        predictor_n=tensor(index_T[pack.predictor_N[here]]),
        target_n=tensor(pack.target_N[here]),
        place_N=tensor(place_N),
        width=width,
        gathered_T=tensor(np.argsort(np.concatenate(places))) if num_ranks > 1 else None,
        positions_3T=tensor(pack.positions_T) if pack.positions_T.ndim > 1 else None,
        seen_m=tensor(seen_m),
        place_m=tensor(index_T[pack.place_M[seen_m]]),
        mtp=tuple(mtp_inputs(depth) for depth in range(1, mtp_layers + 1)),
        routes_TLK=None if pack.routes_TLK is None else tensor(pack.routes_TLK[places[rank]]),
    )


def _tokens_later(pack: MicroBatch, depth: int) -> tuple[Indices, Indices]:
    """[T] ids that many places on, 0 beyond a sequence's end; [N] what predicts each loss token from there, or -1."""
    ends = np.cumsum(pack.lengths)
    later_T = np.arange(len(pack.ids_T)) + depth
    inside_T = later_T < np.repeat(ends, pack.lengths)
    ids_T = np.where(inside_T, pack.ids_T[np.minimum(later_T, len(pack.ids_T) - 1)], 0)
    start_N = (ends - np.asarray(pack.lengths))[pack.sequence_N]
    predictor_N = pack.predictor_N - depth
    return ids_T, np.where(predictor_N >= start_N, predictor_N, -1)


def attended_tokens(
    pack: MicroBatch, rank: int, num_ranks: int, image_ids: frozenset[int] = frozenset()
) -> AttendedTokens:
    """Return what a device needs to know of a pack to shape its mask.

    Args:
        pack: of all ranks.
        rank: in [0, num_ranks).
        num_ranks: that share the pack.
        image_ids: ids that stand for patches of images; empty for a model without vision.
    """
    return AttendedTokens(
        ids_T=torch.as_tensor(pack.ids_T),
        lengths=pack.lengths,
        queries=tuple(_held_ranges(length, rank, num_ranks) for length in pack.lengths),
        image_ids=image_ids,
    )


def _held_ranges(length: int, rank: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return [start, end) of the chunks of a sequence whose queries a rank holds."""
    if num_ranks == 1:
        return ((0, length),)
    chunk = length // (2 * num_ranks)
    return tuple((number * chunk, (number + 1) * chunk) for number in (rank, 2 * num_ranks - 1 - rank))


def zigzag(lengths: Sequence[int], rank: int, num_ranks: int) -> Indices:
    """Packed indices of the tokens that a rank holds, in its order: chunk r and chunk 2n - 1 - r of each sequence."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    if num_ranks == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    parts: list[Indices] = []
    for start, length in zip(starts, lengths, strict=True):
        parts += [np.arange(start + first, start + last) for first, last in _held_ranges(int(length), rank, num_ranks)]
    return np.concatenate(parts)


def token_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    target_N: Tensor,
    tp: Group,
    *,
    scale: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `offbeat_training.token_logprobs`, with products added up in float32.

    Args:
        hidden_NE: the same on all ranks of `tp`; its gradient is this rank's part, to be added up over them.
        weight_VE: rows rank · V to (rank + 1) · V of the head.
        target_N: int64, ids of the whole vocabulary.
        tp: the ranks that share the head.
        scale: factor on the logits: 1 / temperature.
        entropy_gradient: let gradient flow through the entropy too.
    """
    part = training.VocabularyPart(
        first=tp.rank * len(weight_VE),
        add=tp.all_reduce,
        largest=partial(tp.all_reduce, op="max"),
        adds_gradient=False,  # megatron-core's own regions do, see `LogprobHead`
    )
    return training.token_logprobs(
        *(hidden_NE, weight_VE, None, target_N),
        scale=scale,
        matmul_dtype=None,
        entropy_gradient=entropy_gradient,
        part=part,
    )


def gather_values(values_n: Tensor, place_N: Tensor, width: int, cp: Group) -> Tensor:
    """Return what context parallel ranks found for their tokens, in the order of the pack: [..., N], alike on all.

    Every rank computes the whole loss afterwards, so the gradient of its own values is that of the result, not a sum.

    Args:
        values_n: [..., n] of this rank, n at most `width`.
        place_N: see `PassInputs`.
        width: see `PassInputs`.
        cp: the ranks that share the pack.
    """
    gathered: Tensor = _Gathered.apply(values_n, place_N, width, cp)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, width: int, cp: Group) -> Tensor:
        ctx.save_for_backward(place)
        ctx.own = cp.rank * width, values.shape[-1], cp.size * width
        rows = values.new_zeros(*values.shape[:-1], width)
        rows[..., : values.shape[-1]] = values
        everywhere = cp.all_gather(rows)  # [cp, ..., width]
        return everywhere.movedim(0, -2).flatten(-2).index_select(-1, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        start, count, size = ctx.own
        everywhere = grads[0].new_zeros(*grads[0].shape[:-1], size)
        everywhere.index_copy_(-1, place, grads[0])
        return everywhere[..., start : start + count], None, None, None


@dataclass(frozen=True, kw_only=True)
class CausalRuns:
    """Keys that the queries of one context parallel rank see: runs of queries, each aligned with the end of its keys.

    Alone a rank has a run for each sequence; else two, for the two chunks that it holds of each: the keys of a chunk
    are those of the sequence up to the chunk's own end.

    Args:
        num_queries: of each run; together the rank's tokens in their order.
        num_keys: of each run.
        key_K: place of every run's keys, run after run, in the ranks' tokens laid end to end; None: the rank's own.
        bounds: of the runs.
    """

    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]
    key_K: Tensor | None
    bounds: VarlenBounds


def causal_runs(
    lengths: Sequence[int], gathered_T: Tensor | None, rank: int, num_ranks: int, device: torch.device | None = None
) -> CausalRuns:
    """Return the runs of one of the ranks that share a pack.

    Args:
        lengths: of the whole sequences, each a multiple of twice the ranks where there are several.
        gathered_T: see `PassInputs`.
        rank: in [0, num_ranks).
        num_ranks: that share the pack.
        device: of the rank; None for main memory.
    """
    parts = 2 * num_ranks if num_ranks > 1 else 1
    held = (rank, 2 * num_ranks - 1 - rank) if num_ranks > 1 else (0,)
    queries = [length // parts for length in lengths for _ in held]
    keys = [(number + 1) * length // parts for length in lengths for number in held]
    key_K = None
    if gathered_T is not None:
        starts = np.repeat(np.cumsum([0, *lengths[:-1]]), len(held))
        packed_K = np.concatenate([start + np.arange(num) for start, num in zip(starts, keys, strict=True)])
        key_K = gathered_T.index_select(0, torch.as_tensor(packed_K, device=device))
    both = [torch.as_tensor(np.cumsum([0, *each]), dtype=torch.int32, device=device) for each in (queries, keys)]
    bounds = VarlenBounds(queries=both[0], keys=both[1], longest_query=max(queries), longest_key=max(keys))
    return CausalRuns(num_queries=tuple(queries), num_keys=tuple(keys), key_K=key_K, bounds=bounds)


def attend(
    query_LHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, runs: CausalRuns, *, scale: float, kernel: str
) -> Tensor:
    """Causal attention of each run: [L, H, D].

    Args:
        query_LHD: of this rank.
        key_KGD: of the runs, one after the other.
        value_KGD: like the keys.
        runs: of this rank.
        scale: factor on the scores.
        kernel: "varlen", one call for all runs; or "runs", a call for each, with a mask of its queries and keys where
            there are fewer queries.
    """
    if kernel == "varlen":
        return varlen_attention(query_LHD, key_KGD, value_KGD, runs.bounds, scale=scale, window=None)
    heads = query_LHD.shape[1] // key_KGD.shape[1]
    key, value = (torch.split(each.repeat_interleave(heads, 1), list(runs.num_keys)) for each in (key_KGD, value_KGD))
    query = torch.split(query_LHD, list(runs.num_queries))
    return torch.cat([_attend_run(*each, scale) for each in zip(query, key, value, strict=True)])


def _attend_run(query_lHD: Tensor, key_kHD: Tensor, value_kHD: Tensor, scale: float) -> Tensor:
    """[l, H, D]."""
    query, key, value = (each.transpose(0, 1)[None] for each in (query_lHD, key_kHD, value_kHD))
    num_queries, num_keys = len(query_lHD), len(key_kHD)
    whole, mask = num_queries == num_keys, None
    if not whole:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_lHD.device)
        mask = seen.tril(num_keys - num_queries)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, scale=scale)
    return out[0].transpose(0, 1)
