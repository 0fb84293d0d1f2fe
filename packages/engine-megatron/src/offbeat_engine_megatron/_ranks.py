"""What all ranks of the trainer do together: agree, exchange, merge.

All ranks call the same methods with the same arguments in the same order; each method returns the same on all ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch

from offbeat_mesh import Mesh
from offbeat_types import (
    Floats,
    Metrics,
    TrainSequence,
    digest_sequences,
    merge_over_ranks,
)

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
        self._all.check_equal(
            f"{what} of {len(sequences)} sequences {digest_sequences(sequences)}", what=f"arguments of {what}"
        )

    def exchange(self, value: Value) -> list[Value]:
        """Plain data of every rank, in the order of ranks."""
        values: list[Value] = self._all.all_gather_data(value)
        return values

    def merge(self, results: Sequence[Metrics], failure: Exception | None) -> Metrics:
        """Metrics of all micro-batches over all shares, in their order; raises everywhere when one rank failed."""
        return merge_over_ranks(results, failure, share=self.share, speaks=self.speaks, exchange=self.exchange)

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
