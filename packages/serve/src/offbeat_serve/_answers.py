"""What clients are answered: OpenAI's objects, with token ids as vLLM has them and the policy versions besides.

Source: https://platform.openai.com/docs/api-reference/completions/object and .../chat/object;
vllm 0.32, vllm/entrypoints/openai/{completion,chat_completion}/protocol.py
"""

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from offbeat_types import Completion, StopReason

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
_FINISH: Final[dict[StopReason, FinishReason]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "aborted": "abort",
}


class Segment(msgspec.Struct, kw_only=True):
    """A run of tokens, all sampled by one policy version."""

    version: int
    num_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens read and sampled; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct, kw_only=True):
    """What all choices hold.

    `ended_by` tells the end token (`eos`) from a stop text (`stop`); `aborted` is unfinished: go on with its tokens, or
    drop it, but do not take it for an answer.
    """

    index: int
    finish_reason: FinishReason
    ended_by: StopReason
    version_segments: list[Segment]
    token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Of the sampled tokens, nats; offsets are into the joined `tokens`."""

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
    """What all answers hold. `policy_version` is the one served now; the tokens' own are in `version_segments`."""

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
    """Of the sampled tokens."""

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
    """Answer of GET /health: the engine's counters."""

    policy_version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    busy_s: float
    uptime_s: float
    status: Literal["ok"] = "ok"


def segments_of(completion: Completion) -> list[Segment]:
    """Which policy version sampled which run of tokens."""
    return [Segment(version=run.version, num_tokens=run.num_tokens) for run in completion.segments]


def usage_of(num_prompt_tokens: int, completions: Sequence[Completion]) -> Usage:
    """Tokens read and sampled."""
    sampled = sum(len(completion.ids) for completion in completions)
    return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=sampled, total_tokens=num_prompt_tokens + sampled)


def finish_reason(completion: Completion) -> FinishReason:
    """OpenAI's word, and vLLM's for what was aborted."""
    return _FINISH[completion.stop_reason]


def logprobs_of(completion: Completion) -> list[float | None]:
    """Log-probabilities as JSON can hold them; None for one that is not finite."""
    return [value if math.isfinite(value) else None for value in completion.logprobs.tolist()]


def text_before(completion: Completion, stops: Sequence[str]) -> str:
    """The text up to the stop text that ended it, which OpenAI leaves out; the ids hold it."""
    found = [at for stop in stops if (at := completion.text.find(stop)) >= 0]
    return completion.text[: min(found)] if found and completion.stop_reason == "stop" else completion.text
