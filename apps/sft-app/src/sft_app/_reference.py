"""Log-probabilities of all examples under the policy before training: computed once, before the first update, and kept.

So no second model is ever held in memory. A run that is resumed reads what was kept; where that is missing, or of
other data, the engine is asked for its first policy, which is the base without adapters or a second copy of the model.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np

from offbeat_core import Floats, TrainEngine, digest_sequences
from offbeat_run import doing
from sft_app._examples import Example
from sft_app._preflight import Preflight
from sft_app._ranks import RanksEngine

Engine = TrainEngine | RanksEngine
"""The trainer: in this process, or on several ranks."""
IsAskedToEnd = Callable[[], bool]

REFERENCE_FILE: Final = "reference.npz"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Log-probabilities of the loss tokens, nats float32: for each example those of each sequence of `Example.all`."""

    train: tuple[tuple[Floats, ...], ...]
    held_out: tuple[tuple[Floats, ...], ...]


def compute_reference(
    preflight: Preflight, engine: Engine, *, has_begun: bool, is_asked_to_end: IsAskedToEnd
) -> Reference:
    """Ask the engine about all examples, as many at a time as an update has.

    Args:
        preflight: of the run.
        engine: of the run.
        has_begun: its weights are no longer those of the policy before training.
        is_asked_to_end: looked at in between.

    Raises:
        KeyboardInterrupt: asked to end.
    """

    def ask(examples: Sequence[Example]) -> Iterator[tuple[Floats, ...]]:
        size = preflight.config.engine.batch_size
        for start in range(0, len(examples), size):
            if is_asked_to_end():
                raise KeyboardInterrupt
            doing("asking the policy before training", f"{start} of {len(examples)} {preflight.config.rows_name}")
            some = examples[start : start + size]
            found = iter(engine.logprobs([each for example in some for each in example.all], reference=has_begun))
            for example in some:
                yield tuple(next(found)[each.loss_mask] for each in example.all)

    return Reference(train=tuple(ask(preflight.examples.train)), held_out=tuple(ask(preflight.held_out)))


def save_reference(folder: Path, preflight: Preflight, reference: Reference) -> None:
    """Keep it in a run folder; the file is whole or not there."""
    values = [each for example in (*reference.train, *reference.held_out) for each in example]
    part = folder / f"{REFERENCE_FILE}.part"
    with part.open("wb") as file:
        np.savez(file, digest=np.array(_digest(preflight)), logprobs=np.concatenate(values))
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / REFERENCE_FILE)


def load_reference(folder: Path, preflight: Preflight) -> Reference | None:
    """Return what a run folder keeps, None where it keeps nothing of these examples."""
    try:
        with np.load(folder / REFERENCE_FILE, allow_pickle=False) as kept:
            if str(kept["digest"]) != _digest(preflight):
                return None
            logprobs: Floats = kept["logprobs"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    start = 0

    def take(examples: Sequence[Example]) -> Iterator[tuple[Floats, ...]]:
        nonlocal start
        for example in examples:
            found = []
            for sequence in example.all:
                stop = start + int(sequence.loss_mask.sum())
                found.append(logprobs[start:stop])
                start = stop
            yield tuple(found)

    return Reference(train=tuple(take(preflight.examples.train)), held_out=tuple(take(preflight.held_out)))


def _digest(preflight: Preflight) -> str:
    """Return the digest of all that a model was asked."""
    examples = (*preflight.examples.train, *preflight.held_out)
    return digest_sequences([sequence for example in examples for sequence in example.all])
