"""The caller's loss, called for each micro-batch of a rank.

Shapes: N loss tokens of a micro-batch.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import (
    LossFunction,
    LossTokens,
    Metrics,
    ShapeError,
    TrainSequence,
    call_loss,
    count_micro_batch,
    loss_extras,
)


class LaidOut(Protocol):
    """Layout of a micro-batch's sequences."""

    @property
    def members(self) -> Sequence[int]:
        """Index of each sequence in the update."""
        ...

    @property
    def ids_T(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """Token ids that are computed."""
        ...

    @property
    def sequence_N(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """Return which of `members` each loss token belongs to."""
        ...


class LossCalls:
    """Calls the loss function for each micro-batch, and keeps what it said.

    A loss that raises, returns something else than it should or is not finite must not end the pass, in which other
    ranks wait for this one: there is nothing to differentiate, and it is reported to all ranks afterwards.

    Args:
        sequences: of the whole update, each with a loss token.
        loss: of the caller.

    Attributes:
        results: metrics of each micro-batch so far.
        failure: why there is no loss, if there is none.
        not_finite: a loss was infinite or NaN.
    """

    def __init__(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> None:
        self._sequences, self._loss = sequences, loss
        # Of the whole update: each micro-batch divides its loss by these.
        self._totals = sum(int(sequence.loss_mask.sum()) for sequence in sequences), len(sequences)
        self.results: list[Metrics] = []
        self.failure: Exception | None = None
        self.not_finite = False

    def of(self, batch: LaidOut, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor | None:
        """Return the scalar to differentiate for one micro-batch; None where there is none."""
        # A loss that has failed is not asked again: the pass is only finished, as other ranks wait in it.
        if not batch.members or self.failure is not None:
            return None
        members = [self._sequences[member] for member in batch.members]
        try:
            value, metrics = call_loss(self._loss, self._tokens(members, batch, logprobs_N, entropy_N))
        except Exception as error:  # noqa: BLE001  raised on all ranks when the pass is over
            self.failure = error
            return None
        counts = count_micro_batch(members, len(batch.ids_T), float(value.detach()))
        self.results.append({**metrics, **counts})
        if not torch.isfinite(value.detach()):
            # The step is refused, so there is no gradient to compute.
            self.not_finite = True
            return None
        return value

    def _tokens(
        self, members: Sequence[TrainSequence], batch: LaidOut, logprobs_N: Tensor, entropy_N: Tensor
    ) -> LossTokens[Tensor]:
        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(logprobs_N.device)

        return LossTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            sequence_N=tensor(batch.sequence_N),
            num_sequences=len(members),
            extras={name: tensor(values) for name, values in loss_extras(members).items()},
            total_tokens=self._totals[0],
            total_sequences=self._totals[1],
        )


def with_loss_tokens(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences that train; the others take no part in an update.

    Raises:
        ShapeError: they have different extras.
    """
    found = [sequence for sequence in sequences if sequence.loss_mask.any()]
    if len({frozenset(sequence.extras) for sequence in found}) > 1:
        raise ShapeError("all sequences of an update need the same extras; give each the arrays the loss reads")
    return found
