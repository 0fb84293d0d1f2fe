"""What the loss function reads of one micro-batch, and what is counted of it."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from offbeat_engine_torch._packing import Pack
from offbeat_engine_torch._policy import Policy
from offbeat_types import Floats, LossFunction, LossTokens, Metric, Metrics, OffbeatError, TrainSequence


def ask_loss_tokens(
    policy: Policy,
    sequences: Sequence[TrainSequence],
    pack: Pack,
    totals: tuple[int, int],
    *,
    through_tower: bool = False,
) -> LossTokens[Tensor]:
    """Run the policy over a pack.

    Args:
        policy: carries the gradient.
        sequences: of the whole update.
        pack: some of them.
        totals: loss tokens and sequences of the whole update.
        through_tower: as `Policy.ask`.
    """
    logprobs, entropy = policy.ask(pack, through_tower=through_tower)
    names = sorted(sequences[pack.members[0]].extras)
    return LossTokens(
        logprobs_N=logprobs,
        entropy_N=entropy,
        sequence_N=policy.tensor(pack.sequence_N),
        num_sequences=len(pack.members),
        extras={name: policy.tensor(_extra(sequences, pack, name)) for name in names},
        total_tokens=totals[0],
        total_sequences=totals[1],
    )


def call_loss(loss: LossFunction, tokens: LossTokens[Tensor]) -> tuple[Tensor, Metrics]:
    """Call the caller's loss and check what it returns, before anything is done with it that other ranks wait for.

    Returns:
        A scalar, and metrics whose numbers are plain ones.

    Raises:
        OffbeatError: it returned something else; and whatever the loss raises.
    """
    value, metrics = loss(tokens)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise OffbeatError(f"the loss must return (scalar tensor, metrics): got {got} for the scalar")
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise OffbeatError(f"the loss must return its metrics as Metric(value=...): got {name} = {metric!r}")
    return value.reshape(()), {
        name: Metric(value=float(metric.value), weight=float(metric.weight), how=metric.how)
        for name, metric in metrics.items()
    }


def count_pack(sequences: Sequence[TrainSequence], pack: Pack, loss: float) -> Metrics:
    """What every update reports beside the metrics of the loss function."""
    counts = {
        "loss": loss,
        "num_microbatches": 1.0,
        "packed_tokens": float(len(pack.ids_T)),
        "sequence_tokens": float(sum(len(sequences[member].ids) for member in pack.members)),
    }
    return {name: Metric(value=value, how="sum") for name, value in counts.items()}


def _extra(sequences: Sequence[TrainSequence], pack: Pack, name: str) -> Floats:
    """[N] float32: one extra of every sequence at its loss tokens."""
    parts = [sequences[member].extras[name][sequences[member].loss_mask] for member in pack.members]
    return np.concatenate(parts).astype(np.float32)
