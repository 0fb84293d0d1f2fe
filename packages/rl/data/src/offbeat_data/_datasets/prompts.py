"""Prompts for reinforcement learning: rows of a data set, rendered and encoded."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from offbeat_core import ConfigError, DataError, Ids, Image, as_written
from offbeat_data._chat.template import RenderedChat
from offbeat_data._datasets.chat_reader import ChatReader
from offbeat_data._escaping import RowNotes
from offbeat_data._images import Picture, RowImages, refuse_images, with_images
from offbeat_data._sources.rows import (
    Row,
    as_messages,
    as_question,
    as_text,
    find_column,
    naming_row,
    require_column,
    to_plain,
    without_column,
)
from offbeat_data._sources.sources import DataConfig, SourceConfig, read_sources
from offbeat_data._sources.task_libraries import without_judgement
from offbeat_data._tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, as plain data that travels between processes.

    Args:
        index: its place in its set, counted from 0.
        ids: [P] int32; an image stands in them as all its placeholder tokens.
        text: what the ids encode, the chat template applied, with one placeholder for an image.
        answer: the reference answer, or None.
        fields: the row it came from, as plain JSON data.
        pictures: its images, in the order of their placeholders.
        column: of `fields`, or a part of one, that holds what is asked.
        answer_column: of `fields`, or a part of one, that holds the reference answer.
        escaped: `text` with the marks of `Tokenizer.escape` in the words of users, for models that encode it anew;
            empty where no control token is written in them.
    """

    index: int
    ids: Ids
    text: str
    answer: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    column: str = "prompt"
    answer_column: str = "answer"
    escaped: str = ""

    @property
    def question(self) -> str | list[dict[str, Any]]:
        """Return what is asked, as the data has it: a text, or chat messages. `text` where the row does not say."""
        asked = find_column(self.fields, self.column)
        return asked if isinstance(asked, str | list) else self.text

    @property
    def fields_to_answer(self) -> dict[str, Any]:
        """`fields` without the reference answer, nor what a library of tasks judges by: for the agent that answers."""
        return without_judgement(without_column(self.fields, self.answer_column))

    @property
    def images(self) -> tuple[Image, ...]:
        """Pixels of the pictures, each [H, W, 3] uint8: what engines take. Decoded at every call.

        Raises:
            DataError: a picture is broken.
            BackendError: Pillow is not installed.
        """
        return tuple(picture.pixels() for picture in self.pictures)

    def to_json(self) -> str:
        """Return all but the pictures: a reward reads what the model wrote of them. Rows hold integers of any size."""
        plain = {**vars(self), "ids": self.ids.tolist()}
        del plain["pictures"]
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Prompt":
        """Return the prompt that `to_json` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "ids": np.array(fields["ids"], dtype=np.int32)})


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Counts of the rows of one set, by what became of them.

    Args:
        read: rows read or drawn.
        held_out: of these, left out of the training set because what they ask is held out.
        too_long: of these, left out because they were too long.
        truncated: of these, cut off at the end (SFT only).
        kept: items made of them; SFT may make several of one row.
        longest: length of the longest, before the limit, in tokens.
    """

    read: int = 0
    held_out: int = 0
    too_long: int = 0
    truncated: int = 0
    kept: int = 0
    longest: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts to train on and prompts held out, with their counts. `eval` may be empty, `train` never is.

    Args:
        train: prompts.
        eval: prompts.
        train_counts: of their rows.
        eval_counts: of their rows.
        notices: what the rows hold that is probably not meant: control tokens in text, roles that few templates know,
            prompts that end with an answer.
        template: file of the model folder whose chat template has rendered the first prompt; "": its text is as it was.
    """

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]
    train_counts: RowCounts
    eval_counts: RowCounts
    notices: tuple[str, ...] = ()
    template: str = ""


def load_prompts(config: DataConfig, tokenizer: Tokenizer, *, needs_answer: bool = True) -> PromptSet:
    """Read, render, encode and filter prompts; equal configurations give equal sets.

    Args:
        config: the `data` section.
        tokenizer: of the model that will complete them.
        needs_answer: refuse rows without a reference answer; see `RewardConfig.needs_answer`.

    Raises:
        DataError: no such file, empty, broken, a column missing, or every prompt too long.
        ConfigError: a setting without effect or a task that does not exist.
        ModelError: a chat template is needed and there is none; or rows have images and the model takes none.
        BackendError: a reader is not installed.
    """
    rows = read_sources(config, lambda row: with_images(as_question(find_column(row, config.prompt_column)), row))
    builder = _PromptBuilder(config, tokenizer, needs_answer)
    train, train_counts = builder.build(rows.train, as_written(config.path), rows.num_shared)
    held_out, eval_counts = builder.build(rows.held_out, as_written(config.eval_path or config.path))
    return PromptSet(
        train=train,
        eval=held_out,
        train_counts=train_counts,
        eval_counts=eval_counts,
        notices=(*builder.notes.notices, *_sameness_notice(train)),
        template=tokenizer.template_file if builder.is_templated(train[0]) else "",
    )


def _sameness_notice(prompts: tuple[Prompt, ...]) -> list[str]:
    """Say where a chat template leaves out what is asked."""
    questions = {json.dumps(prompt.question, default=str) for prompt in prompts}
    if len(questions) == 1 or len({prompt.text for prompt in prompts}) > 1:
        return []
    return [
        f"all {len(prompts)} prompts are the same text once the chat template has rendered them, and {len(questions)} "
        "different questions are asked: correct the template, which leaves them out"
    ]


@dataclass(frozen=True)
class _Rendered:
    text: str  # for people
    encoded: str  # the same, with as many placeholders as each image takes tokens
    is_templated: bool
    pictures: tuple[Picture, ...] = ()
    escaped: str = ""


@dataclass(frozen=True)
class _PromptBuilder:
    config: DataConfig
    tokenizer: Tokenizer
    needs_answer: bool

    def build(self, rows: list[Row], source: str, num_shared: int = 0) -> tuple[tuple[Prompt, ...], RowCounts]:
        rendered = []
        for number, row in enumerate(rows, 1):
            with self.notes.reading(source, number):
                rendered.append(self._render(row, source))
        encoded = self._encode(rendered)
        lengths = [len(ids) for ids in encoded]
        limit = self.config.max_prompt_tokens
        if rows and min(lengths) > limit:
            raise DataError(
                f"{source}: every prompt is too long: they have {min(lengths)} to {max(lengths)} tokens and "
                f"data.max_prompt_tokens is {limit}; raise it, and rollout.max_model_len with it"
            )
        kept: list[Prompt] = []
        for number, (row, made, ids) in enumerate(zip(rows, rendered, encoded, strict=True), 1):
            with naming_row(source, number):
                kept += self._prompts(len(kept), row, made, ids)
        counts = RowCounts(
            read=len(rows) + num_shared,
            held_out=num_shared,
            too_long=len(rows) - len(kept),
            kept=len(kept),
            longest=max(lengths, default=0),
        )
        return tuple(kept), counts

    def _prompts(self, index: int, row: Row, made: _Rendered, ids: Ids) -> list[Prompt]:
        """Return the prompt of a row; none where it is too long."""
        if not len(ids):
            raise DataError("the prompt is empty; fill it in or drop the row")
        self._images.check(ids, made.pictures)
        if len(ids) > self.config.max_prompt_tokens:
            return []
        answer, fields = self._answer(row), to_plain(row)
        return [
            Prompt(
                index=index,
                ids=ids,
                text=made.text,
                answer=answer,
                fields=fields,
                pictures=made.pictures,
                column=self.config.prompt_column,
                answer_column=self.config.answer_column,
                escaped=made.escaped,
            )
        ]

    def is_templated(self, prompt: Prompt) -> bool:
        return not isinstance(prompt.question, str) or uses_template(self.config, self.tokenizer)

    @cached_property
    def notes(self) -> RowNotes:
        """Return the counts that are made row by row."""
        return RowNotes(self.tokenizer)

    @cached_property
    def _images(self) -> RowImages:
        return RowImages(self.tokenizer, self.config.max_image_pixels)

    @cached_property
    def _reader(self) -> ChatReader:
        return ChatReader(self.config, self.tokenizer, self._images, self.notes)

    def _render(self, row: Row, source: str) -> _Rendered:
        value = require_column(row, self.config.prompt_column, "prompt_column")
        if isinstance(value, str):
            if not uses_template(self.config, self.tokenizer):
                refuse_images(row)
                self.notes.texts(value)
                return _Rendered(value, value, is_templated=False)
            value = [{"role": "user", "content": value}]
        elif self.config.chat_template == "off":
            raise DataError("the prompt is a list of chat messages: set data.chat_template to auto")
        template = self.tokenizer.require_template()
        asked = as_messages(value, f"column {self.config.prompt_column!r} (data.prompt_column)")
        self.notes.prompt(asked)
        messages, options, pictures = self._reader.read(row, asked, source)
        chat = template.render(messages, add_generation_prompt=True, options=options)
        encoded = self._images.expand(RenderedChat(text=chat.text, spans=()), pictures).text
        text = self.tokenizer.unescape(chat.text)
        escaped = "" if text == chat.text else chat.text
        return _Rendered(text, encoded, is_templated=True, pictures=pictures, escaped=escaped)

    def _encode(self, rendered: list[_Rendered]) -> list[Ids]:
        """Return a chat template writes bos itself; a plain text gets what the tokenizer puts before a text."""
        templated = [made.encoded for made in rendered if made.is_templated]
        plain = [made.encoded for made in rendered if not made.is_templated]
        ids = iter(self.tokenizer.encode(templated, add_special_tokens=False))
        plain_ids = iter(self.tokenizer.encode_prompts(plain))
        return [next(ids if made.is_templated else plain_ids) for made in rendered]

    def _answer(self, row: Row) -> str | None:
        if self.needs_answer and "reasoning_gym" not in row:
            return as_text(require_column(row, self.config.answer_column, "answer_column"))
        value = find_column(row, self.config.answer_column)
        return None if value is None else as_text(value)


def uses_template(config: SourceConfig, tokenizer: Tokenizer) -> bool:
    """Return whether plain texts go through the chat template.

    Refuses settings that would have no effect without one.
    """
    if config.chat_template == "on":
        tokenizer.require_template()
    uses = config.chat_template == "on" or (config.chat_template == "auto" and tokenizer.chat_template is not None)
    if not uses and (config.system_prompt or config.template_options):
        raise ConfigError(
            "data.system_prompt and data.template_options have no effect without a chat template: "
            "leave them out, or use a model folder that has one"
        )
    return uses
