"""Finished samples to answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from msgspec import UNSET, json

from offbeat_data import Tokenizer, read_tool_calls
from offbeat_serve._answers import (
    AnsweredMessage,
    CalledFunction,
    CalledTool,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    finish_reason,
    logprobs_of,
    segments_of,
    text_before,
    usage_of,
)
from offbeat_serve._requests import ChatRequest, CompletionRequest, SamplingRequest
from offbeat_types import Completion, Ids

_CALL_OPENS = "<tool_call>"


@dataclass(frozen=True)
class Sampled:
    """A prompt, [P] int32, and what it was completed with."""

    prompt_ids: Ids
    completions: Sequence[Completion]


class Answerer:
    """Builds answers.

    Args:
        tokenizer: of the model, for the texts of single tokens.
        model_name: as answers name it.
    """

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._tokenizer, self._model_name = tokenizer, model_name
        self._token_texts: dict[int, str] = {}

    def completion(
        self, request: CompletionRequest, request_id: str, sampled: Sequence[Sampled], version: int
    ) -> CompletionAnswer:
        """Answer /v1/completions: the choices of one prompt after those of the other."""
        pairs = [(one.prompt_ids, completion) for one in sampled for completion in one.completions]
        choices = [
            CompletionChoice(
                text=text_before(completion, request.stops),
                logprobs=None if request.logprobs is None else self._completion_logprobs(completion),
                prompt_token_ids=prompt_ids.tolist() if request.return_token_ids else UNSET,
                **_choice(index, completion, request),
            )
            for index, (prompt_ids, completion) in enumerate(pairs)
        ]
        return CompletionAnswer(choices=choices, **self._answer(request_id, sampled, version))

    def chat(self, request: ChatRequest, request_id: str, sampled: Sequence[Sampled], version: int) -> ChatAnswer:
        """Answer /v1/chat/completions: the choices of its one prompt."""
        [only] = sampled
        choices = []
        for index, completion in enumerate(only.completions):
            message = _message(text_before(completion, request.stops), calls_tools=request.calls_tools)
            choice = _choice(index, completion, request)
            if message.tool_calls is not UNSET and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
            message.token_ids = choice["token_ids"]
            logprobs = self._chat_logprobs(completion) if request.logprobs else None
            choices.append(ChatChoice(message=message, logprobs=logprobs, **choice))
        prompt_ids = only.prompt_ids.tolist() if request.return_token_ids else UNSET
        answer = self._answer(request_id, sampled, version)
        return ChatAnswer(choices=choices, prompt_token_ids=prompt_ids, **answer)

    def _answer(self, request_id: str, sampled: Sequence[Sampled], version: int) -> dict[str, Any]:
        completions = [completion for one in sampled for completion in one.completions]
        return {
            "id": request_id,
            "created": int(time.time()),
            "model": self._model_name,
            "policy_version": version,
            "usage": usage_of(sum(len(one.prompt_ids) for one in sampled), completions),
        }

    def _completion_logprobs(self, completion: Completion) -> CompletionLogprobs:
        tokens = [self._token_text(token) for token in completion.ids.tolist()]
        offsets, length = [], 0
        for token in tokens:
            offsets.append(length)
            length += len(token)
        return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs_of(completion), text_offset=offsets)

    def _chat_logprobs(self, completion: Completion) -> ChatLogprobs:
        texts = [self._token_text(token) for token in completion.ids.tolist()]
        pairs = zip(texts, logprobs_of(completion), strict=True)
        return ChatLogprobs(
            content=[TokenLogprob(token=text, logprob=value, bytes=_bytes(text)) for text, value in pairs]
        )

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _choice(index: int, completion: Completion, request: SamplingRequest) -> dict[str, Any]:
    """What choices of both kinds hold."""
    return {
        "index": index,
        "finish_reason": finish_reason(completion),
        "ended_by": completion.stop_reason,
        "version_segments": segments_of(completion),
        "token_ids": completion.ids.tolist() if request.return_token_ids else UNSET,
    }


def _message(text: str, *, calls_tools: bool) -> AnsweredMessage:
    """The model's turn; its calls apart where it was given tools and every call can be read."""
    calls = read_tool_calls(text) if calls_tools else []
    if not calls or any(call.complaint for call in calls):
        return AnsweredMessage(content=text)
    called = [
        CalledTool(
            id=f"call_{uuid4().hex[:24]}",
            function=CalledFunction(name=call.name, arguments=json.encode(call.arguments).decode()),
        )
        for call in calls
    ]
    return AnsweredMessage(content=text.partition(_CALL_OPENS)[0].strip() or None, tool_calls=called)


def _bytes(text: str) -> list[int] | None:
    """UTF-8 of a token's text; None where it is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
