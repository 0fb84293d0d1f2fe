"""Updates of the weights, and the right to refuse one."""

import logging
import math

from offbeat_engine_megatron._optimizer import ClippedOptimizer
from offbeat_engine_megatron._ranks import Ranks
from offbeat_engine_megatron._weights import HeldWeights
from offbeat_types import Metric, Metrics

log = logging.getLogger(__name__)


class Steps:
    """Takes the steps of an engine. All ranks call every method.

    Args:
        optimizer: of the weights.
        ranks: of the trainer.
        trained: what the optimizer updates.

    Attributes:
        refused: how many there were since the run began.
        last_refusal: why the last one was refused; empty when none was.
        bad_loss: a loss of this update was not finite, on this rank.
    """

    def __init__(self, optimizer: ClippedOptimizer, ranks: Ranks, trained: HeldWeights) -> None:
        self._optimizer, self._ranks, self._trained = optimizer, ranks, trained
        self.refused, self.last_refusal, self.bad_loss = 0, "", False

    def take(self) -> Metrics:
        """Clip, update the weights, clear gradients; see `MegatronTrainEngine.step`."""
        rate, norm = self._optimizer.learning_rate, self._optimizer.grad_norm()
        self.bad_loss = any(self._ranks.exchange(self.bad_loss))
        refused = self.bad_loss or not math.isfinite(norm)
        if refused:
            self._refuse()
        else:
            self._optimizer.step(norm)
        self.clear()
        return {
            "grad_norm": Metric(value=0.0 if refused else norm, weight=0.0 if refused else 1.0),
            "learning_rate": Metric(value=rate, how="last"),
            "steps_refused": Metric(value=float(refused), how="sum"),
        }

    def clear(self) -> None:
        """Drop all gradients."""
        self._optimizer.clear()
        self.bad_loss = False

    def _refuse(self) -> None:
        self.refused += 1
        found = set(self._ranks.exchange(self._trained.first_not_finite()))
        name = next((slot.name for slot in self._trained.slots if slot.name in found), "")
        where = f"the gradient of {name} is" if name else "the loss is" if self.bad_loss else "the gradient norm is"
        number = self._optimizer.steps_taken
        self.last_refusal = f"update {number}: {where} not finite; the weights were left as they were"
        log.warning("step refused (%d so far): %s", self.refused, self.last_refusal)
