"""Finished answers as server-sent events, for clients that know nothing else.

An engine returns whole completions, so the chunks of a stream come all at once, when the last sample is finished.

Source: https://platform.openai.com/docs/api-reference/chat/streaming; https://html.spec.whatwg.org (event streams)
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from offbeat_serve._answers import ChatAnswer, CompletionAnswer

_DONE = b"data: [DONE]\n\n"


def events(answer: ChatAnswer | CompletionAnswer, *, include_usage: bool) -> Iterator[bytes]:
    """The events of a finished answer.

    Args:
        answer: to be told.
        include_usage: end with a chunk that holds the usage and no choice.
    """
    whole: dict[str, Any] = msgspec.to_builtins(answer)
    usage, choices = whole.pop("usage"), whole.pop("choices")
    if isinstance(answer, ChatAnswer):
        whole["object"] = "chat.completion.chunk"
        choices = [chunk for choice in choices for chunk in _chat_chunks(choice)]
    for choice in choices:
        yield _event({**whole, "choices": [choice]})
        whole.pop("prompt_token_ids", None)  # in the first chunk only
    if include_usage:
        yield _event({**whole, "choices": [], "usage": usage})
    yield _DONE


def _chat_chunks(choice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice as two chunks: what was said, with its tokens, then how it ended."""
    message = choice.pop("message")
    message.pop("token_ids", None)  # the choice has them
    for number, call in enumerate(message.get("tool_calls", ())):
        call["index"] = number
    spoken = {"index": choice["index"], "delta": message, "finish_reason": None}
    spoken |= {name: choice.pop(name) for name in ("logprobs", "token_ids") if name in choice}
    return spoken, {**choice, "delta": {}}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
