"""Measurements of scoring: how many wait, how busy the scorers are, how long a completion takes, what judges cost."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from offbeat_async_policy import BusyClock
from offbeat_core import Metric, Metrics


class ScoringMetrics:
    """Takes note of every completion, and gives what an update writes down.

    Attributes:
        num_scorers: processes that score, now.
        num_restarts: scorers that were ended and are started again.
    """

    def __init__(self) -> None:
        self.num_scorers, self.num_restarts = 0, 0
        self._num_waiting, self._costs, self._latencies_s = 0, Counter[str](), list[float]()
        self._clock = BusyClock("", lambda: self.num_scorers, time.monotonic, lambda *_: None)

    @contextmanager
    def scoring(self, num_completions: int) -> Iterator[None]:
        """Completions of a prompt, from the moment they ask until they are judged."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._latencies_s += [time.monotonic() - started_s] * num_completions

    @contextmanager
    def queued(self, num_completions: int = 1) -> Iterator[None]:
        """Completions that wait for a scorer."""
        self._num_waiting += num_completions
        try:
            yield
        finally:
            self._num_waiting -= num_completions

    @contextmanager
    def busy(self, scorer: str) -> Iterator[None]:
        """A scorer at work."""
        with self._clock.busy(scorer):
            yield

    def add_costs(self, costs: Mapping[str, float]) -> None:
        self._costs.update(costs)

    def lap(self) -> Metrics:
        """Since the last lap, or at this moment; costs and restarts since the beginning."""
        latencies_s, self._latencies_s = self._latencies_s, []
        metrics = {
            "scoring/queue": Metric(value=float(self._num_waiting), how="last"),
            "scoring/busy_share": Metric(value=1 - self._clock.lap().rollout_idle),
            "scoring/processes": Metric(value=float(self.num_scorers), how="last"),
        }
        if self.num_restarts:
            metrics["scoring/restarts"] = Metric(value=float(self.num_restarts), how="last")
        if latencies_s:
            p50_s, p95_s, max_s = np.percentile(latencies_s, [50, 95, 100])
            metrics["scoring/latency_p50_s"] = Metric(value=float(p50_s), weight=float(len(latencies_s)))
            metrics["scoring/latency_p95_s"] = Metric(value=float(p95_s), weight=float(len(latencies_s)))
            metrics["scoring/latency_max_s"] = Metric(value=float(max_s), how="max")
        return {**metrics, **{name: Metric(value=count, how="last") for name, count in self._costs.items()}}
