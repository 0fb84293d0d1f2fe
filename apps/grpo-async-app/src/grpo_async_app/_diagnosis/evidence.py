"""Evidence of a diagnosis, and the band that rounding explains.

Shapes: T tokens of a sequence, P of them its prompt, N = T - P of them sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from offbeat_core import Fingerprint, Floats, Ids, Image, Inspection

Occasion = Literal["before and after the update", "alone", "a later turn", "with others", "once more", "with images"]
"""When a prompt was sampled: after the engine had sampled it under the weights before, by itself, as what goes on after
a reply to that, in a batch with others, right after such a batch, and with its images."""

FLOOR_NATS: Final = 2e-4
"""Two kernels of float32 differ by less, also where `rounded` and `reference` are the same numbers."""
_TIMES: Final = 3.0
"""Multiple of rounding from which an error counts: two engines round at different places, and 1.4 is expected."""
FLOOR_SHARE: Final = 2e-4
"""Share of the size of a hidden state, likewise."""


@dataclass(frozen=True, kw_only=True)
class ExaminedSample:
    """One sample of the run's prompts, [N] log-probabilities each, nats.

    Args:
        ids: [T] int32.
        num_prompt: P.
        occasion: when it was sampled.
        sampled: by the engine, while it sampled.
        alone: by the engine, of the sequence alone in an empty cache; None where it does not say.
        trained: by the trainer.
        reference: by transformers in float32.
        rounded_engine: by transformers in the engine's format.
        rounded_trainer: by transformers in the trainer's.
        trained_alone: by the trainer, of this sequence and no other; None where it was not asked.
        images: of the prompt.
    """

    ids: Ids
    num_prompt: int
    occasion: Occasion
    sampled: Floats
    alone: Floats | None
    trained: Floats
    reference: Floats
    rounded_engine: Floats
    rounded_trainer: Floats
    trained_alone: Floats | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaggedTokens:
    """Tokens of the run that a checkpoint holds, sampled by one version.

    Args:
        lag: updates between that version and the checkpoint.
        is_later_turn: they were sampled after a reply.
        errors: [N] |trainer's log-probability under the checkpoint - the engine's when it sampled|, nats.
    """

    lag: int
    is_later_turn: bool = False
    errors: Floats


def by_lag(lagged: Sequence[LaggedTokens]) -> list[LaggedTokens]:
    """Return tokens of all turns together, the smallest lag first."""
    parts: dict[int, list[Floats]] = {}
    for each in lagged:
        parts.setdefault(each.lag, []).append(each.errors)
    return [LaggedTokens(lag=lag, errors=np.concatenate(errors)) for lag, errors in sorted(parts.items())]


@dataclass(frozen=True, kw_only=True)
class PointError:
    """Error of one side at one point of the model, as a share of the size of the values.

    Args:
        point: name of `offbeat_core.Inspection`.
        error: mean over tokens.
        band: the error of the reference rounded to that side's format.
    """

    point: str
    error: float
    band: float

    @property
    def is_beyond(self) -> bool:
        return self.error > _TIMES * self.band + FLOOR_SHARE


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that was seen.

    Args:
        samples: of the engine that was started for the diagnosis, of text.
        pictured: likewise, of prompts with images; engines say nothing more of them.
        num_past_end: samples that went on after a token that ends them.
        num_cut_short: samples that ended before their limit without a token that ends them.
        lagged: of the run.
        engine_weights: fingerprints by name; empty where the engine does not say.
        trainer_weights: likewise, rounded to the engine's format.
        saved_weights: of the checkpoint's files, rounded likewise.
        template_changes: prompts of the run whose token ids are others when they are rendered now.
        had_other_weights: the engine sampled with other weights before.
        earlier_weights: those that the engine began with, likewise.
        seeded: completions of prompts, each of one seed, of the same once more, and of another one.
        has_adapter: what is trained is an adapter.
        kv_format: setting of the engine's cache of keys and values, where it has one.
    """

    samples: Sequence[ExaminedSample]
    pictured: Sequence[ExaminedSample] = ()
    num_past_end: int = 0
    num_cut_short: int = 0
    lagged: Sequence[LaggedTokens] = ()
    engine_weights: Mapping[str, Fingerprint] = field(default_factory=dict)
    trainer_weights: Mapping[str, Fingerprint] = field(default_factory=dict)
    saved_weights: Mapping[str, Fingerprint] = field(default_factory=dict)
    template_changes: Sequence[str] = ()
    had_other_weights: bool = False
    earlier_weights: Mapping[str, Fingerprint] = field(default_factory=dict)
    seeded: Sequence[tuple[Ids, Ids, Ids]] = ()
    kv_format: str = ""
    has_adapter: bool = False


def is_beyond_rounding(found: Floats, wanted: Floats, rounding: Floats) -> bool:
    """Return whether log-probabilities differ by more than rounding explains.

    Args:
        found: [N] nats.
        wanted: [N] nats.
        rounding: [N] |rounded - reference| of the same tokens, nats.
    """
    if not len(found):
        return False
    error = np.abs(found - wanted)
    # Routing of experts in bfloat16 has a long tail, so the largest error alone decides nothing.
    mean = error.mean() > _TIMES * rounding.mean() + FLOOR_NATS
    tail = np.quantile(error, 0.9) > 2 * _TIMES * np.quantile(rounding, 0.9) + 10 * FLOOR_NATS
    return bool(mean or tail)


def point_errors(found: Inspection, wanted: Inspection, rounded: Inspection, points: Sequence[str]) -> list[PointError]:
    """Compare points that all three have whole, in order; the last token may be left out."""
    errors = []
    for point in points:
        if point not in found or point not in wanted or point not in rounded:
            continue
        num_tokens = min(len(found[point]), len(wanted[point]))
        here, there, band = (each[point][:num_tokens] for each in (found, wanted, rounded))
        if here.shape != there.shape:
            if point == "experts":  # another number of them
                errors.append(PointError(point=point, error=1.0, band=0.0))
            continue
        errors.append(PointError(point=point, error=_distance(point, here, there), band=_distance(point, band, there)))
    return errors


def _distance(point: str, found: Floats, wanted: Floats) -> float:
    """Mean over tokens of |found - wanted| / |wanted|; of experts the share of tokens that took others."""
    if point == "experts":
        return float((found != wanted).any(-1).mean())
    size = np.linalg.norm(wanted, axis=-1)
    return float((np.linalg.norm(found - wanted, axis=-1) / np.maximum(size, 1e-6)).mean())
