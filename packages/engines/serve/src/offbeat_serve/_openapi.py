"""/openapi.json, made of the types that requests are decoded with and answers are built of.

Source: https://spec.openapis.org/oas/v3.2.0 (itemSchema of event streams); https://jcristharif.com/msgspec/jsonschema.html
"""

from importlib.metadata import version
from typing import Any, Final

import msgspec

from offbeat_serve._answers import ChatAnswer, CompletionAnswer, HealthAnswer, ModelList
from offbeat_serve._requests import LOWEST_TEMPERATURE, ONE_VALUE, RequestTypes
from offbeat_serve._settings import ErrorAnswer, ServedModel, ServeSettings

_JSON: Final = "application/json"
_ERRORS: Final = {
    "400": "The request is wrong: `message` says what is, `param` where.",
    "401": "The token is missing or wrong.",
    "403": "The Host header names another machine.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too long.",
    "415": "The body is no application/json.",
    "429": "Too many samples are in flight: try again later.",
    "500": "Our bug, or the engine's.",
    "503": "The engine cannot serve now, or the server closes.",
    "504": "The engine did not finish in time.",
}


def describe(
    model: ServedModel, settings: ServeSettings, types: RequestTypes, *, reads_tools: bool, needs_token: bool
) -> dict[str, Any]:
    """Describe the server in OpenAPI.

    Args:
        model: served.
        settings: of the server.
        types: of the requests, with the bounds of this model and these settings.
        reads_tools: whether the model's chat template has a place for tools.
        needs_token: whether requests must bring the token.
    """
    requests, answers = [types.completion, types.chat], [CompletionAnswer, ChatAnswer]
    all_types = [*requests, *answers, ModelList, HealthAnswer, ErrorAnswer]
    refs, components = msgspec.json.schema_components(all_types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(all_types, refs, strict=True))
    _add_manual_checks(components, settings, model.max_model_len)
    if not reads_tools:
        components["ChatRequest"]["anyOf"] = _NO_CALLS
    access = "401" if needs_token else "403"

    def answered(schema: Any, *errors: str, stream: bool = False) -> dict[str, Any]:
        content = {_JSON: {"schema": schema}} | ({"text/event-stream": {"itemSchema": _EVENT}} if stream else {})
        good = {"description": "The answer.", "content": content, "headers": {"X-Policy-Version": _VERSION_HEADER}}
        return {"200": good} | {status: _error(status, by_type[ErrorAnswer]) for status in (access, *errors)}

    def sampling(request: Any, answer: Any, summary: str) -> dict[str, Any]:
        body = {"required": True, "content": {_JSON: {"schema": by_type[request]}}}
        errors = ("400", "404", "408", "413", "415", "429", "500", "503", "504")
        return {"summary": summary, "requestBody": body, "responses": answered(by_type[answer], *errors, stream=True)}

    paths = {
        "/health": {"get": {"summary": "The engine's counters", "responses": answered(by_type[HealthAnswer], "504")}},
        "/v1/models": {"get": {"summary": "The model served", "responses": answered(by_type[ModelList], "504")}},
        "/v1/completions": {"post": sampling(types.completion, CompletionAnswer, "Complete prompts, texts or ids")},
        "/v1/chat/completions": {"post": sampling(types.chat, ChatAnswer, "Take the next turn of a conversation")},
    }
    info = {"title": f"offbeat-serve: {model.name}", "version": version("offbeat-serve")}
    described: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


_VERSION_HEADER: Final = {
    "description": "The policy version that is served now.",
    "required": True,
    "schema": {"type": "integer", "minimum": 0},
}


_EVENT: Final = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as OpenAI has it, in JSON; [DONE] in the last."}},
    "required": ["data"],
}


_NO_CALLS: Final = [
    {"properties": {"tools": {"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}}},
    {"properties": {"tool_choice": {"const": "none"}}, "required": ["tool_choice"]},
]
"""Bounds of a chat whose template has no place for tools: no tools, or none that may be called."""


def _error(status: str, schema: Any) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {_JSON: {"schema": schema}}}


def _add_manual_checks(components: dict[str, Any], settings: ServeSettings, max_model_len: int) -> None:
    """Add the checks made by hand.

    Prompts are of one kind; temperatures next to 0, one of two truth values and more tokens than the context has are
    refused.
    """
    text, many = components["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    kinds: list[dict[str, Any]] = many["items"]["anyOf"]
    token, texts, ids = (
        next(kind for kind in kinds if kind["type"] == name) for name in ("integer", "string", "array")
    )
    some = {"type": "array", "minItems": 1, "maxItems": settings.max_prompts}
    prompts = [text, many | {"items": token}, some | {"items": texts}, some | {"items": ids}]
    components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": prompts}
    for name, served in ONE_VALUE.items():
        described = components["ChatRequest"]["properties"][name]["anyOf"]
        described[0] = {"const": served} | {key: text for key, text in described[0].items() if key == "description"}
    temperature = [{"const": 0}, {"type": "number", "minimum": LOWEST_TEMPERATURE}, {"type": "null"}]
    for name in ("CompletionRequest", "ChatRequest"):
        components[name]["properties"]["temperature"] = {"anyOf": temperature, "default": None}
    for name, field in [
        ("CompletionRequest", "max_tokens"),
        ("ChatRequest", "max_tokens"),
        ("ChatRequest", "max_completion_tokens"),
    ]:
        components[name]["properties"][field]["anyOf"][0]["maximum"] = max_model_len
