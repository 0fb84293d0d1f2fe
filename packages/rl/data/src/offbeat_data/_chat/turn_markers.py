"""Markers of a chat template: added tokens that it writes around turns, calls and answers, declared special or not.

What a template writes is found by rendering short conversations. Every template refuses some of them: DeepSeek's wants
the arguments of a call as text and nothing said beside it, others want an object, and many know no tools at all.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from offbeat_core import DataError
from offbeat_data._chat.template import ChatTemplate, Message

_WORDS: Final = "?"
_USER: Final[Message] = {"role": "user", "content": _WORDS}
_SAID: Final[Message] = {"role": "assistant", "content": _WORDS}
_ANSWER_ROLES: Final = ("user", "tool", "ipython", "function", "observation")
_CALL_IDS: Final = ("call00001", "call00002")
"""Mistral's templates want nine characters."""
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": _WORDS,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": _WORDS}},
                "required": ["a"],
            },
        },
    }
]
_IN_BRACKETS: Final = re.compile(r"[<\[(|｜].*\w.*[>\])|｜]", re.DOTALL)
"""The form of markers. Instructions about tools are long, and other added tokens that they hold may be plain words."""


def find_markers(template: ChatTemplate, added: Iterable[str]) -> frozenset[str]:
    """Return the texts of added tokens that are markers of a template.

    Tags of thoughts are none, and tags of calls are none where the template's own instructions name them (Qwen's
    `<tool_call>`): the instructions of rows and agents name them too, and close no turn by that.
    """
    openings = _rendered(template, _openings(), tools=False)
    instructed = _rendered(template, _openings(), tools=True)
    called = _rendered(template, _calls(), tools=False)
    answered = "".join(_rendered(template, _answers(), tools=tools) for tools in (False, True))
    written = f"{called}{instructed}{answered}"

    def is_marker(text: str) -> bool:
        if not text.strip() or "think" in text.lower():
            return False
        is_named = text in instructed and text in called
        return text in openings or (text in written and not is_named and _IN_BRACKETS.fullmatch(text) is not None)

    return frozenset(filter(is_marker, added))


def _rendered(template: ChatTemplate, conversations: Iterable[Sequence[Message]], *, tools: bool) -> str:
    """Return all texts of the conversations that the template takes."""
    texts = []
    options: dict[str, Any] = {"tools": _TOOLS} if tools else {}
    for messages in conversations:
        waits = messages[-1]["role"] != "assistant"
        with suppress(DataError):
            texts.append(template.render(messages, add_generation_prompt=waits, options=options).text)
    return "\n".join(texts)


def _openings() -> Iterator[Sequence[Message]]:
    user = {"role": "user", "content": ""}
    yield [user]
    yield [{"role": "system", "content": ""}, user]


def _calls() -> Iterator[Sequence[Message]]:
    """Two calls at once: templates join them by markers too."""
    for arguments in ({"a": _WORDS}, f'{{"a": "{_WORDS}"}}'):
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": call_id, "type": "function", "function": function} for call_id in _CALL_IDS]
        for content in (_WORDS, "", None):
            yield [_USER, {"role": "assistant", "content": content, "tool_calls": calls}]


def _answers() -> Iterator[Sequence[Message]]:
    """Turns without calls and with them, what follows them, and the turn after that, which closes it in some."""
    for role in _ANSWER_ROLES:
        answered = [_USER, _SAID, {"role": role, "content": _WORDS}]
        yield answered
        yield [*answered, _SAID]
    for call in _calls():
        results = [{"role": "tool", "name": "f", "tool_call_id": each, "content": _WORDS} for each in _CALL_IDS]
        yield [*call, *results]
        yield [*call, *results, _SAID]
