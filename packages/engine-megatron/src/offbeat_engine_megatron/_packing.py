"""Lays sequences out without padding to a common length: which go together, and where each token lies on each rank.

A pack is a row of sequences. What comes after the last loss token's predecessor predicts nothing and is left out.
Context parallel ranks share every sequence: it is cut into 2·cp chunks, and rank r holds chunks r and 2·cp - 1 - r, so
that causal attention costs all of them the same. Source: Megatron-LM, the zigzag layout of TransformerEngine's thd.

Shapes: T packed tokens, L of them on one rank, N loss tokens, t a token's index in its own sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import offbeat_training as training
from offbeat_engine_megatron._layout import Parallel
from offbeat_mesh import Group
from offbeat_training import Family, ImageInputs, Indices, MicroBatch, fill_evenly
from offbeat_types import TrainSequence

if TYPE_CHECKING:
    from offbeat_engine_megatron._mtp import Ahead


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """What one rank computes of a micro-batch, on its device.

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
        ahead: of each layer of multi-token prediction, where they train.
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
    ahead: "tuple[Ahead, ...]" = ()


def used_tokens(sequence: TrainSequence) -> int:
    """Tokens that have to be computed: up to the predecessor of the last loss token."""
    places = np.flatnonzero(sequence.loss_mask)
    return int(places[-1]) if len(places) else 0


Share = list[list[int]]
"""Micro-batches of one data parallel rank: the sequences of each; an empty one for a rank without a part."""


def plan_shares(
    sequences: Sequence[TrainSequence], *, budget: int, num_shares: int, round_up_to: int = 1
) -> list[Share]:
    """Choose micro-batches for every share, as many for each.

    The longest sequence left goes to the least filled micro-batch.
    Source: the longest-processing-time rule (Graham 1969).

    Args:
        sequences: those without a loss token are left out.
        budget: tokens of a micro-batch at most; a longer sequence goes alone.
        num_shares: data parallel ranks.
        round_up_to: the number of micro-batches becomes a multiple of it, as interleaved pipelines need.
    """
    sizes = {index: used_tokens(sequence) for index, sequence in enumerate(sequences)}
    order = sorted((index for index in sizes if sizes[index]), key=lambda index: (-sizes[index], index))
    if not order:
        return [[] for _ in range(num_shares)]
    rounds = max(1, -(-sum(sizes.values()) // (budget * num_shares)))
    while (found := fill_evenly([sizes[index] for index in order], rounds * num_shares, budget)) is None:
        rounds += 1
    bins = [[order[place] for place in each] for each in found]
    bins.sort(key=lambda members: (-sum(sizes[member] for member in members), members))
    shares: list[Share] = [bins[first::num_shares] for first in range(num_shares)]
    for share in shares:
        share += [[]] * (-len(share) % round_up_to)
    return shares


def lay_out(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    parallel: Parallel,
    *,
    length: int = 1,
    images: ImageInputs | None = None,
) -> MicroBatch:
    """Lay out one micro-batch; one without members is padding, for a rank that only meets the others in it.

    Args:
        sequences: of the whole update.
        members: those of this micro-batch, each with a loss token.
        parallel: says what lengths are padded to.
        length: tokens of the pack at least.
        images: what is known of the model's; None for one that takes none.
    """
    families = [Family(members=(each,), prefix=0, num_tokens=used_tokens(sequences[each])) for each in members]
    multiples = {"segment_multiple": parallel.sequence_multiple, "pack_multiple": parallel.pack_multiple}
    return training.lay_out(sequences, families, images, num_tokens=length, **multiples)


def lay_out_all(
    sequences: Sequence[TrainSequence],
    share: Sequence[Sequence[int]],
    parallel: Parallel,
    images: ImageInputs | None = None,
) -> list[MicroBatch]:
    """Lay out the micro-batches of a share; for interleaved stages all of one length."""
    packs = [lay_out(sequences, members, parallel, images=images) for members in share]
    if parallel.vpp > 1 and packs:
        longest = max(len(pack.ids_T) for pack in packs)
        packs = [lay_out(sequences, members, parallel, length=longest, images=images) for members in share]
    return packs


def cut(pack: MicroBatch, rank: int, num_ranks: int, device: torch.device | None = None) -> PassInputs:
    """The part of one context parallel rank.

    Args:
        pack: with lengths divisible by twice the number of ranks.
        rank: in [0, num_ranks).
        num_ranks: that share the pack.
        device: of the rank; None for main memory.
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

    def tensor(array: Indices) -> Tensor:
        return torch.as_tensor(array, device=device)

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
    """What context parallel ranks found for the tokens they hold, in the order of the pack.

    Every rank goes on to compute the whole loss, so the gradient of its own values is that of the result, not a sum.

    Args:
        values_n: [..., n] of this rank, n at most `width`.
        place_N: see `PassInputs`.
        width: see `PassInputs`.
        cp: the ranks that share the pack.

    Returns:
        [..., N], alike on all ranks.
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
