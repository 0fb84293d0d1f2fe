"""Turns a handful of scalar tensors into metrics with a single copy from the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from offbeat_types import Aggregation, Metric, Metrics

Measure = tuple[Tensor, float, Aggregation]
"""(scalar, weight in a mean, how two of them combine)."""


def read_metrics(measures: Mapping[str, Measure]) -> Metrics:
    """Copy all scalars to the host at once: one synchronisation, not one for each metric."""
    if not measures:
        return {}
    values = torch.stack([scalar.detach() for scalar, _, _ in measures.values()]).tolist()
    return {
        name: Metric(value=value, weight=weight, how=how)
        for (name, (_, weight, how)), value in zip(measures.items(), values, strict=True)
    }
