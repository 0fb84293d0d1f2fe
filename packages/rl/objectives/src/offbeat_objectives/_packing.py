"""Flat packed tokens: values of all sequences end to end, the sequence of each, and what is summed up of them.

Shapes: B sequences padded to T tokens, N tokens packed, S sequences (S = B after `pack`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import Aggregation, DeferredMetrics, Metric, Metrics, ShapeError


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Padded tensors made flat.

    Args:
        sequence_N: [N] int64, sorted: the row each token came from.
        num_sequences: S, the number of rows, those without a token included.
        tensors: one [N] tensor for each [B, T] tensor given, in order.
    """

    sequence_N: Tensor
    num_sequences: int
    tensors: tuple[Tensor, ...]


def pack(mask_BT: Tensor, *tensors_BT: Tensor) -> Packed:
    """Drop the padding of [B, T] tensors; the way in for callers that hold padded batches.

    Args:
        mask_BT: [B, T] bool (or 0 and 1); True where a token enters the loss.
        tensors_BT: each [B, T], any dtype.

    Raises:
        ShapeError: the shapes differ.
    """
    _require_shape("pack", mask_BT.shape, *tensors_BT)
    chosen_BT = mask_BT.bool()
    return Packed(
        sequence_N=chosen_BT.nonzero()[:, 0],
        num_sequences=mask_BT.shape[0],
        tensors=tuple(tensor_BT[chosen_BT] for tensor_BT in tensors_BT),
    )


def unpack(mask_BT: Tensor, values_N: Tensor, *, fill: float = 0.0) -> Tensor:
    """Undo `pack` for one tensor.

    Args:
        mask_BT: [B, T], the mask given to `pack`.
        values_N: [N], N the number of True in it.
        fill: value of the padding.

    Returns:
        [B, T] in the dtype of values_N.

    Raises:
        ShapeError: the mask does not hold N tokens.
    """
    chosen_BT = mask_BT.bool()
    num_tokens = int(chosen_BT.sum())
    if values_N.shape != (num_tokens,):
        raise ShapeError(f"unpack needs one value per True of the mask, {num_tokens}: got {tuple(values_N.shape)}")
    values_BT = torch.full(mask_BT.shape, fill, dtype=values_N.dtype, device=values_N.device)
    values_BT[chosen_BT] = values_N
    return values_BT


def sequence_of_tokens(lengths_S: Tensor) -> Tensor:
    """[N] int64, sorted: the sequence of each token, for sequences of these lengths packed end to end."""
    return torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)


def segment_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S]: sum of each sequence's values; 0 for a sequence without tokens."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def segment_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int, weight_N: Tensor) -> Tensor:
    """[S]: mean of each sequence's values under weights of 0 and 1; 0 where no weight is left."""
    total_S = segment_sum(values_N * weight_N, sequence_N, num_sequences)
    count_S = segment_sum(weight_N, sequence_N, num_sequences)
    return total_S / count_S.clamp(min=1)


def reverse_scan(values_N: Tensor, decay: float, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[N]: x_t = values_t + decay · x_{t+1} within each sequence, x = 0 after its last token."""
    if len(values_N) == 0:
        return values_N
    length_S = torch.bincount(sequence_N, minlength=num_sequences)
    mask_ST = torch.arange(int(length_S.max()), device=values_N.device) < length_S[:, None]
    values_ST = unpack(mask_ST, values_N)
    running_S = values_ST.new_zeros(num_sequences)
    for t in reversed(range(values_ST.shape[1])):
        running_S = values_ST[:, t] + decay * running_S
        values_ST[:, t] = running_S
    return values_ST[mask_ST]


def require_tokens(where: str, sequence_N: Tensor, *tensors_N: Tensor) -> None:
    """Raise ShapeError unless every tensor has the shape of sequence_N."""
    _require_shape(where, sequence_N.shape, *tensors_N)


def _require_shape(where: str, shape: torch.Size, *tensors: Tensor) -> None:
    wrong = [tuple(tensor.shape) for tensor in tensors if tensor.shape != shape]
    if wrong:
        raise ShapeError(f"{where} needs every tensor in the shape {tuple(shape)}: got {wrong}")


def aggregate(
    losses_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    *,
    how: str,
    total_tokens: int,
    total_sequences: int,
    fixed_length: int | None = None,
) -> Tensor:
    """Return one micro-batch's share of the update's loss; the shares of all micro-batches and ranks add up to it.

    token_mean: Σ over all tokens / total_tokens (DAPO, 2503.14476, section 3.3).
    sequence_mean: mean over sequences of the mean over their tokens (GRPO, 2402.03300, equation 3).
    fixed_length: mean over sequences of their sum / fixed_length (Dr. GRPO, 2503.20783, section 3).
    A sequence lies in one micro-batch as a whole. Rejected tokens come as 0 and count in every divisor, so that a
    rejection takes weight away and never moves it to other tokens.

    Args:
        losses_N: [N], 0 for rejected tokens.
        sequence_N: [N] int64, sorted.
        num_sequences: S.
        how: token_mean, sequence_mean or fixed_length.
        total_tokens: loss tokens of the whole update.
        total_sequences: sequences with a loss token in the whole update.
        fixed_length: tokens, for fixed_length.

    Returns:
        A scalar; 0 when there is no token.
    """
    if how == "token_mean":
        return losses_N.sum() / max(total_tokens, 1)
    if how == "sequence_mean":
        length_S = segment_sum(losses_N.new_ones(len(losses_N)), sequence_N, num_sequences)
        return (losses_N / length_S[sequence_N]).sum() / max(total_sequences, 1)
    assert how == "fixed_length"
    assert fixed_length is not None, "check_algorithm asks for it"
    return losses_N.sum() / (max(total_sequences, 1) * fixed_length)


Measure = tuple[Tensor, float | Tensor, Aggregation]
"""(scalar, weight in a mean, how two of them combine). One whose weight is a tensor of 0 is left out."""


def defer_metrics(measures: Mapping[str, Measure]) -> DeferredMetrics:
    """Return metrics whose numbers stay on the device until they are read."""
    if not measures:
        return DeferredMetrics((), lambda _: {})
    scalars = [scalar.detach() for scalar, _, _ in measures.values()]
    weights = {name: weight for name, (_, weight, _) in measures.items() if isinstance(weight, Tensor)}
    numbers = torch.stack([*scalars, *(weight.to(scalars[0].dtype) for weight in weights.values())])

    def make(values: Sequence[npt.NDArray[np.float64]]) -> Metrics:
        found = values[0].tolist()
        counted = dict(zip(weights, found[len(scalars) :], strict=True))
        return {
            name: Metric(value=value, weight=counted.get(name, weight), how=how)
            for (name, (_, weight, how)), value in zip(measures.items(), found[: len(scalars)], strict=True)
            if counted.get(name) != 0
        }

    return DeferredMetrics([numbers], make)


def read_metrics(measures: Mapping[str, Measure]) -> Metrics:
    """Copy all scalars to the host at once: one synchronisation, not one for each metric."""
    return defer_metrics(measures).read()
