"""Requests to prompts. What the model sampled in an earlier turn goes in as the tokens that it sampled.

Legend: P prompt tokens.
"""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
import numpy as np

from offbeat_data import DataConfig, Message, Tokenizer, TurnTemplate
from offbeat_serve._refusals import RefusedError
from offbeat_serve._requests import ChatMessage, ChatRequest, CompletionRequest, ToolCall
from offbeat_types import Ids

_PASSED_ON: Final = ("name", "tool_call_id", "reasoning_content")


class Prompter:
    """Turns requests into token ids.

    Args:
        tokenizer: of the model, with its chat template.
        max_prompts: of one request.
    """

    def __init__(self, tokenizer: Tokenizer, max_prompts: int) -> None:
        self._tokenizer, self._max_prompts = tokenizer, max_prompts

    def of_completion(self, request: CompletionRequest) -> list[Ids]:
        """Each prompt, [P] int32: ids as they are, texts encoded.

        Raises:
            RefusedError: prompts of several kinds, or too many.
        """
        return [self._ids(prompt, request) for prompt in request.prompts(self._max_prompts)]

    def _ids(self, prompt: str | list[int], request: CompletionRequest) -> Ids:
        if isinstance(prompt, list):
            return np.array(prompt, np.int32)
        special = request.add_special_tokens is not False
        [ids] = self._tokenizer.encode([prompt], add_special_tokens=special)
        return ids

    def of_chat(self, request: ChatRequest) -> Ids:
        """The conversation up to where the model speaks, [P] int32.

        Messages are rendered by the chat template up to the first turn that brings its `token_ids`. From there on the
        prompt grows by tokens: those of the turn as they were sampled, then those of the messages that answer it.

        Raises:
            RefusedError: a later turn of the assistant brings no `token_ids`.
            ModelError: the model folder has no chat template, or one that rewrites earlier turns.
            DataError: the template refuses the messages.
        """
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if request.tools and request.tool_choice != "none":
            options["tools"] = [_plain(tool) for tool in request.tools]
        messages = request.messages
        start = next((at for at, message in enumerate(messages) if message.was_sampled), len(messages))
        opening = [_template_message(message) for message in messages[:start]]
        rendered = self._tokenizer.require_template().render(opening, add_generation_prompt=True, options=options)
        parts = self._tokenizer.encode([rendered.text], add_special_tokens=False)
        if start < len(messages):
            # Its other settings, a path among them, are about reading data sets.
            turns = TurnTemplate(self._tokenizer, DataConfig(path="", chat_template="on", template_options=options))
            for said, replies in _turns(messages, start):
                parts += [said, turns.reply_ids(said, replies)] if replies else [said]
        return np.concatenate(parts)


def _turns(messages: Sequence[ChatMessage], start: int) -> list[tuple[Ids, list[Message]]]:
    """Each sampled turn from `start` on, with the messages that answer it."""
    turns: list[tuple[Ids, list[Message]]] = []
    for at, message in enumerate(messages[start:], start):
        if message.was_sampled:
            turns.append((np.array(message.token_ids, np.int32), []))
        elif message.role == "assistant":
            needed = (
                f"messages[{at}] is the assistant's and has no token_ids, but an earlier turn has: "
                "send every turn back as it was answered, or none"
            )
            raise RefusedError(HTTPStatus.BAD_REQUEST, needed, param=f"messages[{at}].token_ids")
        else:
            turns[-1][1].append(_template_message(message))
    return turns


def _template_message(message: ChatMessage) -> Message:
    """A message as chat templates know it: the content a text, arguments of calls as objects."""
    plain: dict[str, Any] = {"role": message.role, "content": _text(message)}
    plain |= {name: value for name in _PASSED_ON if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return plain


def _text(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _template_call(call: ToolCall) -> Mapping[str, Any]:
    plain: dict[str, Any] = _plain(call)
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return plain  # the model's own words, which need not be JSON
    if isinstance(arguments, dict):
        plain["function"]["arguments"] = arguments
    return plain


def _plain(value: msgspec.Struct) -> Any:
    """As JSON would have it, without what was left out."""
    return _without_none(msgspec.to_builtins(value))


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}
