"""Log-probabilities and entropies from a head whose rows tensor parallel ranks share, of tokens that context parallel
ranks share.

Shapes: N loss tokens, n of them on this rank, E hidden size, V rows of the head on this rank.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import offbeat_training as training
from offbeat_mesh import Group


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
        place_N: see `LocalPack`.
        width: see `LocalPack`.
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
