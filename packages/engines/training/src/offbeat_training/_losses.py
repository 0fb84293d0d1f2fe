"""The caller's loss, called for each micro-batch of a rank.

Shapes: N loss tokens of a micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import (
    DeferredMetrics,
    LossFunction,
    LossMetrics,
    LossTokens,
    Metrics,
    ShapeError,
    TrainSequence,
    call_loss,
    count_micro_batch,
    loss_extras,
)
from offbeat_device import copy_to_device


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
    """Calls the loss function for each micro-batch, and keeps what it said on the device until `read`.

    A loss that raises, returns something else than it should or is not finite must not end the pass, in which other
    ranks wait for this one: it is reported to all ranks afterwards.

    Args:
        sequences: of the whole update, each with a loss token.
        loss: of the caller.

    Attributes:
        results: metrics of each micro-batch, after `read`.
        failure: why there is no loss, if there is none.
        not_finite: a loss was infinite or NaN; known after `read`.
    """

    def __init__(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> None:
        self._sequences, self._loss = sequences, loss
        # Of the whole update: each micro-batch divides its loss by these.
        self._totals = sum(int(sequence.loss_mask.sum()) for sequence in sequences), len(sequences)
        self._unread: list[_Unread] = []
        self.results: list[Metrics] = []
        self.failure: Exception | None = None
        self.not_finite = False

    def of(
        self, batch: LaidOut, logprobs_N: Tensor, entropy_N: Tensor, differing_N: Tensor | None = None
    ) -> Tensor | None:
        """Return the scalar to differentiate for one micro-batch; None where there is none.

        One that is not finite has a gradient of 0: the step is refused, and its micro-batch gives nothing to blame.

        Args:
            batch: the micro-batch.
            logprobs_N: nats, of its loss tokens.
            entropy_N: nats, of the same.
            differing_N: extra `routes_differ` of the loss: see `measure_mismatch` of offbeat-objectives.
        """
        # A loss that has failed is not asked again: the pass is only finished, as other ranks wait in it.
        if not batch.members or self.failure is not None:
            return None
        members = [self._sequences[member] for member in batch.members]
        try:
            value, metrics = call_loss(self._loss, self._tokens(members, batch, logprobs_N, entropy_N, differing_N))
        except Exception as error:  # noqa: BLE001  raised on all ranks when the pass is over
            self.failure = error
            return None
        self._unread.append(_Unread(value.detach(), metrics, members, len(batch.ids_T)))
        _silence_unless(value.detach().isfinite(), logprobs_N, entropy_N)
        return value

    def read(self) -> None:
        """Read losses and metrics of all micro-batches from the device, by one copy: the only wait for it."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        numbers = [number for each in unread for number in each.numbers]
        flat = torch.cat([number.detach().reshape(-1) for number in numbers]).cpu().double().numpy()
        values = iter(np.split(flat, np.cumsum([number.numel() for number in numbers])[:-1]))
        for each in unread:
            try:
                found = each.read(list(islice(values, len(each.numbers))))
            except Exception as error:  # noqa: BLE001  as of the loss
                self.failure = self.failure or error
                return
            self.results.append(found)
            self.not_finite |= not math.isfinite(found["loss"].value)

    def _tokens(
        self,
        members: Sequence[TrainSequence],
        batch: LaidOut,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        differing_N: Tensor | None,
    ) -> LossTokens[Tensor]:
        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return copy_to_device(torch.from_numpy(np.ascontiguousarray(array)), logprobs_N.device)

        extras = {name: tensor(values) for name, values in loss_extras(members).items()}
        return LossTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            sequence_N=tensor(batch.sequence_N),
            num_sequences=len(members),
            extras=extras if differing_N is None else {**extras, "routes_differ": differing_N},
            total_tokens=self._totals[0],
            total_sequences=self._totals[1],
        )


@dataclass(frozen=True)
class _Unread:
    """One micro-batch: its loss, a scalar on the device, and the metrics of its loss function."""

    loss: Tensor
    metrics: LossMetrics
    members: Sequence[TrainSequence]
    num_computed: int

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """Tensors to read."""
        return (self.loss, *self.metrics.numbers) if isinstance(self.metrics, DeferredMetrics) else (self.loss,)

    def read(self, values: Sequence[npt.NDArray[np.float64]]) -> Metrics:
        """Return all metrics, given the values of `numbers`."""
        counts = count_micro_batch(self.members, self.num_computed, float(values[0][0]))
        metrics = self.metrics
        return {**(metrics.read(values[1:]) if isinstance(metrics, DeferredMetrics) else metrics), **counts}


def _silence_unless(is_finite: Tensor, *answers_N: Tensor) -> None:
    """Have answers receive a gradient of 0 in place of any other unless a bool on the device is true."""

    def silence(grad_N: Tensor | None) -> Tensor | None:
        return None if grad_N is None else grad_N.where(is_finite, 0.0)

    for answer_N in answers_N:
        if answer_N.requires_grad:
            answer_N.register_hook(silence)  # type: ignore[no-untyped-call]


def with_loss_tokens(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences that train; the others take no part in an update.

    Raises:
        ShapeError: they have different extras.
    """
    found = [sequence for sequence in sequences if sequence.loss_mask.any()]
    if len({frozenset(sequence.extras) for sequence in found}) > 1:
        raise ShapeError("all sequences of an update need the same extras; give each the arrays the loss reads")
    return found
