"""What every training engine does with the sequences of an update, whatever computes them.

Shapes: T tokens of one sequence, N loss tokens of one micro-batch, as in `TrainEngine`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from offbeat_types._errors import ModelError, OffbeatError
from offbeat_types._rollout import Floats
from offbeat_types._training import LossFunction, LossTokens, Metric, Metrics, TensorT, TrainSequence


def check_token_ids(sequences: Sequence[TrainSequence], vocabulary: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ModelError: with the range found.
    """
    found = [sequence.ids for sequence in sequences if len(sequence.ids)]
    low = min((int(ids.min()) for ids in found), default=0)
    high = max((int(ids.max()) for ids in found), default=0)
    if low < 0 or high >= vocabulary:
        raise ModelError(
            f"token ids must be in [0, {vocabulary}): got {low} to {high}; use the tokenizer of this model"
        )


def loss_extras(sequences: Sequence[TrainSequence]) -> dict[str, Floats]:
    """The extras of a micro-batch's sequences at their loss tokens, each [N] float32, by name in order."""
    return {
        name: np.concatenate([each.extras[name][each.loss_mask] for each in sequences]).astype(np.float32)
        for name in sorted(sequences[0].extras)
    }


def call_loss(loss: LossFunction, tokens: LossTokens[TensorT]) -> tuple[TensorT, Metrics]:
    """Call the caller's loss and check what it returns, before anything is done with it that other ranks wait for.

    Returns:
        A scalar, and metrics whose numbers are plain ones.

    Raises:
        OffbeatError: it returned something else; and whatever the loss raises.
    """
    value: Any
    value, metrics = loss(tokens)
    is_tensor = isinstance(value, type(tokens.logprobs_N))
    if not is_tensor or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise OffbeatError(f"the loss must return (scalar tensor, metrics): got {got} for the scalar")
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise OffbeatError(f"the loss must return its metrics as Metric(value=...): got {name} = {metric!r}")
    return value.reshape(()), {
        name: Metric(value=float(metric.value), weight=float(metric.weight), how=metric.how)
        for name, metric in metrics.items()
    }


def count_micro_batch(sequences: Sequence[TrainSequence], num_computed: int, loss: float) -> Metrics:
    """What an engine reports of a micro-batch beside the metrics of the loss function.

    Args:
        sequences: of the micro-batch.
        num_computed: tokens that were computed for them.
        loss: of the micro-batch.
    """
    counts = {
        "loss": loss,
        "num_microbatches": 1.0,
        "packed_tokens": float(num_computed),
        "sequence_tokens": float(sum(len(sequence.ids) for sequence in sequences)),
    }
    return {name: Metric(value=value, how="sum") for name, value in counts.items()}


def spread_values(
    sequences: Sequence[TrainSequence], members: Sequence[Sequence[int]], values: Sequence[Floats]
) -> list[Floats]:
    """Bring each share's values, one per loss token in its order, to the sequences.

    Args:
        sequences: of the whole update.
        members: for each share, which of them it computed.
        values: of each share.

    Returns:
        [T] float32 for each sequence, 0 outside the loss mask.
    """
    found = [np.zeros(len(sequence.ids), np.float32) for sequence in sequences]
    for share, theirs in zip(members, values, strict=True):
        start = 0
        for member in share:
            mask = sequences[member].loss_mask
            stop = start + int(mask.sum())
            found[member][mask] = theirs[start:stop]
            start = stop
    return found
