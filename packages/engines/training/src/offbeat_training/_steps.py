"""Updates of the weights, and the right to refuse one."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offbeat_core import Metric, Metrics

log = logging.getLogger(__name__)


class Optimizer(Protocol):
    """Interface of an optimizer with a schedule and clipping, for taking a step."""

    steps_taken: int

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ...

    def step(self, grad_norm: float) -> None:
        """Clip from `grad_norm` to the configured norm, and update."""
        ...


class Steps:
    """Takes the steps of an engine. All ranks call every method.

    Args:
        optimizer: of the weights.
        exchange: plain data of every rank.
        names: of all tensors that are trained, in the model's order.
        first_not_finite: name of this rank's first tensor whose gradient is not finite; empty when all are.

    Attributes:
        refused: how many there were since the run began.
        last_refusal: why the last one was refused; empty when none was.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Callable[[Any], list[Any]],
        names: Sequence[str],
        first_not_finite: Callable[[], str],
    ) -> None:
        self._optimizer, self._exchange = optimizer, exchange
        self._names, self._first_not_finite = names, first_not_finite
        self.refused, self.last_refusal = 0, ""

    def take(self, norm: float, *, bad_loss: bool) -> Metrics:
        """Clip and update the weights; or refuse, and change nothing but the count of refused steps.

        Args:
            norm: of the gradients of all ranks.
            bad_loss: a loss of this update was not finite, on some rank.

        Returns:
            `grad_norm` (before clipping; weight 0 when refused), `learning_rate`, `steps_refused` (0 or 1).
        """
        rate = self._optimizer.learning_rate
        refused = bad_loss or not math.isfinite(norm)
        if refused:
            self._refuse(bad_loss=bad_loss)
        else:
            self._optimizer.step(norm)
        return {
            "grad_norm": Metric(value=0.0 if refused else norm, weight=0.0 if refused else 1.0),
            "learning_rate": Metric(value=rate, how="last"),
            "steps_refused": Metric(value=float(refused), how="sum"),
        }

    def _refuse(self, *, bad_loss: bool) -> None:
        self.refused += 1
        found = set(self._exchange(self._first_not_finite()))
        name = next((name for name in self._names if name in found), "")
        where = f"the gradient of {name} is" if name else "the loss is" if bad_loss else "the gradient norm is"
        number = self._optimizer.steps_taken
        self.last_refusal = f"update {number}: {where} not finite; the weights were left as they were"
        log.warning("step refused (%d so far): %s", self.refused, self.last_refusal)


class _Ranks(Protocol):
    size: int
    leader: bool


class StepCounts:
    """Counts of a trainer's ranks and updates, from its `_ranks`, `_optimizer` and `_steps`."""

    _ranks: _Ranks
    _optimizer: Optimizer
    _steps: Steps

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self._ranks.size

    @property
    def leader(self) -> bool:
        """Return whether this rank is the one to report, send and write what only one should."""
        return self._ranks.leader

    @property
    def steps_taken(self) -> int:
        """Updates done, refused ones not counted."""
        return self._optimizer.steps_taken

    @property
    def steps_refused(self) -> int:
        """Updates refused since the run began."""
        return self._steps.refused

    @property
    def last_refusal(self) -> str:
        """Why the last refused step was refused; empty when none was."""
        return self._steps.last_refusal
