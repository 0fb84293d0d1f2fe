"""The exhaustive search for a packing, over classes of nodes instead of nodes; it remembers what has failed."""

from collections.abc import Sequence

from offbeat_placement._bound import worth
from offbeat_placement._units import Counts


class Search:
    """Decides how many nodes of each class take each of its patterns.

    Args:
        patterns: of each class.
        sizes: nodes of each class.
        weights: each prunes what it proves impossible; see `cannot_hold`.
        max_steps: after so many it gives up.
    """

    def __init__(
        self,
        patterns: Sequence[Sequence[Counts]],
        sizes: Sequence[int],
        weights: Sequence[Sequence[int]],
        max_steps: int,
    ) -> None:
        self._columns = [(place, pattern) for place, each in enumerate(patterns) for pattern in each]
        self._is_first = [i == 0 or self._columns[i - 1][0] != place for i, (place, _) in enumerate(self._columns)]
        self._patterns, self._sizes, self._weights = patterns, sizes, weights
        self._steps_left = max_steps
        self._failed: set[tuple[int, int, Counts]] = set()
        self._later = [self._worth_after(each) for each in weights]
        self._best = [self._worth_of_the_rest(each) for each in weights]

    @property
    def gave_up(self) -> bool:
        """Whether the steps did not suffice."""
        return self._steps_left <= 0

    def run(self, wanted: Counts) -> list[list[int]] | None:
        """For each class the number of nodes of each pattern; None: none found."""
        amounts = [0] * len(self._columns)
        if not self._place(0, 0, wanted, amounts):
            return None
        found: list[list[int]] = [[] for _ in self._patterns]
        for (place, _), amount in zip(self._columns, amounts, strict=True):
            found[place].append(amount)
        return found

    def _worth_after(self, weights: Sequence[int]) -> list[int]:
        """Worth that all classes after each class can hold."""
        after = [0]
        for patterns, size in zip(self._patterns[::-1], self._sizes[::-1], strict=True):
            after.append(after[-1] + size * max(worth(pattern, weights) for pattern in patterns))
        return after[-2::-1]

    def _worth_of_the_rest(self, weights: Sequence[int]) -> list[int]:
        """For each column the largest worth of a pattern of its class, from this column on."""
        best: list[int] = []
        for index in range(len(self._columns) - 1, -1, -1):
            place, pattern = self._columns[index]
            follows = best and self._columns[index + 1][0] == place
            best.append(max(worth(pattern, weights), best[-1] if follows else 0))
        return best[::-1]

    def _is_hopeless(self, column: int, nodes_left: int, wanted: Counts) -> bool:
        place = self._columns[column][0]
        return any(
            worth(wanted, weights) > later[place] + nodes_left * best[column]
            for weights, later, best in zip(self._weights, self._later, self._best, strict=True)
        )

    def _place(self, column: int, nodes_left: int, wanted: Counts, amounts: list[int]) -> bool:
        if not any(wanted):
            return True
        if column == len(self._columns) or self._steps_left <= 0:
            return False
        place, pattern = self._columns[column]
        if self._is_first[column]:
            nodes_left = self._sizes[place]
        state = (column, nodes_left, wanted)
        if state in self._failed or self._is_hopeless(column, nodes_left, wanted):
            return False
        self._steps_left -= 1
        useful = max((-(-want // count) for want, count in zip(wanted, pattern, strict=True) if count), default=0)
        for amount in range(min(nodes_left, useful), -1, -1):
            left = tuple(max(0, want - amount * count) for want, count in zip(wanted, pattern, strict=True))
            amounts[column] = amount
            if self._place(column + 1, nodes_left - amount, left, amounts):
                return True
        amounts[column] = 0
        self._failed.add(state)
        return False
