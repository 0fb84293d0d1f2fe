"""The alarm about rollout engines whose log-probabilities are not those of the trainer's weights."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from offbeat_core import Metric
from offbeat_run import MetricsLine

ALARM_METRIC: Final = "mismatch/abs_p99_nats_lag0"
EXACT_METRIC: Final = "mismatch/abs_max_nats_lag0"
_CAUSES: Final = (
    "engines that hold other weights than the trainer, another number format or kernel, other tokens or another chat "
    "template, sampling parameters that one side does not apply (temperature, top_p, top_k), routing of experts"
)


class MismatchAlarm:
    """Says once for a bound that tokens without lag are further apart than it, and since when.

    Args:
        bound_nats: on the 99th percentile of |log r| of tokens that the trainer scored with the weights that sampled
            them; None: no alarm.
        past: what earlier processes of this run have measured.
        alarms: texts of the alarms that they raised; one under this bound is not repeated, one under another bound is.
        exact: numerics are; the bound is on the largest |log r|.
    """

    def __init__(
        self,
        bound_nats: float | None,
        past: Iterable[MetricsLine] = (),
        alarms: Iterable[str] = (),
        *,
        exact: bool = False,
    ) -> None:
        self._exact, self._metric = exact, EXACT_METRIC if exact else ALARM_METRIC
        self._bound_nats = math.inf if bound_nats is None else bound_nats
        self._most_before, self._first_above = 0.0, 0  # nats; update, 0 for none
        self._begun_at = 0  # first update with a token without lag
        for line in past:
            if isinstance(value := line.values.get(self._metric), float):
                self._take(line.step, value)
        self._is_raised = any(self._names_bound in text for text in alarms)

    def look(self, update: int, metrics: Mapping[str, Metric]) -> str:
        """Take the metrics of an update; return the text of the alarm if it is the first one, else an empty text."""
        if self._metric not in metrics:
            return ""
        value = metrics[self._metric].value
        self._take(update, value)
        if self._is_raised or value <= self._bound_nats:
            return ""
        self._is_raised = True
        what = "largest" if self._exact else "99th percentile of"
        return (
            f"mismatch alarm {self._since}: trainer and rollout engines differ by {value:.3g} nats "
            f"({what} |log r|, {self._metric}) on tokens sampled by the very weights in training; "
            f"{self._names_bound}`grpo-async-app diagnose RUN` names the cause. Possible causes: {_CAUSES}"
        )

    def _take(self, update: int, value: float) -> None:
        self._begun_at = self._begun_at or update
        if not self._first_above and value > self._bound_nats:
            self._first_above = update
        elif not self._first_above:
            self._most_before = max(self._most_before, value)

    @property
    def _names_bound(self) -> str:
        """The part of an alarm by which a resumed run knows under which bound it was given."""
        if self._exact:
            return 'engine.options.numerics is "exact", which needs CPUs of one kind on both sides. '
        return f"algorithm.mismatch_alarm_nats is {self._bound_nats:g}. "

    @property
    def _since(self) -> str:
        if self._first_above == self._begun_at:
            return f"from the first update on ({self._first_above})"
        return f"since update {self._first_above} (until then at most {self._most_before:.3g} nats)"
