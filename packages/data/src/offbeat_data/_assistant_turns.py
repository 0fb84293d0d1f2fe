"""Finds what the assistant said in a rendered conversation: the tokens a model learns from.

Where the template has `{% generation %}` blocks, they say it. Else each turn is found by rendering: the
conversation up to the turn with the generation prompt is what the model will see, and what the turn adds to it is what
the model has to write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat_data._chat_template import ChatTemplate, Message, RenderedChat, Span
from offbeat_data._tokenizer import Tokenizer
from offbeat_types import DataError, Ids


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
        their thoughts); then one text per assistant turn, each ending with that turn, as the model saw it.

    Raises:
        DataError: there is no assistant turn, or it cannot be told from the rest.
    """
    template = tokenizer.require_template()
    turns = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant message to learn from: add one or drop the row")
    whole = template.render(messages, add_generation_prompt=False, options=options)
    if whole.spans:
        return [_drop_spans_before(template, whole, messages[:first], options)]
    finder = _TurnFinder(tokenizer, template, messages, options)
    found = [finder.find(at) for at in turns]
    if all(whole.text.startswith(turn.text[: turn.spans[0][1]]) for turn in found):
        return [RenderedChat(text=whole.text, spans=tuple(turn.spans[0] for turn in found))]
    return found


def tokens_in_spans(offsets_T2: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Whether each token holds a character of one of the spans, [T] bool."""
    start_T, end_T = offsets_T2[:, 0], np.maximum(offsets_T2[:, 1], offsets_T2[:, 0] + 1)
    mask_T = np.zeros(len(offsets_T2), dtype=np.bool_)
    for start, end in spans:
        mask_T |= (start_T < end) & (end_T > start)
    return mask_T


def encode_marked(tokenizer: Tokenizer, chat: RenderedChat) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Token ids [T] int32 and the loss mask [T] bool of a rendered conversation."""
    ids, offsets = tokenizer.encode_with_offsets(chat.text)
    mask = tokens_in_spans(offsets, chat.spans)
    mask[:1] = False  # nothing comes before the first token to predict it from
    return ids, mask


def _drop_spans_before(
    template: ChatTemplate, whole: RenderedChat, prompt: Sequence[Message], options: Mapping[str, Any]
) -> RenderedChat:
    if not prompt:
        return whole
    opening = template.render(prompt, add_generation_prompt=False, options=options).text
    if not whole.text.startswith(opening):
        raise DataError(
            "the chat template renders the prompt differently once it is completed, so the completion cannot be found: "
            "give whole conversations in the messages column"
        )
    return RenderedChat(text=whole.text, spans=tuple(span for span in whole.spans if span[0] >= len(opening)))


class _TurnFinder:
    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> None:
        self._special_texts, self._template = tokenizer.special_texts, template
        self._messages, self._options = messages, options

    def find(self, at: int) -> RenderedChat:
        """The conversation up to and with turn `at`, whose one span is what that turn adds to the opening."""
        opening = ""
        if at:
            opening = self._template.render(self._messages[:at], add_generation_prompt=True, options=self._options).text
        closed = self._template.render(
            self._messages[: at + 1], add_generation_prompt=False, options=self._options
        ).text
        if not closed.startswith(opening) or len(closed) == len(opening):
            raise DataError(
                f"message {at + 1}: the chat template does not put the assistant's words right after its generation "
                f"prompt ({opening[-40:]!r}), so they cannot be found: put {{% generation %}} and "
                f"{{% endgeneration %}} around them in the template, or give prompt and completion columns and set "
                f"data.chat_template to off"
            )
        return RenderedChat(text=closed, spans=((len(opening), self._end_of_turn(closed, len(opening))),))

    def _end_of_turn(self, closed: str, start: int) -> int:
        """Leave out white space after the last control token: sampling ends there, so nothing has to learn it."""
        end = len(closed.rstrip())
        if end > start and any(closed.endswith(text, start, end) for text in self._special_texts if text):
            return end
        return len(closed)
