"""Requests of clients: typed, so that what is not served is refused by name, and so that /openapi.json is true.

The types are OpenAI's, with `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`, `add_special_tokens`,
`chat_template_kwargs` and `return_token_ids` as vLLM has them. Fields of OpenAI's that no rollout engine could honour
are known only with the value that changes nothing. What the model sampled in an earlier turn goes into the prompt as
the tokens that it sampled.

Source: https://platform.openai.com/docs/api-reference/completions/create and .../chat/create;
vllm 0.32, vllm/entrypoints/openai/{completion,chat_completion}/protocol.py

Legend: P prompt tokens.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request

from offbeat_core import Ids, SamplingParams
from offbeat_data import DataConfig, Message, Tokenizer, TurnTemplate, escape_messages, escape_tools
from offbeat_serve._settings import RefusedError, ServedModel, ServeSettings

LOWEST_TEMPERATURE: Final = 0.01
"""But for 0, which is greedy: logits divided by less leave the range of float32."""
LARGEST_SEED: Final = 2**53 - 1
"""Integers up to here are exact in JSON."""
MAX_STOPS: Final = 16
COMPLETION_TOKENS: Final = 16
"""OpenAI's default of /v1/completions."""

_SET_HERE: Final = ("messages", "add_generation_prompt")
"""Variables of the chat template that a request cannot choose."""
ONE_VALUE: Final = {"parallel_tool_calls": True, "store": False}
"""Fields of chats that are known with the value that changes nothing."""

NOT_SERVED: Final = {
    "presence_penalty": "must be 0 or left out: no rollout engine applies penalties",
    "frequency_penalty": "must be 0 or left out: no rollout engine applies penalties",
    "logit_bias": "must be {} or left out: no rollout engine applies biases",
    "response_format": 'must be {"type": "text"} or left out: no engine holds its samples to JSON or to a schema',
    "tool_choice": 'must be "auto", "none" or left out: no engine makes its samples call a tool',
    "top_logprobs": "must be 0 or left out: rollout engines know the log-probabilities of sampled tokens alone",
    "modalities": 'must be ["text"] or left out: no engine answers anything else',
}
"""Fields of OpenAI's whose other values no engine could honour, and what to say then."""

Neutral = Annotated[float, Meta(ge=0, le=0, description="Not served: 0 only.")] | None
Text = Annotated[str, Meta(min_length=1)]


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without unknown fields."""


class StreamOptions(_Request, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None


class SamplingRequest(_Request, kw_only=True):
    """Fields that completions and chats have in common."""

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
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def calls_tools(self) -> bool:
        return False

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_length(self, limit: int) -> None:
        """Refuse to sample more than the model's context of `limit` tokens holds."""
        for name in ("max_tokens", "max_completion_tokens"):
            if (asked := getattr(self, name, None) or 0) > limit:
                needed = f"{name} must be at most {limit}, the model's context: got {asked}; ask for fewer"
                raise RefusedError(HTTPStatus.BAD_REQUEST, needed, param=name)

    def sampling(self, max_tokens: int) -> SamplingParams:
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
    add_special_tokens: Annotated[bool, Meta(description="Put the tokenizer's bos before a text.")] | None = None

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
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
    index: Annotated[int, Meta(ge=0, description="Of a call put together from a stream.")] | None = None
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
        """Return whether it brings the tokens that the model sampled."""
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
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1, description="Text only.")] | None = None

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template, the tools among them."""
        tools = {"tools": [_plain(tool) for tool in self.tools or ()]} if self.calls_tools else {}
        return {**(self.chat_template_kwargs or {}), **tools}

    def check(self, tokenizer: Tokenizer) -> None:
        if self.calls_tools and "tools" not in tokenizer.require_template().variables:
            message = (
                "the model's chat template has no place for tools, so that the model would never see them; leave tools "
                "out, or serve a model whose template reads them"
            )
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, param="tools")
        if given := [name for name in _SET_HERE if name in (self.chat_template_kwargs or {})]:
            message = f"chat_template_kwargs: {', '.join(given)} is not served: the server sets it"
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, param="chat_template_kwargs")
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


T = TypeVar("T")
InThread: TypeAlias = Callable[[Callable[[], T]], Awaitable[T]]
_AT_FIELD: Final = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(\w+)`")


LARGE_BODY_BYTES: Final = 1 << 16
"""A longer body is decoded in the encoding thread: whole numbers written as 1.0 take a second per few megabytes."""


async def read_json(
    request: Request, decoder: "msgspec.json.Decoder[T]", settings: ServeSettings, in_thread: InThread[T]
) -> T:
    """Read and decode the body of a request.

    Args:
        request: whose body has not been read.
        decoder: of its type.
        settings: bounds of a body.
        in_thread: runs a function beside the loop.

    Raises:
        RefusedError: it is no JSON, does not fit its type, is too long, comes too slowly, or too many long ones wait.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site may send a browser here with any other type, without asking first.
        message = f"the body must come with Content-Type: application/json, got {media_type[:80]!r}"
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    body = await _read(request, settings)
    if len(body) > LARGE_BODY_BYTES:
        return await in_thread(partial(_decode, body, decoder))
    return _decode(body, decoder)


async def _read(request: Request, settings: ServeSettings) -> bytes:
    limit, body = settings.max_body_bytes, bytearray()
    announced = request.headers.get("content-length", "")
    too_long = RefusedError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have {limit} bytes at most (max_body_bytes)"
    )
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise too_long
    try:
        async with asyncio.timeout(settings.body_deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        message = f"the body did not come within {settings.body_deadline_s:g} s (body_deadline_s)"
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, message) from None
    return bytes(body)


def _decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            value: T = msgspec.convert(_with_integers(msgspec.json.decode(body)), decoder.type)
            return value
    except msgspec.ValidationError as error:
        raise _refusal(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error


def _with_integers(value: Any) -> Any:
    """Return the same with 1.0 as 1: in JSON, and to JSON Schema, they are one number, and to msgspec they are not."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(item) for item in value]
        case dict():
            return {key: _with_integers(item) for key, item in value.items()}
    return value


def _refusal(error: msgspec.ValidationError) -> RefusedError:
    """Return what msgspec says, and which field it is about."""
    found, unknown = _AT_FIELD.search(str(error)), _UNKNOWN_FIELD.search(str(error))
    param = ".".join(filter(None, (found and found[1], unknown and unknown[1])))
    field = re.split(r"[.\[]", param)[0]
    if needed := NOT_SERVED.get(field):
        return RefusedError(HTTPStatus.BAD_REQUEST, f"{field} {needed}", param=field)
    advice = "; this server does not serve it" if unknown else ""
    return RefusedError(HTTPStatus.BAD_REQUEST, f"{error}{advice}", param=param or None)


_PASSED_ON: Final = ("name", "tool_call_id", "reasoning_content")


def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer, asked: Sequence[str | list[int]]) -> list[Ids]:
    prompts = []
    for prompt in asked:
        if isinstance(prompt, str):
            is_bare = request.add_special_tokens is False
            prompts += (
                tokenizer.encode([prompt], add_special_tokens=False) if is_bare else tokenizer.encode_prompts([prompt])
            )
        else:
            prompts.append(np.array(prompt, np.int32))
    return prompts


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer) -> Ids:
    """Return the conversation up to where the model speaks, [P] int32.

    Messages are rendered by the chat template up to the first turn that brings its `token_ids`. From there on the
    prompt grows by tokens: those of the turn as they were sampled, then those of the messages that answer it. Control
    tokens written in what others than the assistant say are text, as in the prompts of a data set.
    """
    messages, options = request.messages, escape_tools(tokenizer, request.template_options)
    start = next((at for at, message in enumerate(messages) if message.was_sampled), len(messages))
    opening = escape_messages(tokenizer, [template_message(message) for message in messages[:start]])
    rendered = tokenizer.require_template().render(opening, add_generation_prompt=True, options=options)
    parts = tokenizer.encode([rendered.text], add_special_tokens=False)
    if start < len(messages):
        turns = turn_template(tokenizer, options)
        for said, replies in _turns(messages, start):
            parts += [said, turns.reply_ids(said, replies)] if replies else [said]
    return np.concatenate(parts)


def turn_template(tokenizer: Tokenizer, options: Mapping[str, Any]) -> TurnTemplate:
    """Makes the tokens that follow a sampled turn of a conversation with these variables of the chat template."""
    # Its other settings, a path among them, are about reading data sets.
    return TurnTemplate(tokenizer, DataConfig(path="", chat_template="on", template_options=dict(options)))


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
            turns[-1][1].append(template_message(message))
    return turns


def template_message(message: ChatMessage) -> Message:
    """Return a message as chat templates know it: the content a text, arguments of calls as objects."""
    plain: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    plain |= {name: value for name in _PASSED_ON if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return plain


def message_text(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _template_call(call: ToolCall) -> Mapping[str, Any]:
    plain: dict[str, Any] = _plain(call)
    plain.pop("index", None)
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
