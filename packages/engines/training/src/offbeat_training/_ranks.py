"""Joint steps of all ranks of a trainer: agree, exchange, merge.

All ranks call the same methods with the same arguments in the same order; each method returns the same on all ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from offbeat_core import Floats, Metrics, TrainSequence, digest_sequences, merge_over_ranks, spread_values
from offbeat_mesh import Group
from offbeat_training._packing import Share

Value = TypeVar("Value")


class TrainerRanks:
    """The ranks of a trainer.

    Args:
        everyone: all of them.
        dp: those that each compute a share of every update.
        device: of this rank.
        speaks: this rank reports what its share has found.
        pp: the stages of this rank's share; the last one has its answers; None where this rank has them.

    Attributes:
        share: this rank's part of every update, in [0, num_shares).
        num_shares: parts that an update is cut into.
        place: this rank among all of them, in [0, size).
        size: how many there are.
        leader: this rank writes what is written once.
    """

    def __init__(
        self, everyone: Group, dp: Group, device: torch.device, *, speaks: bool, pp: Group | None = None
    ) -> None:
        self._all, self._dp, self._device, self._speaks = everyone, dp, device, speaks
        self._pp = pp if pp is not None and pp.size > 1 else None
        self.share, self.num_shares = dp.rank, dp.size
        self.place, self.size = everyone.rank, everyone.size
        self.leader = self.place == 0

    def together(self, what: str) -> AbstractContextManager[Any]:
        """Work that all do: an error of one is raised on all, and its end waits for all."""
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
        return merge_over_ranks(results, failure, share=self.share, speaks=self._speaks, exchange=self.exchange)

    def gather_shares(self, values: Floats, counts: Sequence[int]) -> list[Floats]:
        """Values of every share; each has as many as `counts` says."""
        if not any(counts):
            return [np.zeros(0, np.float32) for _ in counts]
        padded = torch.zeros(max(counts), dtype=torch.float32, device=self._device)
        padded[: len(values)] = torch.from_numpy(values)
        if self._pp is not None:
            self._pp.broadcast(padded, source=self._pp.size - 1)
        found = self._dp.all_gather(padded).cpu().numpy()
        return [row[:count] for row, count in zip(found, counts, strict=True)]


class _SharesAnswers(Protocol):
    def gather_shares(self, values: Floats, counts: Sequence[int]) -> list[Floats]: ...


def answers_of_all(
    ranks: _SharesAnswers, sequences: Sequence[TrainSequence], shares: Sequence[Share], answers: Sequence[Tensor]
) -> list[Floats]:
    """Return what all ranks have found, by sequence; a call of all.

    Args:
        ranks: that computed it.
        sequences: that were asked about.
        shares: what each rank has computed.
        answers: of this rank's micro-batches, float32, one value per loss token; none where another stage has them.
            They are copied to the host at once.

    Returns:
        [T] float32 for each sequence, 0 outside the loss mask.
    """
    members = [[member for batch in share for family in batch for member in family.members] for share in shares]
    counts = [sum(int(sequences[member].loss_mask.sum()) for member in share) for share in members]
    own = torch.cat(list(answers)).cpu().numpy() if answers else np.zeros(0, np.float32)
    return spread_values(sequences, members, ranks.gather_shares(own, counts))
