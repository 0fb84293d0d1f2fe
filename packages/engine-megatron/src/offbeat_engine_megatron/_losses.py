"""The caller's loss, called for each micro-batch of a rank.

Shapes: N loss tokens of a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat_engine_megatron._packing import Pack
from offbeat_types import LossFunction, LossTokens, Metrics, TrainSequence, call_loss, count_micro_batch, loss_extras


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
        counts = count_micro_batch(self._members(pack), len(pack.ids_T), float(value.detach()))
        self.results.append({**metrics, **counts})
        if not torch.isfinite(value.detach()):
            self.not_finite = True
            return nothing
        return value + nothing

    def _tokens(self, pack: Pack, values_2N: Tensor) -> LossTokens[Tensor]:
        device, extras = values_2N.device, loss_extras(self._members(pack))
        return LossTokens(
            logprobs_N=values_2N[0],
            entropy_N=values_2N[1],
            sequence_N=torch.from_numpy(pack.sequence_N).to(device),
            num_sequences=len(pack.members),
            extras={name: torch.from_numpy(values).to(device) for name, values in extras.items()},
            total_tokens=self._totals[0],
            total_sequences=self._totals[1],
        )

    def _members(self, pack: Pack) -> list[TrainSequence]:
        return [self._sequences[member] for member in pack.members]
