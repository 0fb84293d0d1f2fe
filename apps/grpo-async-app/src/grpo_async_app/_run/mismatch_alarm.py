"""The alarm about rollout engines whose log-probabilities are not those of the trainer's weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from offbeat_run import MetricsLine
from offbeat_types import Metric

ALARM_METRIC: Final = "mismatch/abs_p99_nats_lag0"
_CAUSES: Final = (
    "engines that hold other weights than the trainer, another number format or kernel, other tokens or another chat "
    "template, sampling parameters that one side does not apply (temperature, top_p, top_k), routing of experts"
)


class MismatchAlarm:
    """Says once that tokens without lag are further apart than a bound, and since when.

    Args:
        bound_nats: on the 99th percentile of |log r| of tokens that the trainer scored with the weights that sampled
            them; None: no alarm.
        past: what earlier processes of this run have measured; an alarm that they gave is not repeated.
    """

    def __init__(self, bound_nats: float | None, past: Sequence[MetricsLine] = ()) -> None:
        self._bound_nats = math.inf if bound_nats is None else bound_nats
        values = [line.values.get(ALARM_METRIC) for line in past]
        self._measured = [value for value in values if isinstance(value, float)]
        self._is_told = any(value > self._bound_nats for value in self._measured)

    def look(self, update: int, metrics: Mapping[str, Metric]) -> str:
        """Take the metrics of an update; the alarm in words if it is the first one, else an empty text."""
        if self._is_told or ALARM_METRIC not in metrics:
            return ""
        value = metrics[ALARM_METRIC].value
        if value <= self._bound_nats:
            self._measured.append(value)
            return ""
        self._is_told = True
        return (
            f"mismatch alarm {self._since(update)}: trainer and rollout engines differ by {value:.3g} nats (99th "
            f"percentile of |log r|, {ALARM_METRIC}) on tokens sampled by the very weights in training; "
            f"algorithm.mismatch_alarm_nats is {self._bound_nats:g}. Possible causes: {_CAUSES}"
        )

    def _since(self, update: int) -> str:
        if not self._measured:
            return f"from the first update on ({update})"
        return f"since update {update} (until then at most {max(self._measured):.3g} nats)"
