"""What the simulator is fed: completion lengths, and how fast an engine decodes."""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat_types import ConfigError


@dataclass(frozen=True)
class Lengths:
    """A distribution of completion lengths.

    Args:
        measured: lengths to draw from, each >= 1 token; empty for the log-normal below.
        median: of the log-normal, in tokens.
        spread: standard deviation of the logarithm; 0 makes all lengths equal to the median.
        longest: limit on every length, in tokens, like `max_tokens`; 0 for none.
    """

    measured: tuple[int, ...] = ()
    median: float = 1000.0
    spread: float = 0.8
    longest: int = 0

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.measured):
            raise ConfigError(f"measured lengths must be at least 1 token, got {min(self.measured)}")
        if not (1 <= self.median < math.inf and 0 <= self.spread < 10 and self.longest >= 0):
            raise ConfigError(
                f"lengths: required median >= 1, 0 <= spread < 10 and longest >= 0, got median={self.median:g} "
                f"spread={self.spread:g} longest={self.longest}"
            )

    def draw(self, random_numbers: random.Random) -> int:
        """One length in tokens, at least 1."""
        if self.measured:
            length = random_numbers.choice(self.measured)
        else:
            length = max(1, round(random_numbers.lognormvariate(math.log(self.median), self.spread)))
        return min(length, self.longest) if self.longest else length


class DecodeSpeed(Protocol):
    """How fast one engine decodes."""

    def tokens_per_s(self, num_running: int) -> float:
        """Throughput of the engine with so many samples running, at least 1."""
        ...


@dataclass(frozen=True)
class DecodeTime:
    """An engine whose decoding step takes step_s, and sample_s more for every sample that runs.

    Args:
        step_s: seconds of one step that do not depend on how many samples run: weights read, launches.
        sample_s: seconds that each running sample adds to the step: its matrix products, its key-value cache.
    """

    step_s: float
    sample_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.step_s < math.inf and 0 <= self.sample_s < math.inf and self.step_s + self.sample_s > 0):
            raise ConfigError(
                f"decode time: step_s and sample_s must be at least 0 s and not both 0, got {self.step_s:g} and "
                f"{self.sample_s:g}"
            )

    def tokens_per_s(self, num_running: int) -> float:
        """Throughput of the engine with so many samples running."""
        return num_running / (self.step_s + self.sample_s * num_running)


@dataclass(frozen=True)
class DecodeCurve:
    """Tokens an engine decodes per second, all its samples together, by the number of samples it runs.

    Args:
        points: (samples running, tokens/s), both rising; in between linear, through (0, 0), and flat after the last.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        pairs = list(zip(((0, 0.0), *self.points), self.points, strict=False))
        if not pairs or any(a[0] >= b[0] or a[1] > b[1] or not 0 < b[1] < math.inf for a, b in pairs):
            raise ConfigError(
                "decode curve: required points samples:tokens_per_s, both rising from above 0, such as 1:60,16:700; "
                f"got {', '.join(f'{samples}:{rate:g}' for samples, rate in self.points) or 'none'}"
            )

    def tokens_per_s(self, num_running: int) -> float:
        """Throughput of the engine with so many samples running."""
        points: Sequence[tuple[int, float]] = ((0, 0.0), *self.points)
        right = bisect_right(points, (num_running, math.inf))
        if right == len(points):
            return points[-1][1]
        (samples_a, rate_a), (samples_b, rate_b) = points[right - 1], points[right]
        return rate_a + (rate_b - rate_a) * (num_running - samples_a) / (samples_b - samples_a)

    @classmethod
    def parse(cls, text: str) -> "DecodeCurve":
        """Read such as "1:60,16:700,64:1800"."""
        try:
            pairs = [point.split(":") for point in text.split(",")]
            points = tuple((int(samples), float(rate)) for samples, rate in pairs)
        except ValueError as error:
            raise ConfigError(
                f"decode curve: samples:tokens_per_s pairs required, such as 1:60,16:700,64:1800; got {text!r}"
            ) from error
        return cls(points)
