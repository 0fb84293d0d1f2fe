"""Columns of a row, and the chat messages they hold."""

import difflib
import json
from typing import Any

from offbeat_data._files import Row
from offbeat_types import DataError


def require_column(row: Row, column: str, setting: str, number: int, source: str) -> Any:
    """The value of `column` in row `number`.

    Raises:
        DataError: no such column (with the nearest names), or no value in this row.
    """
    if column not in row:
        near = difflib.get_close_matches(column, row, n=3, cutoff=0.4)
        advice = f"; set data.{setting} to one of them" + (f", perhaps {', '.join(near)}" if near else "")
        raise DataError(f"{source}, row {number}: no column {column!r}, it has {', '.join(row) or 'none'}{advice}")
    if row[column] is None:
        raise DataError(
            f"{source}, row {number}: column {column!r} (data.{setting}) is null; fill it in or drop the row"
        )
    return row[column]


def as_text(value: Any) -> str:
    """A text as it is; any other value as JSON, so that 18 is "18" and [1, 2] is "[1, 2]"."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_messages(value: Any, number: int, source: str) -> list[dict[str, Any]]:
    """A list of chat messages, with the empty keys that columnar files put into each left out.

    Raises:
        DataError: it is not a list of objects with `role` and `content`.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{source}, row {number}: chat messages must be a list of at least one, got {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{source}, row {number}: a chat message needs role and content, got {message!r:.80}")
    return [{key: item for key, item in message.items() if item is not None or key == "content"} for message in value]


def with_system(messages: list[dict[str, Any]], system_prompt: str) -> list[dict[str, Any]]:
    """Put the system prompt first, unless the conversation has one of its own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
