"""What the ranks of a trainer tell each other as plain data: were they asked for the same, and what did they find."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat_types._errors import PeerFailedError
from offbeat_types._training import Metric, Metrics, TrainSequence, merge_metrics


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


def digest_sequences(sequences: Sequence[TrainSequence]) -> str:
    """Digest of everything that the plan of an update and its loss read."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        unnamed = [("", array) for array in (sequence.ids, sequence.loss_mask, *sequence.images)]
        for name, array in (*unnamed, *sorted(sequence.extras.items())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _pack(results: Sequence[Metrics], failure: Exception | None) -> tuple[dict[str, list[Any]], Exception | None]:
    """Metrics as plain data, or why there are none; raises nothing: other ranks wait for either."""
    try:
        merged = merge_metrics(results)
    except Exception as error:  # noqa: BLE001  two micro-batches add up one name in two ways: told to all ranks
        return {}, failure or error
    return {name: [metric.value, metric.weight, metric.how] for name, metric in merged.items()}, failure


def _unpack(plain: Mapping[str, Sequence[Any]]) -> Metrics:
    return {name: Metric(value=value, weight=weight, how=how) for name, (value, weight, how) in plain.items()}
