"""Workload of a simulation: completion lengths, drawn or measured, the speed of decoding, the work and the machines."""

import json
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from offbeat_core import REQUIRED, ConfigError, DataError, check_ranges, setting


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
        """Return one length in tokens, at least 1."""
        if self.measured:
            length = random_numbers.choice(self.measured)
        else:
            length = max(1, round(random_numbers.lognormvariate(math.log(self.median), self.spread)))
        return min(length, self.longest) if self.longest else length


class DecodeSpeed(Protocol):
    """Decoding speed of one engine."""

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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work that is simulated: samples to generate and to train on."""

    num_groups: int = setting(REQUIRED, "Prompt groups of the run.", "groups", ge=1)
    group_size: int = setting(8, "Samples of one group.", "samples", ge=1)
    lengths: Lengths = setting(Lengths(), "Of the completions.")
    filtered_share: float = setting(0.0, "Share of groups without learning signal.", ge=0, le=1)
    seed: int = setting(0, "Of everything random.")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines that are simulated."""

    num_engines: int = setting(REQUIRED, "Rollout engines.", "engines", ge=1)
    max_running: int = setting(REQUIRED, "Samples one engine decodes at once.", "samples", ge=1)
    decode_curve: DecodeSpeed = setting(REQUIRED, "Throughput of one engine.")
    update_s: float = setting(REQUIRED, "Time of one full update.", "s", ge=0)
    update_tokens_per_s: float = setting(
        0.0, "Completion tokens trained per second, on top of update_s; 0 for none.", "tokens/s", ge=0
    )
    sync_s: float = setting(0.0, "Time of one weight sync.", "s", ge=0)

    def __post_init__(self) -> None:
        check_ranges(self)

    def seconds_for_update(self, share: float, num_tokens: int) -> float:
        """Time of an update with this share of its full number of groups."""
        return self.update_s * share + (num_tokens / self.update_tokens_per_s if self.update_tokens_per_s else 0.0)


LENGTH_KEYS: Final = ("num_tokens", "response_tokens", "length")
RUN_FILE: Final = "generations/train.jsonl"


def read_lengths(path: Path) -> tuple[int, ...]:
    """Read measured lengths, in tokens.

    Args:
        path: whole numbers separated by white space; or a `.jsonl` file, each line a number or an object with one of
            the keys num_tokens, response_tokens, length; or a run folder, whose sampled generations are read.

    Raises:
        DataError: the file is missing, empty, or holds something else.
    """
    file = path / RUN_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"lengths file {file}: {reason}") from error
    lengths = _read_lines(file, text) if file.suffix == ".jsonl" else _read_words(file, text)
    if not lengths:
        raise DataError(f"lengths file {file} is empty: at least one number of tokens required")
    return lengths


def _read_words(file: Path, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split())
    except ValueError as error:
        raise DataError(
            f"lengths file {file}: whole numbers of tokens required, separated by blanks: {error}"
        ) from error


def _read_lines(file: Path, text: str) -> tuple[int, ...]:
    lengths = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            lengths.append(_length(json.loads(line)))
        except (ValueError, KeyError) as error:
            raise DataError(
                f"lengths file {file}, line {number}: a whole number of tokens required, or an object with "
                f"{' or '.join(LENGTH_KEYS)}; got {line[:60]!r}"
            ) from error
    return tuple(lengths)


def _length(value: Any) -> int:
    """Return the number, or the first of the keys that an object has.

    Raises:
        KeyError, ValueError: there is none.
    """
    if isinstance(value, dict):
        value = value[next((key for key in LENGTH_KEYS if key in value), LENGTH_KEYS[0])]
    if type(value) is int:
        return value
    raise ValueError(f"not a whole number: {value!r}")
