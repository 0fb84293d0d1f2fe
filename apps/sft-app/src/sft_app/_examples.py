"""Examples of a run, each of the sequences that one loss compares.

A conversation is an example of one sequence; a pair one of two, chosen before rejected; a rated answer one of its own,
beside the sequence that KTO's baseline is measured on.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat_core import Floats, TrainSequence
from offbeat_data import (
    ConversationSet,
    Pair,
    PreferenceSet,
    Rating,
    RowCounts,
    Tokenizer,
    load_conversations,
    load_pairs,
    load_ratings,
)
from sft_app._config import SftConfig

CHOSEN, REJECTED = 1.0, -1.0
_SCORED_ID: Final = 0
"""Id of the token after a scored sequence: no model computes it."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Sequences that are learned in one step.

    Args:
        sequences: with the extras of their loss that never change.
        mismatched: of a rated answer: its prompt with another answer.
        longest: tokens of the longest sequence that a model sees.
    """

    sequences: tuple[TrainSequence, ...]
    mismatched: TrainSequence | None = None
    longest: int

    @property
    def all(self) -> tuple[TrainSequence, ...]:
        """All that a model is asked about."""
        return self.sequences if self.mismatched is None else (*self.sequences, self.mismatched)


@dataclass(frozen=True, kw_only=True)
class ExampleSet:
    """Examples to train on and held-out ones. `eval` may be empty, `train` never is.

    Args:
        template: file of the model folder whose chat template has rendered rows; "" where none has.
    """

    train: tuple[Example, ...]
    eval: tuple[Example, ...]
    train_counts: RowCounts
    notices: tuple[str, ...] = ()
    template: str = ""


def load_examples(config: SftConfig, tokenizer: Tokenizer) -> ExampleSet:
    """Read the rows that the loss of the run needs.

    Raises:
        UserError: as `load_conversations`, `load_pairs` and `load_ratings`.
    """
    kind = config.preference.rows
    if kind == "conversations":
        read = load_conversations(config.data, tokenizer)
        sets = [tuple(_example((each,)) for each in part) for part in (read.train, read.eval)]
        return _example_set(read, *sets)
    if kind == "pairs":
        pairs = load_pairs(config.data, tokenizer, ends_turns=config.head != "score")
        maker = _PairMaker(config)
        sets = [tuple(maker.example(pair) for pair in part) for part in (pairs.train, pairs.eval)]
        return _example_set(pairs, *sets)
    ratings = load_ratings(config.data, tokenizer)
    sets = [tuple(_rated(rating) for rating in part) for part in (ratings.train, ratings.eval)]
    return _example_set(ratings, *sets)


def _example_set(
    read: ConversationSet | PreferenceSet[Any], train: tuple[Example, ...], held_out: tuple[Example, ...]
) -> ExampleSet:
    return ExampleSet(
        train=train, eval=held_out, train_counts=read.train_counts, notices=read.notices, template=read.template
    )


def _example(sequences: tuple[TrainSequence, ...], mismatched: TrainSequence | None = None) -> Example:
    lengths = [len(sequence.ids) for sequence in (*sequences, *([mismatched] if mismatched else []))]
    return Example(sequences=sequences, mismatched=mismatched, longest=max(lengths))


def _rated(rating: Rating) -> Example:
    return _example((with_extras(rating.answer, sign=CHOSEN if rating.is_good else REJECTED),), rating.mismatched)


class _PairMaker:
    """Makes examples of pairs, as the loss of a run reads them."""

    def __init__(self, config: SftConfig) -> None:
        self._preference, self._scores = config.preference, config.head == "score"
        self._padding = _id_of(config.model.path, "pad_token_id") if self._scores else None
        self._image_id = _id_of(config.model.path, "image_token_id") if self._preference.learns_prompts else None

    def example(self, pair: Pair) -> Example:
        sides = ((pair.chosen, CHOSEN), (pair.rejected, REJECTED))
        made = _example(tuple(self._side(sequence, sign) for sequence, sign in sides))
        return replace(made, longest=made.longest - 1) if self._scores else made

    def _side(self, sequence: TrainSequence, sign: float) -> TrainSequence:
        if self._scores:
            return with_extras(_scored(sequence, self._padding), sign=sign)
        if self._preference.loss != "orpo":
            return with_extras(sequence, sign=sign)
        answer = sequence.loss_mask
        if self._preference.learns_prompts and sign == CHOSEN:
            index_T = np.arange(len(answer))  # what a template writes after the answer's end is no part of it
            learned = (index_T > 0) & (index_T <= np.flatnonzero(answer)[-1])
            if sequence.images:  # a placeholder in the loss would be a word, and stand for no image
                learned &= answer | (sequence.ids != self._image_id)
            sequence = replace(sequence, loss_mask=learned)
        return with_extras(sequence, sign=sign, answer=answer.astype(np.float32))


def _scored(sequence: TrainSequence, padding: int | None) -> TrainSequence:
    """With one loss token, after the last token: what is read before it is the score of the whole sequence.

    A classification head of transformers reads off the last token that is not padding, so where a model's padding ends
    answers too, it is left off here as well.
    """
    ids = sequence.ids
    stop = len(ids) if padding is None else int(np.flatnonzero(ids != padding)[-1]) + 1
    ids = np.append(ids[:stop], np.int32(_SCORED_ID))
    return TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) == stop, images=sequence.images)


def _id_of(model_path: str, key: str) -> int | None:
    settings = json.loads((Path(model_path).expanduser() / "config.json").read_text())
    found = settings.get(key)
    return found if isinstance(found, int) else None


def with_extras(sequence: TrainSequence, **extras: float | Floats) -> TrainSequence:
    """Return a sequence with more extras; a number stands at all of its tokens."""
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.full(len(sequence.ids), value, np.float32)
        for name, value in extras.items()
    }
    return replace(sequence, extras={**sequence.extras, **arrays})
