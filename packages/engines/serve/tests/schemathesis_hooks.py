"""Requests that schemathesis leaves out, because a schema cannot say that the server refuses them."""

from typing import Any

import schemathesis


@schemathesis.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """Keep a conversation unless an assistant's turn without token_ids comes after one that has them."""
    messages = body.get("messages") if isinstance(body, dict) else None
    turns = [each for each in messages if _is_turn(each)] if isinstance(messages, list) else []
    has_ids = [each.get("token_ids") is not None for each in turns]
    return has_ids == sorted(has_ids)


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
