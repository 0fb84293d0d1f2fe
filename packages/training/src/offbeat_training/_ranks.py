"""What all ranks of a trainer do together: agree, exchange, merge.

All ranks call the same methods with the same arguments in the same order; each method returns the same on all ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from offbeat_mesh import Group
from offbeat_types import Metrics, TrainSequence, digest_sequences, merge_over_ranks

Value = TypeVar("Value")


class TrainerRanks:
    """The ranks of a trainer.

    Args:
        everyone: all of them.
        dp: those that each compute a share of every update.
        speaks: this rank reports what its share has found.

    Attributes:
        share: this rank's part of every update, in [0, num_shares).
        num_shares: parts that an update is cut into.
        place: this rank among all of them, in [0, size).
        size: how many there are.
        leader: this rank writes what is written once.
    """

    def __init__(self, everyone: Group, dp: Group, *, speaks: bool) -> None:
        self._all, self._dp, self._speaks = everyone, dp, speaks
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
