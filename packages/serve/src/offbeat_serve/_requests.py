"""What clients may ask: typed, so that what is not served is refused by name, and so that /openapi.json is true.

The types are OpenAI's, with `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`, `add_special_tokens`,
`chat_template_kwargs` and `return_token_ids` as vLLM has them. Fields of OpenAI's that no rollout engine could honour
are known only with the value that changes nothing.

Source: https://platform.openai.com/docs/api-reference/completions/create and .../chat/create;
vllm 0.32, vllm/entrypoints/openai/{completion,chat_completion}/protocol.py
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from offbeat_serve._refusals import RefusedError
from offbeat_serve._settings import ServedModel, ServeSettings
from offbeat_types import SamplingParams

LOWEST_TEMPERATURE: Final = 0.01
"""But for 0, which is greedy: logits divided by less leave the range of float32."""
LARGEST_SEED: Final = 2**53 - 1
"""Integers up to here are exact in JSON."""
MAX_STOPS: Final = 16
COMPLETION_TOKENS: Final = 16
"""OpenAI's default of /v1/completions."""

ONE_VALUE: Final = {"parallel_tool_calls": True, "store": False}
"""Fields of chats that are known with the value that changes nothing."""

Neutral = Annotated[float, Meta(ge=0, le=0, description="Not served: 0 only.")] | None
Text = Annotated[str, Meta(min_length=1)]


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without unknown fields."""


class StreamOptions(_Request, kw_only=True):
    """What a stream holds besides."""

    include_usage: bool | None = None


class SamplingRequest(_Request, kw_only=True):
    """What completions and chats have in common."""

    model: Annotated[str, Meta(description="As /v1/models names it; may be left out.")] | None = None
    n: int | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="At most what is left of the model's context.")] | None = None
    temperature: float | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: no limit.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Meta(ge=0, le=LARGEST_SEED, description="Sample i draws with seed + i.")] | None = None
    stream: Annotated[bool, Meta(description="Tokens come as they are sampled; with tools, at the end.")] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool, Meta(description="Add the ids of prompt and samples.")] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0, description="Not served: empty only.")] | None = None
    presence_penalty: Neutral = None
    frequency_penalty: Neutral = None
    user: str | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether calls are looked for in what is sampled."""
        return False

    @property
    def num_samples(self) -> int:
        """Samples of one prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a sample."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How to sample.

        Args:
            max_tokens: longest completion.

        Raises:
            RefusedError: a temperature that is next to 0.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        if not (temperature == 0 or temperature >= LOWEST_TEMPERATURE):
            needed = f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}: got {temperature:g}"
            raise RefusedError(HTTPStatus.BAD_REQUEST, needed, param="temperature")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
        )


class CompletionRequest(SamplingRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: (
        Annotated[int, Meta(ge=0, le=1, description="Of the sampled tokens alone; others are not known.")] | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="Put the tokenizer's bos or eos around a text.")] | None = None

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
        """Each prompt, as text or as ids.

        Raises:
            RefusedError: prompts of several kinds, or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [cast(list[int], self.prompt)]
        if len({type(item) for item in self.prompt}) > 1:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "prompts must be all texts or all lists of ids", param="prompt")
        if len(self.prompt) > max_prompts:
            needed = f"a request may have {max_prompts} prompts at most: got {len(self.prompt)}; send several requests"
            raise RefusedError(HTTPStatus.BAD_REQUEST, needed, param="prompt")
        return cast("list[str | list[int]]", self.prompt)


class FunctionCall(_Request, kw_only=True):
    """A call that the model made earlier."""

    name: str
    arguments: Annotated[str, Meta(description="A JSON object, as text.")] = "{}"


class ToolCall(_Request, kw_only=True):
    """A call that the model made earlier."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class TextPart(_Request, kw_only=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Request, kw_only=True):
    """One message. An assistant's may be sent back as it was answered: its `token_ids` are then used as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    token_ids: list[int] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @property
    def was_sampled(self) -> bool:
        """Whether it brings the tokens that the model sampled."""
        return self.role == "assistant" and self.token_ids is not None


class ToolFunction(_Request, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="A JSON schema.")] | None = None
    strict: bool | None = None


class Tool(_Request, kw_only=True):
    """A tool that the model may call."""

    function: ToolFunction
    type: Literal["function"] = "function"


class ResponseFormat(_Request, kw_only=True):
    """Text only: no engine is asked to hold its samples to a grammar."""

    type: Literal["text"] = "text"


class ChatRequest(SamplingRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, description="OpenAI's newer name of max_tokens.")] | None = None
    logprobs: Annotated[bool, Meta(description="Of the sampled tokens.")] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0, description="Those of other tokens are not known.")] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="Calls are not held to one: true only.")] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the chat template.")] | None = None
    store: Annotated[bool, Meta(description="Nothing is stored: false only.")] | None = None
    metadata: Annotated[dict[str, str], Meta(description="Of what is stored, so of nothing.")] | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether calls are looked for in what is sampled."""
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        """Refuse what types cannot.

        Raises:
            RefusedError: a field that is served with one value only has the other.
        """
        for name, served in ONE_VALUE.items():
            if getattr(self, name) not in (None, served):
                text = str(served).lower()
                message = f"{name} must be {text} or left out: nothing else is served"
                raise RefusedError(HTTPStatus.BAD_REQUEST, message, param=name)


@dataclass(frozen=True)
class RequestTypes:
    """The types of request bodies with the bounds that one model and one server set."""

    completion: type[CompletionRequest]
    chat: type[ChatRequest]


def bounded_types(model: ServedModel, settings: ServeSettings) -> RequestTypes:
    """Request types whose ids are of the model's vocabulary, and whose n is served.

    They check what is decoded and describe it in /openapi.json, so that the two cannot differ.
    """
    token: Any = Annotated[int, Meta(ge=0, le=model.vocab_size - 1)]
    prompt_ids: Any = Annotated[list[token], Meta(min_length=1, max_length=model.max_model_len - 1)]
    many: Any = Annotated[list[token | Text | prompt_ids], Meta(min_length=1, max_length=model.max_model_len - 1)]
    shared: list[Any] = [
        ("n", Annotated[int, Meta(ge=1, le=settings.max_samples)] | None, None),
        ("stop_token_ids", Annotated[list[token], Meta(max_length=MAX_STOPS)] | None, None),
    ]
    turn_ids: Any = Annotated[
        list[token], Meta(max_length=model.max_model_len, description="Of a sampled turn, as it was answered.")
    ]
    message: Any = msgspec.defstruct("ChatMessage", [("token_ids", turn_ids | None, None)], bases=(ChatMessage,))
    messages: Any = Annotated[list[message], Meta(min_length=1)]
    return RequestTypes(
        completion=_subtype(CompletionRequest, [*shared, ("prompt", Text | many)]),
        chat=_subtype(ChatRequest, [*shared, ("messages", messages)]),
    )


def _subtype(base: Any, changed: list[Any]) -> Any:
    return msgspec.defstruct(base.__name__, changed, bases=(base,), kw_only=True)
