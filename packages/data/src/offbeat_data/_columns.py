"""Columns of a row, and the chat messages they hold.

A name may lead into the objects that a row holds: `reward_model.ground_truth` is the part `ground_truth` of the column
`reward_model`, unless a column has that very name.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from offbeat_data._files import Row
from offbeat_types import DataError

TOOLS: Final = "tools"


def has_column(row: Row, column: str) -> bool:
    """Whether a row has a column, or a part of one, of that name; it may be null."""
    return _locate(row, column) is not None


def find_column(row: Row, column: str) -> Any:
    """The value of a column or of a part of one; None when there is none, or a number that is none."""
    found = _locate(row, column)
    value = found and found[0][found[1]]
    return None if isinstance(value, float) and math.isnan(value) else value


def require_column(row: Row, column: str, setting: str, number: int, source: str) -> Any:
    """The value of `column` in row `number`.

    Raises:
        DataError: no such column (with the nearest names), or no value in this row.
    """
    if not has_column(row, column):
        names = list(_names(row))
        near = difflib.get_close_matches(column, names, n=3, cutoff=0.4)
        advice = f"; set data.{setting} to one of them" + (f", perhaps {', '.join(near)}" if near else "")
        raise DataError(f"{source}, row {number}: no column {column!r}, it has {', '.join(names) or 'none'}{advice}")
    value = find_column(row, column)
    if value is None:
        raise DataError(
            f"{source}, row {number}: column {column!r} (data.{setting}) is null; fill it in or drop the row"
        )
    return value


def _locate(row: Row, column: str) -> tuple[Row, str] | None:
    """The object that holds it, and its key there."""
    if column in row:
        return row, column
    outer, _, inner = column.partition(".")
    part = row.get(outer)
    return _locate(part, inner) if inner and isinstance(part, dict) else None


def _names(row: Row) -> Iterator[str]:
    """All columns, each followed by its parts."""
    for column, value in row.items():
        yield column
        if isinstance(value, dict):
            yield from (f"{column}.{part}" for part in _names(value))


def as_text(value: Any) -> str:
    """A text as it is; any other value as JSON, so that 18 is "18" and [1, 2] is "[1, 2]"."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_messages(value: Any, number: int, source: str) -> list[dict[str, Any]]:
    """A list of chat messages, with the empty keys that columnar files put into each left out.

    A turn that calls tools may come without content.

    Raises:
        DataError: it is not a list of objects with `role`, and `content` or `tool_calls`.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{source}, row {number}: chat messages must be a list of at least one, got {value!r:.80}")
    for message in value:
        speaks = isinstance(message, dict) and ("content" in message or message.get("tool_calls"))
        if not speaks or not isinstance(message.get("role"), str):
            raise DataError(f"{source}, row {number}: a chat message needs role and content, got {message!r:.80}")
    return [{key: item for key, item in message.items() if item is not None or key == "content"} for message in value]


def with_tools(row: Row, options: Mapping[str, Any], number: int, source: str) -> Mapping[str, Any]:
    """Variables of the chat template, with the tools of the row's column `tools`, if it has some.

    Raises:
        DataError: they are neither a list nor a list in JSON.
    """
    tools = row.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = {}
    if not tools and not isinstance(tools, dict):
        return options
    if not isinstance(tools, list):
        raise DataError(
            f"{source}, row {number}: column tools must be a list of function schemas, or one in JSON, got "
            f"{row[TOOLS]!r:.80}; mend it, or rename a column that is something else"
        )
    return {"tools": tools, **options}


def with_system(messages: list[dict[str, Any]], system_prompt: str) -> list[dict[str, Any]]:
    """Put the system prompt first, unless the conversation has one of its own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
