"""Answers to clients: OpenAI's objects, with token ids as vLLM has them and the policy versions besides.

Source: https://platform.openai.com/docs/api-reference/completions/object and .../chat/object;
vllm 0.32, vllm/entrypoints/openai/{completion,chat_completion}/protocol.py
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType, json

from offbeat_core import Completion, Ids, StopReason, VersionSegment
from offbeat_data import Tokenizer, read_tool_calls
from offbeat_serve._requests import ChatRequest, CompletionRequest, SamplingRequest

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
_FINISH: Final[dict[StopReason, FinishReason]] = {"eos": "stop", "stop": "stop", "length": "length", "aborted": "abort"}
"""OpenAI's word, and vLLM's for what was aborted."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens read and sampled; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct, kw_only=True):
    """Fields of all choices.

    `ended_by` distinguishes the end token (`eos`) from a stop text (`stop`); `aborted` is unfinished: continue from its
    tokens, or drop it, but do not take it for an answer.
    """

    index: int
    finish_reason: FinishReason
    ended_by: StopReason
    version_segments: tuple[VersionSegment, ...]
    token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the sampled tokens, nats; offsets are into the joined `tokens`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: None = None


class CompletionChoice(Choice, kw_only=True):
    """One sample."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """Fields of all answers. `policy_version` is the one served now; the tokens' own are in `version_segments`."""

    id: str
    created: int
    model: str
    policy_version: int
    usage: Usage | None


class CompletionAnswer(Answer, kw_only=True):
    """Answer of POST /v1/completions. Choices come prompt by prompt, n of each."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A sampled token and its log-probability, nats."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[Any] = msgspec.field(default_factory=list)


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the sampled tokens."""

    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True):
    """A call in the model's turn."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnsweredMessage(msgspec.Struct, kw_only=True):
    """The model's turn; sent back as it is, its `token_ids` go into the next prompt untouched."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[CalledTool] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One sample."""

    message: AnsweredMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Answer, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """The one model that is served."""

    id: str
    created: int
    policy_version: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "offbeat"


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class HealthAnswer(msgspec.Struct, kw_only=True):
    """Answer of GET /health: the engine's counters, see `EngineHealth`."""

    policy_version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    busy_s: float
    uptime_s: float
    num_decoding: int = 0
    status: Literal["ok"] = "ok"


def logprobs_of(completion: Completion) -> list[float | None]:
    """Log-probabilities as JSON can hold them; None for one that is not finite."""
    return [value if math.isfinite(value) else None for value in completion.logprobs.tolist()]


def text_before(completion: Completion, stops: Sequence[str]) -> str:
    """Return the text up to the stop text that ended it, which OpenAI leaves out; the ids hold it."""
    found = [at for stop in stops if (at := completion.text.find(stop)) >= 0]
    return completion.text[: min(found)] if found and completion.stop_reason == "stop" else completion.text


_CALL_OPENS = "<tool_call>"


@dataclass(frozen=True)
class Sampled:
    """A prompt, [P] int32, and what it was completed with."""

    prompt_ids: Ids
    completions: Sequence[Completion]


class Answerer:
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
            message = answered_message(text_before(completion, request.stops), calls_tools=request.calls_tools)
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
        prompts = sum(len(one.prompt_ids) for one in sampled)
        completions = sum(len(completion.ids) for one in sampled for completion in one.completions)
        usage = Usage(prompt_tokens=prompts, completion_tokens=completions, total_tokens=prompts + completions)
        return {
            "id": request_id,
            "created": int(time.time()),
            "model": self._model_name,
            "policy_version": version,
            "usage": usage,
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
    return {
        "index": index,
        "finish_reason": _FINISH[completion.stop_reason],
        "ended_by": completion.stop_reason,
        "version_segments": completion.segments,
        "token_ids": completion.ids.tolist() if request.return_token_ids else UNSET,
    }


def answered_message(text: str, *, calls_tools: bool) -> AnsweredMessage:
    """Return the model's turn; its calls apart where it was given tools and every call can be read."""
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
    return None if "\ufffd" in text else list(text.encode())
