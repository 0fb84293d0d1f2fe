"""What the ranks of a trainer tell each other as plain data: were they asked for the same, and what did they find."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat_types._training import Metric, Metrics, TrainSequence, merge_metrics


def pack_metrics(
    results: Sequence[Metrics], failure: Exception | None = None
) -> tuple[dict[str, list[Any]], Exception | None]:
    """Metrics of this rank as plain data, or why there are none; raises nothing: other ranks wait for either."""
    try:
        merged = merge_metrics(results)
    except Exception as error:  # noqa: BLE001  two micro-batches add up one name in two ways: told to all ranks
        return {}, failure or error
    return {name: [metric.value, metric.weight, metric.how] for name, metric in merged.items()}, failure


def unpack_metrics(plain: Mapping[str, Sequence[Any]]) -> Metrics:
    """What `pack_metrics` packed."""
    return {name: Metric(value=value, weight=weight, how=how) for name, (value, weight, how) in plain.items()}


def digest_sequences(sequences: Sequence[TrainSequence]) -> str:
    """Digest of everything that the plan of an update and its loss read."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        unnamed = [("", array) for array in (sequence.ids, sequence.loss_mask, *sequence.images)]
        for name, array in (*unnamed, *sorted(sequence.extras.items())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
