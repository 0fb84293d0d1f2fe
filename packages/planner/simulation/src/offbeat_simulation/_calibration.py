"""Turns the measured parts of colocated training steps into costs of engines and of a trainer.

A colocated step generates, scores and trains in turn on the same n accelerators. Each part is modelled as

    part_s(n) = fixed_s + work_s / n

by least squares over the measured sizes n. For generation this is what an engine does whose decoding step takes
step_s + sample_s · (samples running): summed over the steps of a batch, the first term counts the longest sample, the
second all tokens of the engine. So, with E engines on n accelerators and G groups of S samples,

    fixed_s = step_s · E[longest of G·S samples]        work_s / n = sample_s · G·S·E[length] / E

Nothing here knows of an asynchronous run: what is fitted are fixed_s and work_s of the three parts, and nothing else.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from offbeat_core import ConfigError, setting
from offbeat_simulation._workload import DecodeTime, Lengths


@dataclass(frozen=True, kw_only=True)
class ColocatedStep:
    """One `[[colocated]]` row: parts of one training step, measured on accelerators that generate and train in turn."""

    accelerators: int = setting(8, "Accelerators of the run.", "accelerators", ge=1)
    groups: int = setting(512, "Groups generated and trained in the step.", "groups", ge=1)
    generate_s: float = setting(0.0, "Generation, until the last sample has ended.", "s", ge=0)
    logprob_s: float = setting(
        0.0, "The pass over old log-probabilities, and other passes without gradient.", "s", ge=0
    )
    update_s: float = setting(0.0, "All optimizer steps.", "s", ge=0)
    other_s: float = setting(0.0, "The rest of the step.", "s", ge=0)
    fixed_generate_share: float | None = setting(
        None, "Share of generate_s that more engines would not shorten; only with a single row.", ge=0, le=1
    )
    fixed_train_share: float | None = setting(
        None,
        "Share of logprob_s and update_s that more accelerators would not shorten; only with a single row.",
        ge=0,
        le=1,
    )


@dataclass(frozen=True, kw_only=True)
class PartFit:
    """One part of a step on n accelerators: fixed_s + work_s / n.

    Args:
        fixed_s: s.
        work_s: accelerator-seconds.
    """

    fixed_s: float
    work_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of the calibration on the colocated rows.

    Args:
        generate, logprob, update: the parts of a step.
        switch_s: the rest of a step, on average.
        groups: of the step.
    """

    generate: PartFit
    logprob: PartFit
    update: PartFit
    switch_s: float
    groups: int


def calibrate(rows: Sequence[ColocatedStep]) -> Calibration:
    """Fit the parts of a colocated step.

    Args:
        rows: at least one; all with the same number of groups.

    Raises:
        ConfigError: the rows do not determine the fit.
    """
    _check(rows)
    sizes = [row.accelerators for row in rows]
    first = rows[0]
    return Calibration(
        generate=_fit(sizes, [row.generate_s for row in rows], first.fixed_generate_share),
        logprob=_fit(sizes, [row.logprob_s for row in rows], first.fixed_train_share),
        update=_fit(sizes, [row.update_s for row in rows], first.fixed_train_share),
        switch_s=fmean(row.other_s for row in rows),
        groups=first.groups,
    )


def engine_time(calibration: Calibration, lengths: Lengths, group_size: int, per_engine: int) -> DecodeTime:
    """Solve the two equations of the module's text for step_s and sample_s."""
    num_samples = calibration.groups * group_size
    mean, longest = length_moments(lengths, num_samples)
    return DecodeTime(
        step_s=calibration.generate.fixed_s / longest,
        sample_s=calibration.generate.work_s / (num_samples * mean * per_engine),
    )


def length_moments(lengths: Lengths, num_samples: int) -> tuple[float, float]:
    """Expected length of a sample, and of the longest of num_samples, in tokens; by drawing 20 batches, seed 0."""
    draws = random.Random(0)
    batches = [[lengths.draw(draws) for _ in range(num_samples)] for _ in range(20)]
    return fmean(length for batch in batches for length in batch), fmean(max(batch) for batch in batches)


def _check(rows: Sequence[ColocatedStep]) -> None:
    if len({row.groups for row in rows}) > 1:
        raise ConfigError("colocated: all rows need the same number of groups in a step")
    shares = [row.fixed_generate_share is not None and row.fixed_train_share is not None for row in rows]
    if len({row.accelerators for row in rows}) == 1 and not shares[0]:
        raise ConfigError(
            "colocated: rows of one size only do not say what more accelerators would shorten: give rows of two sizes, "
            "or fixed_generate_share and fixed_train_share"
        )
    if len(rows) > 1 and any(row.fixed_generate_share is not None or row.fixed_train_share is not None for row in rows):
        raise ConfigError("colocated: fixed_generate_share and fixed_train_share are for a single row")


def _fit(sizes: Sequence[int], seconds: Sequence[float], fixed_share: float | None) -> PartFit:
    """Least squares of fixed + work / n, neither below 0."""
    mean_s = fmean(seconds)
    if fixed_share is not None:
        return PartFit(fixed_s=fixed_share * mean_s, work_s=(1 - fixed_share) * mean_s * sizes[0])
    inverses = [1 / size for size in sizes]
    mean_inverse = fmean(inverses)
    slope = sum((x - mean_inverse) * (y - mean_s) for x, y in zip(inverses, seconds, strict=True)) / sum(
        (x - mean_inverse) ** 2 for x in inverses
    )
    fixed_s = mean_s - slope * mean_inverse
    if slope < 0:
        return PartFit(fixed_s=mean_s, work_s=0.0)
    if fixed_s < 0:
        through_zero = sum(x * y for x, y in zip(inverses, seconds, strict=True)) / sum(x * x for x in inverses)
        return PartFit(fixed_s=0.0, work_s=through_zero)
    return PartFit(fixed_s=fixed_s, work_s=slope)
