"""What all ranks of the trainer do together: agree, exchange, merge.

All ranks call the same methods with the same arguments in the same order; each method returns the same on all ranks.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch

from offbeat_dist import Mesh
from offbeat_types import Floats, Metric, Metrics, PeerFailedError, TrainSequence, merge_metrics

Value = TypeVar("Value")


class Ranks:
    """The ranks of a trainer.

    Attributes:
        share: this rank's part of every update, in [0, num_shares).
        num_shares: parts that an update is cut into: data parallel ranks.
        speaks: this rank reports what its share has found: first of tp and cp, on the last stage.
        leader: this rank writes what is written once.
        size: how many there are.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._all, self._dp, self._pp = mesh.group("dp", "cp", "tp", "pp"), mesh.group("dp"), mesh.group("pp")
        self.share, self.num_shares = self._dp.rank, self._dp.size
        self.size, self.leader = self._all.size, self._all.rank == 0
        self.speaks = bool(mesh.where(pp="last", tp=0, cp=0))

    def together(self, what: str) -> AbstractContextManager[Any]:
        """An error of one is raised on all; the end waits for all."""
        return self._all.together(what)

    def check_same(self, what: str, sequences: Sequence[TrainSequence]) -> None:
        """Raise on all ranks when one was called with other arguments: compares a digest."""
        self._all.check_equal(f"{what} of {len(sequences)} sequences {_digest(sequences)}", what=f"arguments of {what}")

    def exchange(self, value: Value) -> list[Value]:
        """Plain data of every rank, in the order of ranks."""
        values: list[Value] = self._all.all_gather_data(value)
        return values

    def merge(self, results: Sequence[Metrics], failure: Exception | None) -> Metrics:
        """Metrics of all micro-batches over all shares, in their order; raises everywhere when one rank failed."""
        plain, failure = _plain(results, failure)
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        found = self.exchange((reason, self.share, self.speaks, plain))
        if failure is not None:
            raise failure
        for rank, (their_reason, *_) in enumerate(found):
            if their_reason:
                raise PeerFailedError(f"trainer rank {rank}", their_reason)
        by_share = {share: metrics for _, share, speaks, metrics in found if speaks}
        return merge_metrics([_metrics(by_share[share]) for share in range(self.num_shares)])

    def gather_shares(self, values: Floats, counts: Sequence[int], device: torch.device) -> list[Floats]:
        """Values of every share, found on its last stage; `counts` says how many each has."""
        padded = torch.zeros(max(counts), dtype=torch.float32)
        if self._pp.rank == self._pp.size - 1:
            padded[: len(values)] = torch.from_numpy(values)
        padded = padded.to(device)
        if self._pp.size > 1:
            self._pp.broadcast(padded, source=self._pp.size - 1)
        found = self._dp.all_gather(padded).cpu().numpy()
        return [np.asarray(row[:count]) for row, count in zip(found, counts, strict=True)]


def _plain(results: Sequence[Metrics], failure: Exception | None) -> tuple[dict[str, list[Any]], Exception | None]:
    """Metrics of this rank, or why there are none; raises nothing, because the other ranks wait for either."""
    try:
        merged = merge_metrics(results)
    except Exception as error:  # noqa: BLE001  two micro-batches add up one name in two ways: told to all ranks
        return {}, failure or error
    return {name: [metric.value, metric.weight, metric.how] for name, metric in merged.items()}, failure


def _metrics(plain: Mapping[str, Sequence[Any]]) -> Metrics:
    return {name: Metric(value=value, weight=weight, how=how) for name, (value, weight, how) in plain.items()}


def _digest(sequences: Sequence[TrainSequence]) -> str:
    """Of everything that the plan and the loss read."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        for name, array in (("", sequence.ids), ("", sequence.loss_mask), *sorted(sequence.extras.items())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
