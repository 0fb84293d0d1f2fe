"""The caller's loss, called for each micro-batch of a rank.

Shapes: N loss tokens of a micro-batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat_engine_megatron._packing import Pack
from offbeat_types import Floats, LossFunction, LossTokens, Metric, Metrics, OffbeatError, TrainSequence


class Losses:
    """Calls the loss function for each micro-batch, and keeps what it said.

    A loss that raises, returns something else than it should or is not finite must not end the pass, in which other
    ranks wait for this one: its gradient becomes zero, and all ranks hear of it afterwards.

    Args:
        sequences: of the whole update.
        packs: the micro-batches of this rank.
        loss: of the caller.

    Attributes:
        results: metrics of each micro-batch so far.
        failure: why there is no loss, if there is none.
        not_finite: a loss was infinite or NaN.
    """

    def __init__(self, sequences: Sequence[TrainSequence], packs: Sequence[Pack], loss: LossFunction) -> None:
        self._sequences, self._packs, self._loss = sequences, packs, loss
        self._totals = sum(int(sequence.loss_mask.sum()) for sequence in sequences), len(sequences)
        self.results: list[Metrics] = []
        self.failure: Exception | None = None
        self.not_finite = False

    def of(self, number: int, values_2N: Tensor) -> Tensor:
        """The loss of a micro-batch, from log-probabilities and entropies."""
        pack, nothing = self._packs[number], values_2N.sum() * 0.0
        if not pack.members or self.failure is not None:
            return nothing
        try:
            value, metrics = call_loss(self._loss, self._tokens(pack, values_2N))
        except Exception as error:  # noqa: BLE001  raised on all ranks when the pass is over
            self.failure = error
            return nothing
        self.results.append({**metrics, **self._counts(pack, float(value.detach()))})
        if not torch.isfinite(value.detach()):
            self.not_finite = True
            return nothing
        return value + nothing

    def _tokens(self, pack: Pack, values_2N: Tensor) -> LossTokens[Tensor]:
        device = values_2N.device
        names = sorted(self._sequences[pack.members[0]].extras)
        return LossTokens(
            logprobs_N=values_2N[0],
            entropy_N=values_2N[1],
            sequence_N=torch.from_numpy(pack.sequence_N).to(device),
            num_sequences=len(pack.members),
            extras={name: torch.from_numpy(self._extra(pack, name)).to(device) for name in names},
            total_tokens=self._totals[0],
            total_sequences=self._totals[1],
        )

    def _extra(self, pack: Pack, name: str) -> Floats:
        """[N] float32: one extra of every sequence at its loss tokens."""
        found = [self._sequences[member] for member in pack.members]
        return np.concatenate([each.extras[name][each.loss_mask] for each in found]).astype(np.float32)

    def _counts(self, pack: Pack, loss: float) -> Metrics:
        counts = {
            "loss": loss,
            "num_microbatches": 1.0,
            "packed_tokens": float(len(pack.ids_T)),
            "sequence_tokens": float(sum(len(self._sequences[member].ids) for member in pack.members)),
        }
        return {name: Metric(value=value, how="sum") for name, value in counts.items()}


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
