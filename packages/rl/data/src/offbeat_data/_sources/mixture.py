"""Several sources of prompts as one stream: whose turn it is, and which prompts are drawn less by recent success."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offbeat_core import ConfigError, DataError, setting

_WORD: Final = 2**64
_GOLDEN_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, made odd."""
_START_STREAM: Final = 1
_CHOICE_STREAM: Final = 2
"""Numbers that keep the draws of one seed apart."""


class MixtureOrder:
    """Maps the number of a draw, counted from the start of the run, to (source, position within that source).

    Draw g belongs to the source in whose part of [0, 1) the fraction of (start + g / golden ratio) lies; the parts are
    as long as the shares of the weights, and the start comes from the seed. Such a sequence fills the interval more
    evenly than random numbers do: of any n draws in a row each source has its share within about 1 + ln(n) draws,
    so that every update has nearly the whole mix. There is no state: to resume, continue counting.

    Source: Kuipers and Niederreiter, Uniform Distribution of Sequences (1974), chapter 2, section 3: the discrepancy of
    the multiples of a number whose continued fraction is bounded.

    Args:
        weights: [S] of the sources, >= 0, any scale; not all 0.
        seed: of the start.

    Raises:
        DataError: no weight above 0, or one that is negative or not finite.
    """

    def __init__(self, weights: Sequence[float], seed: int = 0) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise DataError(f"weights of sources must be finite and at least 0: got {list(weights)}")
        if not any(weights):
            raise DataError(f"the weights of all {len(weights)} sources are 0: give one of them more")
        self._drawn = np.array([source for source, weight in enumerate(weights) if weight], np.int64)
        parts = [weights[source] for source in self._drawn]
        ends = [math.fsum(parts[: number + 1]) / math.fsum(parts) for number in range(len(parts) - 1)]
        self._ends = np.array([min(int(end * _WORD), _WORD - 1) for end in ends], np.uint64)
        self._start = np.uint64(_raw_draws(1, seed, _START_STREAM)[0])
        self._sources = self._positions = np.empty(0, np.int64)  # of the first draws, [G]: counted once

    def __call__(self, number: int) -> tuple[int, int]:
        """Return the source of draw `number` >= 0, and how many draws before it were that source's."""
        if number < 0:
            raise IndexError(f"draws count from 0: got {number}")
        if number >= len(self._sources):
            self._count(2 * (number + 1))
        return int(self._sources[number]), int(self._positions[number])

    def _count(self, num_draws: int) -> None:
        points = np.arange(num_draws, dtype=np.uint64) * _GOLDEN_STEP + self._start  # modulo 2^64
        self._sources = self._drawn[np.searchsorted(self._ends, points, side="right")]
        self._positions = np.empty(num_draws, np.int64)
        for source in self._drawn:
            places = np.flatnonzero(self._sources == source)
            self._positions[places] = np.arange(len(places))


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Section `curriculum`: prompts that have lately been too easy or too hard are drawn less often."""

    low: float = setting(
        0.0, "A prompt is too hard where a smaller share of its samples succeeds; 0: none is.", "share", ge=0, le=1
    )
    high: float = setting(
        1.0, "A prompt is too easy where a larger share of its samples succeeds; 1: none is.", "share", ge=0, le=1
    )
    outside_weight: float = setting(
        0.1, "How often a prompt that is too easy or too hard is drawn, for one draw of any other.", "draws", gt=0, le=1
    )
    newest_weight: float = setting(
        0.5, "Weight of the newest group in a prompt's success rate; what was known before has the rest.", gt=0, le=1
    )
    success_reward: float = setting(0.99, "A sample with at least this reward succeeds.", "reward")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"low = {self.low:g} is above high = {self.high:g}: no prompt would be in between")
        idle = [each.name for each in fields(self) if each.name.endswith("_weight") and self._is_changed(each.name)]
        if idle and not self.is_set:
            raise ConfigError(f"{idle[0]} has no effect while low is 0 and high is 1: set one of these too")

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(CurriculumConfig, name))

    @property
    def is_set(self) -> bool:
        """Return whether there are success rates at which a prompt is drawn less often."""
        return self.low > 0 or self.high < 1


class SuccessRates:
    """Recent success of the prompts of one source, and which of them is drawn for that.

    A prompt's rate is an exponential mean over its groups: newest_weight x the share of successes in the newest one +
    (1 - newest_weight) x the rate before; the first group's share is the first rate. A prompt weighs outside_weight
    where its rate is below `low` or above `high`, and 1 otherwise, or while nothing is known of it.

    Args:
        num_items: prompts of the source, >= 1.
        config: the `curriculum` section.
        seed: of the draws.
    """

    def __init__(self, num_items: int, config: CurriculumConfig, seed: int = 0) -> None:
        self._config, self._seed = config, seed
        self._rates: npt.NDArray[np.float64] = np.full(num_items, np.nan)  # [N], shares; NaN: not known

    def record(self, item: int, share: float) -> None:
        """Take in one group of an item.

        Args:
            item: in [0, num_items).
            share: of its samples that succeeded, in [0, 1].
        """
        before, newest = self._rates[item], self._config.newest_weight
        self._rates[item] = share if math.isnan(before) else newest * share + (1 - newest) * before

    def choose(self, item: int, number: int) -> int:
        """Return the item to draw where the source's order is at `item`: that one, or another if it weighs below 1.

        It stays with the probability of its weight; else one of all is drawn by their weights. When every item is as
        often the order's, the chance of each is its weight over the sum of all weights. And each item that weighs 1 is
        drawn at least once an epoch.

        Args:
            item: in [0, num_items), of the source's order.
            number: of the draw; with the seed and the rates it decides.
        """
        weights = self._weights()
        stays, place = (_raw_draws(2, self._seed, _CHOICE_STREAM, number) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        if stays < weights[item]:
            return item
        ends = np.cumsum(weights)
        return min(int(np.searchsorted(ends, place * ends[-1], side="right")), len(weights) - 1)

    @property
    def num_known(self) -> int:
        """Items with a recorded group."""
        return int(np.count_nonzero(~np.isnan(self._rates)))

    @property
    def num_too_hard(self) -> int:
        """Items whose rate is below `low`."""
        return int(np.count_nonzero(self._rates < self._config.low))

    @property
    def num_too_easy(self) -> int:
        """Items whose rate is above `high`."""
        return int(np.count_nonzero(self._rates > self._config.high))

    def state(self) -> list[list[Any]]:
        """Return what is known, as [item, rate] pairs for JSON."""
        return [[int(item), float(self._rates[item])] for item in np.flatnonzero(~np.isnan(self._rates))]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Take over what `state` gave.

        Raises:
            DataError: an item that there is not, or a rate that is no share.
        """
        for item, rate in state:
            if not (0 <= item < len(self._rates) and 0 <= rate <= 1):
                raise DataError(f"success rates of {len(self._rates)} prompts cannot hold {rate!r} of prompt {item!r}")
            self._rates[item] = rate

    def _weights(self) -> npt.NDArray[np.float64]:
        is_outside = (self._rates < self._config.low) | (self._rates > self._config.high)
        return np.where(is_outside, self._config.outside_weight, 1.0)


def _raw_draws(count: int, *seeds: int) -> npt.NDArray[np.uint64]:
    """[count] uint64 of a stream that numpy promises never to change (NEP 19)."""
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
