"""Numbers that an update is measured by, and how those of micro-batches, ranks and steps become one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offbeat_core._errors import PeerFailedError

Aggregation = Literal["mean", "sum", "max", "min", "last"]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number with the way it combines over micro-batches, ranks and steps declared beside it.

    Args:
        value: the number.
        weight: its weight in a mean, such as the tokens it was taken over; ignored by the other aggregations.
        how: how two of them become one.
    """

    value: float
    weight: float = 1.0
    how: Aggregation = "mean"

    def merge(self, other: "Metric") -> "Metric":
        """Combine with a later metric of the same name and aggregation."""
        if self.how != other.how:
            raise ValueError(f"cannot merge a {self.how} with a {other.how}")
        if self.how == "mean":
            weight = self.weight + other.weight
            value = (self.value * self.weight + other.value * other.weight) / weight if weight else 0.0
            return Metric(value=value, weight=weight, how="mean")
        if self.how == "last":
            return other
        value = {"sum": self.value + other.value, "max": max(self.value, other.value)}.get(
            self.how, min(self.value, other.value)
        )
        return Metric(value=value, weight=self.weight + other.weight, how=self.how)


Metrics = dict[str, Metric]


def merge_metrics(batches: Sequence[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics by name, in order."""
    merged: Metrics = {}
    for batch in batches:
        for name, metric in batch.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


class DeferredMetrics(Mapping[str, Metric]):
    """Metrics of one micro-batch whose numbers a device may still be computing.

    An engine reads those of all micro-batches at once, after the last backward pass. Any other look at one waits for
    the device.

    Args:
        numbers: tensors on one device, float32 or float64, of any shape.
        make: makes the metrics of the numbers: for each tensor a flat float64 array.
    """

    def __init__(self, numbers: Sequence[Any], make: Callable[[Sequence[Doubles]], Metrics]) -> None:
        self.numbers, self._make = tuple(numbers), make
        self._found: Metrics | None = None

    def read(self, values: Sequence[Doubles] | None = None) -> Metrics:
        """Return the metrics.

        Args:
            values: of `numbers`, flat, where they have been copied already.
        """
        if self._found is None:
            if values is None:
                values = [np.asarray(each.detach().cpu(), np.float64).reshape(-1) for each in self.numbers]
            self._found = self._make(values)
        return self._found

    def __or__(self, other: Mapping[str, Metric]) -> "DeferredMetrics":
        """Return these and others, which are read together."""
        others = other if isinstance(other, DeferredMetrics) else DeferredMetrics((), lambda _: dict(other))

        def make(values: Sequence[Doubles]) -> Metrics:
            return self.read(values[: len(self.numbers)]) | others.read(values[len(self.numbers) :])

        return DeferredMetrics(self.numbers + others.numbers, make)

    def __getitem__(self, name: str) -> Metric:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())


def merge_over_ranks(
    results: Sequence[Metrics],
    failure: Exception | None,
    *,
    share: int,
    speaks: bool,
    exchange: Callable[[Any], Sequence[Any]],
) -> Metrics:
    """Metrics of all micro-batches over all shares, in their order. All ranks call it, and all get the same.

    Args:
        results: of the micro-batches of this rank.
        failure: why there are no more, if something failed.
        share: the part of the update that this rank computes.
        speaks: this rank reports for its share; one of each does.
        exchange: gives the plain data of every rank, in the order of ranks.

    Raises:
        PeerFailedError: another rank failed; and `failure`, on the rank that did.
    """
    plain, failure = _pack(results, failure)
    reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
    found = exchange((reason, share, speaks, plain))
    if failure is not None:
        raise failure
    for rank, (their_reason, *_) in enumerate(found):
        if their_reason:
            raise PeerFailedError(f"trainer rank {rank}", their_reason)
    by_share = {their_share: metrics for _, their_share, they_speak, metrics in found if they_speak}
    return merge_metrics([_unpack(by_share[each]) for each in sorted(by_share)])


def _pack(results: Sequence[Metrics], failure: Exception | None) -> tuple[dict[str, list[Any]], Exception | None]:
    """Metrics as plain data, or why there are none; raises nothing: other ranks wait for either."""
    try:
        merged = merge_metrics(results)
    except Exception as error:  # noqa: BLE001  two micro-batches add up one name in two ways: sent to all ranks
        return {}, failure or error
    return {name: [metric.value, metric.weight, metric.how] for name, metric in merged.items()}, failure


def _unpack(plain: Mapping[str, Sequence[Any]]) -> Metrics:
    return {name: Metric(value=value, weight=weight, how=how) for name, (value, weight, how) in plain.items()}
