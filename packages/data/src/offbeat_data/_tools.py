"""Tools that a model calls in its text: read its calls, run them, tell it what they gave.

Source of the call format: Qwen3's and Hermes' chat templates, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat_data._chat_template import Message
from offbeat_data._columns import as_text
from offbeat_data._prompts import Prompt
from offbeat_data._reward import RewardScore

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it.

    Args:
        name: of the tool.
        arguments: by name.
        complaint: why it cannot be read; empty for one that can.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    complaint: str = ""


def read_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order; none when the model calls no tool."""
    return [_read_call(found) for found in _CALL.findall(text)]


def without_tool_calls(text: str) -> str:
    """What a turn says beside its calls."""
    return _CALL.sub("", text).strip()


def _read_call(found: str) -> ToolCall:
    try:
        call = json.loads(found)
    except (ValueError, RecursionError) as error:
        return ToolCall(complaint=f"a tool call must be a JSON object: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(complaint='a tool call must be a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], complaint='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)


class ToolEnvironment:
    """The model may call tools; its first turn without a call is its answer, which the `reward` section scores.

    What is wrong with a call, or goes wrong in it, is told to the model.

    Args:
        tools: functions by name, async or not, called with the arguments by name. What they return is told as text.
        read_calls: finds the calls in a turn.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        read_calls: Callable[[str], Sequence[ToolCall]] = read_tool_calls,
    ) -> None:
        self._tools, self._read_calls = dict(tools), read_calls

    async def reset(self, prompt: Prompt) -> None:
        """See `Environment`."""

    async def step(self, text: str) -> Sequence[Message] | None:
        """See `Environment`."""
        calls = self._read_calls(text)
        if not calls:
            return None
        return [{"role": "tool", "name": call.name, "content": await self._answer(call)} for call in calls]

    async def reward(self) -> RewardScore | None:
        """See `Environment`."""
        return None

    async def close(self) -> None:
        """See `Environment`."""

    async def _answer(self, call: ToolCall) -> str:
        if call.complaint:
            return f"error: {call.complaint}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name}; there are {', '.join(self._tools)}"
        try:
            value = tool(**call.arguments)
            return as_text(await value if inspect.isawaitable(value) else value)
        except Exception as error:  # noqa: BLE001  whatever a tool makes of the model's arguments is the model's to mend
            return f"error: {error}"
