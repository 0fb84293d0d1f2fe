"""Conversations for supervised fine-tuning: rows of a data set as token sequences with a loss mask.

The tokens to learn are what the assistant said. Where the template has `{% generation %}` blocks, they say it, but for
what the generation prompt writes itself, which the model will see. Else each turn is found by rendering: the
conversation up to the turn with the generation prompt is what the model will see, and what the turn adds to it, up to
its end token, is what the model has to write.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from offbeat_core import DataError, Ids, TrainSequence, as_written
from offbeat_data._chat.template import STAND_IN, Message, RenderedChat
from offbeat_data._chat.thoughts import check_thoughts
from offbeat_data._datasets.chat_reader import ChatReader
from offbeat_data._datasets.prompts import RowCounts, uses_template
from offbeat_data._datasets.turn_ends import encode_turns, find_end, with_next_marker
from offbeat_data._escaping import RowNotes
from offbeat_data._images import RowImages, refuse_images, with_images
from offbeat_data._sources.rows import (
    Row,
    as_messages,
    as_question,
    as_text,
    find_column,
    has_column,
    require_column,
)
from offbeat_data._sources.sources import ConversationConfig, read_sources
from offbeat_data._tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ConversationSet:
    """Sequences to train on and sequences held out, with their counts. `eval` may be empty, `train` never is.

    Args:
        train: sequences.
        eval: sequences.
        train_counts: of their rows.
        eval_counts: of their rows.
        notices: what the rows hold that is probably not meant: several forms, roles that few templates know, control
            tokens in text, turns whose end is not learned.
        template: as `SequenceBuilder.template`.
    """

    train: tuple[TrainSequence, ...]
    eval: tuple[TrainSequence, ...]
    train_counts: RowCounts
    eval_counts: RowCounts
    notices: tuple[str, ...] = ()
    template: str = ""


def load_conversations(config: ConversationConfig, tokenizer: Tokenizer) -> ConversationSet:
    """Read, render, encode and mask conversations; equal configurations give equal sets.

    The columns decide what a row is: `messages_column` a conversation, with loss on the assistant's turns;
    `prompt_column` with `completion_column` one exchange, with loss on the completion; `text_column` plain text, with
    loss on all of it. A conversation may have images, and tools in a column `tools`. One with images that is too
    long is left out and never cut off.

    Raises:
        DataError: no such file, empty, broken, a column missing, turns that cannot be found, or every row too long.
        ModelError: a chat template is needed and there is none; or rows have images and the model takes none.
        BackendError: there are images, and Pillow is not installed.
    """
    rows = read_sources(config, lambda row: _question(config, row))
    builder = SequenceBuilder(config, tokenizer)
    train, train_counts = builder.build(rows.train, as_written(config.path), rows.num_shared)
    held_out, eval_counts = builder.build(rows.held_out, as_written(config.eval_path or config.path))
    return ConversationSet(
        train=train,
        eval=held_out,
        train_counts=train_counts,
        eval_counts=eval_counts,
        notices=builder.notices,
        template=builder.template,
    )


@dataclass(frozen=True)
class SequenceBuilder:
    """Makes sequences of rows, and notes what they hold.

    Args:
        config: the `data` section.
        tokenizer: of the model.
        ends_turns: the end of each turn matters: a last turn gets an end token where the chat template writes none, and
            so does a completion without a chat template.
        forms: rows by the column that they were read by.
    """

    config: ConversationConfig
    tokenizer: Tokenizer
    ends_turns: bool = True
    forms: Counter[str] = field(default_factory=Counter)

    @cached_property
    def notes(self) -> RowNotes:
        """Return the counts that are made row by row."""
        return RowNotes(self.tokenizer)

    @property
    def template(self) -> str:
        """File of the model folder whose chat template has rendered rows; "" where all are learned as they are."""
        return self.tokenizer.template_file if self.notes.roles else ""

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what was read of all rows that is probably not meant."""
        found = []
        if len(self.forms) > 1:
            forms = ", ".join(f"{number} by column {name}" for name, number in self.forms.items())
            found.append(f"rows of several forms: {forms}; each was read by the first of these columns that it has")
        if self.forms[self.config.text_column] and (self.config.system_prompt or self.config.template_options):
            found.append(
                f"data.system_prompt and data.template_options have no effect on rows of column "
                f"{self.config.text_column}, which are learned as they are"
            )
        return (*found, *self.notes.notices)

    def build(self, rows: list[Row], source: str, num_shared: int = 0) -> tuple[tuple[TrainSequence, ...], RowCounts]:
        limit, cuts = self.config.max_sequence_tokens, self.config.too_long == "truncate"
        kept: list[TrainSequence] = []
        longest = too_long = truncated = 0
        for number, row in enumerate(rows, 1):
            with self.notes.reading(source, number):
                sequences = list(self._sequences(row, source))
            length = max(len(sequence.ids) for sequence in sequences)
            fitting = [fits for sequence in sequences if (fits := fit_sequence(sequence, limit, cuts)) is not None]
            kept += fitting
            longest = max(longest, length)
            too_long += not fitting
            truncated += bool(fitting) and cuts and length > limit
        if rows and not kept:
            raise DataError(
                f"{source}: every row is too long: the longest has {longest} tokens and data.max_sequence_tokens is "
                f"{limit}; raise it, or set data.too_long to truncate"
            )
        counts = RowCounts(
            read=len(rows) + num_shared,
            held_out=num_shared,
            too_long=too_long,
            truncated=truncated,
            kept=len(kept),
            longest=longest,
        )
        return tuple(kept), counts

    def _sequences(self, row: Row, source: str) -> Iterator[TrainSequence]:
        readers: dict[str, Callable[[Row, str], Iterator[TrainSequence]]] = {
            self.config.messages_column: self._from_messages,
            self.config.completion_column: self._from_completion,
            self.config.text_column: self._from_text,
        }
        for column, reader in readers.items():
            if has_column(row, column):
                self.forms[column] += 1
                return reader(row, source)
        raise DataError(
            f"none of the columns {', '.join(readers)}, it has {', '.join(row) or 'none'}; set data.messages_column, "
            f"data.completion_column (with data.prompt_column) or data.text_column to one of them"
        )

    def _from_messages(self, row: Row, source: str) -> Iterator[TrainSequence]:
        value = require_column(row, self.config.messages_column, "messages_column")
        return self._from_chat(as_messages(value), 0, row, source)

    def _from_completion(self, row: Row, source: str) -> Iterator[TrainSequence]:
        prompt: Any = require_column(row, self.config.prompt_column, "prompt_column")
        completion: Any = require_column(row, self.config.completion_column, "completion_column")
        return self.exchange(prompt, completion, row, source)

    def exchange(self, prompt: Any, completion: Any, row: Row, source: str) -> Iterator[TrainSequence]:
        """A prompt and what is learned after it, each a text or chat messages; the row may hold images and tools."""
        if isinstance(prompt, str) and not isinstance(completion, list):
            if not uses_template(self.config, self.tokenizer):
                refuse_images(row)
                return iter([self._from_texts(prompt, as_text(completion))])
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(completion, list):
            completion = [{"role": "assistant", "content": as_text(completion)}]
        asked = as_messages(prompt)
        return self._from_chat([*asked, *as_messages(completion)], len(asked), row, source)

    def _from_chat(self, messages: list[dict[str, Any]], first: int, row: Row, source: str) -> Iterator[TrainSequence]:
        chat, options, pictures = self._reader.read(row, messages, source)
        first += len(chat) - len(messages)  # a system prompt was put before them
        num_turns = sum(message["role"] == "assistant" for message in chat[first:])
        pixels = [picture.pixels() for picture in pictures]
        marked = mark_assistant_turns(self.tokenizer, chat, first=first, options=options)
        num_turns = num_turns if len(marked) == 1 else 1
        for rendered in marked:
            seen = self._images.seen_by(rendered, pictures)
            expanded = self._images.expand(rendered, seen)
            turns = encode_turns(self.tokenizer, expanded, num_turns, adds_end=self.ends_turns)
            self._images.check(turns.ids, seen)
            if self.ends_turns:
                self.notes.turns(min(num_turns, len(rendered.spans)), turns.open_ends)
            yield TrainSequence(ids=turns.ids, loss_mask=turns.loss_mask, images=tuple(pixels[: len(seen)]))

    @cached_property
    def _images(self) -> RowImages:
        return RowImages(self.tokenizer, self.config.max_image_pixels)

    @cached_property
    def _reader(self) -> ChatReader:
        return ChatReader(self.config, self.tokenizer, self._images, self.notes)

    def _from_texts(self, prompt: str, completion: str) -> TrainSequence:
        """Encode prompt and completion apart: at inference the model sees the prompt's own tokens."""
        self.notes.texts(prompt, completion)
        [prompt_ids] = self.tokenizer.encode_prompts([prompt])
        if not len(prompt_ids):
            raise DataError("the prompt is empty; use data.text_column for plain text")
        [completion_ids] = self.tokenizer.encode([completion], add_special_tokens=False)
        completion_ids = self._with_eos(completion_ids) if self.ends_turns else completion_ids
        mask = np.arange(len(prompt_ids) + len(completion_ids)) >= len(prompt_ids)
        return TrainSequence(ids=np.concatenate([prompt_ids, completion_ids]), loss_mask=mask)

    def _from_text(self, row: Row, source: str) -> Iterator[TrainSequence]:
        text = as_text(require_column(row, self.config.text_column, "text_column"))
        self.notes.texts(text)
        ids = self._with_eos(self.tokenizer.encode_prompts([text])[0])
        if len(ids) < 2:
            raise DataError(f"a text needs at least two tokens to learn from, got {text!r}")
        yield TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) > 0)

    def _with_eos(self, ids: Ids) -> Ids:
        end = self.tokenizer.closing_id
        if end is None or (len(ids) and ids[-1] in self.tokenizer.end_ids):
            return ids
        return np.append(ids, np.int32(end))


def _question(config: ConversationConfig, row: Row) -> Any:
    """Return what the assistant was asked: all of a row but its answer, so that another answer is no other question."""
    if not has_column(row, config.messages_column):
        is_exchange = has_column(row, config.completion_column)
        asked = as_question(find_column(row, config.prompt_column if is_exchange else config.text_column))
        return with_images(asked, row)
    messages = as_question(find_column(row, config.messages_column))
    if not isinstance(messages, list):
        return None  # `as_messages` says what is wrong with it
    said = [(each.get("role"), each.get("content")) for each in messages if each.get("role") != "assistant"]
    return with_images(said if any(role != "system" for role, _ in said) else messages, row)


def fit_sequence(sequence: TrainSequence, limit: int, cuts: bool) -> TrainSequence | None:
    """Return the sequence within the limit; None when it is left out, or when the cut leaves nothing to learn."""
    if len(sequence.ids) > limit:
        if not cuts or sequence.images:
            return None
        sequence = TrainSequence(ids=sequence.ids[:limit], loss_mask=sequence.loss_mask[:limit])
    return sequence if sequence.loss_mask.any() else None


def mark_assistant_turns(
    tokenizer: Tokenizer, messages: Sequence[Message], *, first: int = 0, options: Mapping[str, Any]
) -> list[RenderedChat]:
    """Render a conversation with the spans of its assistant turns.

    Args:
        tokenizer: with a chat template.
        messages: the conversation.
        first: learn only from messages[first:].
        options: further variables of the template.

    Returns:
        One text, with the spans to learn. Some templates rewrite earlier turns when later ones come (Qwen3 drops
        their thoughts), with or without `{% generation %}` blocks; then one text per assistant turn, as the model saw
        it, each ending with that turn, or with the marker of the next role where engines stop at it.

    Raises:
        DataError: there is no assistant turn, or it cannot be separated from the rest.
    """
    template = tokenizer.require_template()
    turns = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    if not turns:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise DataError(
            f"the conversation has no assistant message to learn from, its roles are {roles}: add one, or rename the "
            "role, or drop the row"
        )
    whole = template.render(messages, add_generation_prompt=False, options=options)
    if whole.spans:
        found = [_marked_turn(tokenizer, messages[: at + 1], options) for at in turns]
        marked = [turn for turn in found if turn.spans]
        if all(whole.text.startswith(turn.text[: turn.spans[-1][1]]) for turn in marked):
            return [RenderedChat(text=whole.text, spans=tuple(span for turn in marked for span in turn.spans))]
        return marked
    found = [_find_turn(tokenizer, messages[: at + 1], options) for at in turns]
    if all(whole.text.startswith(turn.text[: turn.spans[0][1]]) for turn in found):
        return [RenderedChat(text=whole.text, spans=tuple(turn.spans[0] for turn in found))]
    longer = [template.render(messages[: at + 2], add_generation_prompt=False, options=options).text for at in turns]
    return [with_next_marker(tokenizer, turn, text) for turn, text in zip(found, longer, strict=True)]


def _marked_turn(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> RenderedChat:
    """Return the conversation, with the spans of its last message alone, as `{% generation %}` blocks mark them.

    What the generation prompt has written before the turn is left out of them, and what comes after its end token.
    """
    template, before = tokenizer.require_template(), messages[:-1]
    closed, start, num_earlier = template.render(messages, add_generation_prompt=False, options=options), 0, 0
    if before:
        opening = template.render(before, add_generation_prompt=True, options=options)
        if closed.text.startswith(opening.text):
            check_thoughts(opening.text, closed.text[len(opening.text) :], messages[-1], len(messages))
        else:  # such as one that ends with an empty thought
            opening = template.render(before, add_generation_prompt=False, options=options)
        if closed.text.startswith(opening.text):
            start = len(opening.text)
        else:
            num_earlier = len(opening.spans)
    end = find_end(tokenizer, closed.text, start, len(closed.text))
    cut = ((max(first, start), min(last, end)) for first, last in closed.spans[num_earlier:])
    return RenderedChat(text=closed.text, spans=tuple(span for span in cut if span[0] < span[1]))


def _find_turn(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> RenderedChat:
    """Return the conversation, whose one span is what the last of its messages adds to the opening before it."""
    template, before = tokenizer.require_template(), messages[:-1]
    if before:
        opening = template.render(before, add_generation_prompt=True, options=options).text
    else:  # templates render no empty conversation: what they write before the words of this one opens it
        probe = [{**messages[0], "content": STAND_IN}]
        opening = template.render(probe, add_generation_prompt=False, options=options).text.partition(STAND_IN)[0]
    closed = template.render(messages, add_generation_prompt=False, options=options).text
    if not closed.startswith(opening) or len(closed) == len(opening):
        raise DataError(
            f"message {len(messages)}: the chat template does not put the assistant's words right after its generation "
            f"prompt ({opening[-40:]!r}), so they cannot be found: put {{% generation %}} and {{% endgeneration %}} "
            f"around them in the template, or give prompt and completion columns and set data.chat_template to off"
        )
    check_thoughts(opening, closed[len(opening) :], messages[-1], len(messages))
    # White space after the last control token is left out: sampling ends there, so nothing has to learn it.
    start, end = len(opening), len(closed.rstrip())
    if end <= start or not any(closed.endswith(text, start, end) for text in tokenizer.special_texts if text):
        end = len(closed)
    return RenderedChat(text=closed, spans=((start, find_end(tokenizer, closed, start, end)),))
