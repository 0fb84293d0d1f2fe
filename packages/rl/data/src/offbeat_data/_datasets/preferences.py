"""Preferences: rows with two answers, one of them better, or with one answer that is good or bad.

A prompt and its answers are read as `load_conversations` reads prompt and completion; the loss mask of each sequence
holds the tokens of its answer.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np

from offbeat_core import DataError, Image, TrainSequence, as_written
from offbeat_data._datasets.conversations import SequenceBuilder, fit_sequence
from offbeat_data._datasets.prompts import RowCounts
from offbeat_data._images import with_images
from offbeat_data._sources.rows import Row, as_messages, find_column, has_column, require_column
from offbeat_data._sources.sources import ConversationConfig, read_sources
from offbeat_data._tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two answers to one prompt."""

    chosen: TrainSequence
    rejected: TrainSequence


@dataclass(frozen=True, kw_only=True)
class Rating:
    """An answer, and whether it is good.

    Args:
        answer: prompt and answer.
        is_good: what its label says.
        mismatched: the same prompt with the answer of the row before it that has another prompt, cut off at the limit.
    """

    answer: TrainSequence
    is_good: bool
    mismatched: TrainSequence


ExampleT = TypeVar("ExampleT", Pair, Rating)


@dataclass(frozen=True, kw_only=True)
class PreferenceSet(Generic[ExampleT]):
    """Examples to train on and held-out ones, with the counts of their rows. `eval` may be empty, `train` never is.

    `template` is that of `ConversationSet`.
    """

    train: tuple[ExampleT, ...]
    eval: tuple[ExampleT, ...]
    train_counts: RowCounts
    eval_counts: RowCounts
    notices: tuple[str, ...] = ()
    template: str = ""


def load_pairs(config: ConversationConfig, tokenizer: Tokenizer, *, ends_turns: bool = True) -> PreferenceSet[Pair]:
    """Read, render and encode pairs; equal configurations give equal sets.

    Args:
        config: the `data` section.
        tokenizer: of the model.
        ends_turns: an answer gets an end token where the chat template writes none. False for a model that scores
            conversations: it reads them later as the template alone renders them.

    A row has `chosen_column` and `rejected_column` beside `prompt_column`, each a text or chat messages; or two whole
    conversations, whose prompt is what they have in common. A pair with an answer that is too long is left out; one of
    two equal answers too, and counted in `notices`.

    Raises:
        DataError, ModelError, BackendError: as `load_conversations`.
    """

    def build(read: Sequence[_Answers], source: str) -> tuple[Pair, ...]:
        pairs = [Pair(chosen=chosen, rejected=rejected) for (chosen, rejected), _ in read]
        kept = tuple(pair for pair in pairs if not np.array_equal(pair.chosen.ids, pair.rejected.ids))
        if num_equal := len(pairs) - len(kept):
            notices.append(f"{source}: {num_equal} pairs left out, of two equal answers")
        if pairs and not kept:
            raise DataError(f"{source}: the two answers of every row are equal; give pairs that differ")
        return kept

    notices: list[str] = []
    builder = SequenceBuilder(config, tokenizer, ends_turns=ends_turns)
    found = _load(builder, partial(_read_pair, builder), lambda row: _question(config, row), build)
    return replace(found, notices=(*builder.notices, *notices), template=builder.template)


def load_ratings(config: ConversationConfig, tokenizer: Tokenizer) -> PreferenceSet[Rating]:
    """Read, render and encode answers with a label; equal configurations give equal sets.

    A row has `prompt_column` and `completion_column`, each a text or chat messages, and `label_column`.

    Raises:
        DataError, ModelError, BackendError: as `load_conversations`; also where all prompts are the same.
    """

    def build(read: Sequence[_Answers], source: str) -> tuple[Rating, ...]:
        return tuple(_with_mismatched(read, config.max_sequence_tokens, source))

    builder = SequenceBuilder(config, tokenizer)
    found = _load(builder, partial(_read_rating, builder), lambda row: _question(config, row), build)
    return replace(found, notices=builder.notices, template=builder.template)


_Answers = tuple[tuple[TrainSequence, ...], bool]
"""Contents of a row: its answers, each with the prompt before it, and whether they are good."""


def _load(
    builder: SequenceBuilder,
    read: Callable[[Row, str], _Answers],
    question: Callable[[Row], Any],
    build: Callable[[Sequence[_Answers], str], tuple[ExampleT, ...]],
) -> PreferenceSet[ExampleT]:
    config = builder.config
    rows = read_sources(config, question)
    train_source, held_out_source = as_written(config.path), as_written(config.eval_path or config.path)
    train, train_counts = _read_rows(builder, read, rows.train, train_source, rows.num_shared)
    held_out, eval_counts = _read_rows(builder, read, rows.held_out, held_out_source, 0)
    examples, held_examples = build(train, train_source), build(held_out, held_out_source)
    return PreferenceSet(
        train=examples,
        eval=held_examples,
        train_counts=replace(train_counts, kept=len(examples)),
        eval_counts=replace(eval_counts, kept=len(held_examples)),
    )


def _read_rows(
    builder: SequenceBuilder, read: Callable[[Row, str], _Answers], rows: list[Row], source: str, num_shared: int
) -> tuple[list[_Answers], RowCounts]:
    limit, cuts = builder.config.max_sequence_tokens, builder.config.too_long == "truncate"
    kept: list[_Answers] = []
    longest = truncated = 0
    for number, row in enumerate(rows, 1):
        with builder.notes.reading(source, number):
            answers, is_good = read(row, source)
        length = max(len(answer.ids) for answer in answers)
        fitting = [fits for answer in answers if (fits := fit_sequence(answer, limit, cuts)) is not None]
        longest = max(longest, length)
        if len(fitting) == len(answers):
            kept.append((tuple(fitting), is_good))
            truncated += length > limit
    if rows and not kept:
        raise DataError(
            f"{source}: every row is too long: the longest answer with its prompt has {longest} tokens and "
            f"data.max_sequence_tokens is {limit}; raise it, or set data.too_long to truncate"
        )
    counts = RowCounts(
        read=len(rows) + num_shared,
        held_out=num_shared,
        too_long=len(rows) - len(kept),
        truncated=truncated,
        longest=longest,
    )
    return kept, counts


_NEEDS_OF_PAIR: Final = (
    "the loss compares two answers to one prompt, so each row needs a prompt, a chosen and a rejected answer "
    "(data.prompt_column, data.chosen_column, data.rejected_column); to train on conversations, leave out section "
    "preference"
)
_NEEDS_OF_RATING: Final = (
    "the loss learns from rated answers, so each row needs a prompt, a completion and a label (data.prompt_column, "
    "data.completion_column, data.label_column); to train on conversations, leave out section preference"
)


def _read_pair(builder: SequenceBuilder, row: Row, source: str) -> _Answers:
    config = builder.config
    chosen = require_column(row, config.chosen_column, "chosen_column", needs=_NEEDS_OF_PAIR)
    rejected = require_column(row, config.rejected_column, "rejected_column", needs=_NEEDS_OF_PAIR)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise DataError(
            f"columns {config.chosen_column} and {config.rejected_column} must be two texts or two lists of chat "
            f"messages: got {chosen!r:.60} and {rejected!r:.60}"
        )
    if _is_whole(chosen) or _is_whole(rejected):
        prompt, chosen, rejected = _split_conversations(as_messages(chosen), as_messages(rejected))
    else:
        prompt = require_column(row, config.prompt_column, "prompt_column", needs=_NEEDS_OF_PAIR)
    return tuple(_only(builder.exchange(prompt, answer, row, source)) for answer in (chosen, rejected)), True


def _read_rating(builder: SequenceBuilder, row: Row, source: str) -> _Answers:
    config = builder.config
    prompt = require_column(row, config.prompt_column, "prompt_column", needs=_NEEDS_OF_RATING)
    completion = require_column(row, config.completion_column, "completion_column", needs=_NEEDS_OF_RATING)
    label = require_column(row, config.label_column, "label_column", needs=_NEEDS_OF_RATING)
    if label not in (True, False, 0, 1) or isinstance(label, float):
        raise DataError(f"column {config.label_column} must be true or false, or 1 or 0: got {label!r:.60}")
    return (_only(builder.exchange(prompt, completion, row, source)),), bool(label)


def _is_whole(answer: Any) -> bool:
    """Return whether it is a conversation from its beginning, and not what an assistant says next."""
    first = answer[0] if isinstance(answer, list) and answer else None
    return isinstance(first, dict) and first.get("role") != "assistant"


def _split_conversations(
    chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what two conversations have in common, at their beginning, and what is left of each."""
    pairs = zip(chosen, rejected, strict=False)
    num_same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if num_same == len(chosen) == len(rejected):  # equal answers are counted by the caller
        num_same -= 1
    one, other = chosen[num_same:], rejected[num_same:]
    if not num_same or not all(answer and answer[0]["role"] == "assistant" for answer in (one, other)):
        raise DataError(
            "the chosen and the rejected conversation must be the same up to an answer of the assistant: they differ "
            f"from message {num_same + 1} on; mend them, or give the prompt in a column of its own"
        )
    return chosen[:num_same], one, other


def _only(sequences: Iterator[TrainSequence]) -> TrainSequence:
    found = list(sequences)
    if len(found) > 1:
        raise DataError(
            f"the chat template rewrites earlier turns when later ones come, so that {len(found)} answers of the "
            "assistant are no one sequence: give one message as the answer, and the turns before it as the prompt"
        )
    return found[0]


def _question(config: ConversationConfig, row: Row) -> Any:
    """Return the prompt of a row; of two conversations all that the assistant did not say."""
    if has_column(row, config.prompt_column):
        return with_images(find_column(row, config.prompt_column), row)
    messages = find_column(row, config.chosen_column)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None  # `_read_pair` says what is wrong with it
    return with_images([m.get("content") for m in messages if m.get("role") != "assistant"], row)


def _with_mismatched(read: Sequence[_Answers], limit: int, source: str) -> Iterator[Rating]:
    """Each answer with its prompt followed by the answer of the nearest row before it that has another prompt.

    Source: KTO (arXiv:2402.01306, section 4.1), whose authors take the answers of the same batch.
    """
    answers = [answer for (answer,), _ in read]
    starts = [int(np.flatnonzero(answer.loss_mask)[0]) for answer in answers]
    prompts = [
        (answer.ids[:start].tobytes(), [_look(image) for image in answer.images])
        for answer, start in zip(answers, starts, strict=True)
    ]
    for at, ((answer,), is_good) in enumerate(read):
        other = next((i % len(read) for i in range(at - 1, at - len(read), -1) if prompts[i] != prompts[at]), None)
        if other is None:
            raise DataError(
                f"{source}: all prompts are the same, and ratings need answers to other prompts to compare with; add "
                "rows with another prompt, in text or in images"
            )
        ids = np.concatenate([answer.ids[: starts[at]], answers[other].ids[starts[other] :]])[:limit]
        mask = np.concatenate([answer.loss_mask[: starts[at]], answers[other].loss_mask[starts[other] :]])[:limit]
        mismatched = TrainSequence(ids=ids, loss_mask=mask, images=answer.images)
        yield Rating(answer=answer, is_good=is_good, mismatched=mismatched)


def _look(image: Image) -> bytes:
    """Return a digest of an image: two of one size take the same placeholder tokens."""
    return hashlib.blake2b(f"{image.shape}".encode() + image.tobytes(), digest_size=16).digest()
