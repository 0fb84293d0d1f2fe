"""Answers with thoughts, under chat templates whose generation prompt opens the thought.

Under such a template a model samples "...</think> answer", without the opening tag, which is in its prompt. The same
text in a data set would be taken for an answer without a thought: templates look for both tags.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from offbeat_core import DataError
from offbeat_data._chat.template import ChatTemplate, Message

_NAME: Final = r"[\w:|]{0,40}think[\w:|]{0,40}"  # bounded: of words without an end, each part would be tried
_OPENS: Final = re.compile(rf"([<\[◁])({_NAME})([>\]▷])\s*\Z", re.IGNORECASE)
_CLOSES: Final = re.compile(rf"[<\[◁]/{_NAME}[>\]▷]", re.IGNORECASE)


def open_thoughts(
    template: ChatTemplate, messages: Sequence[Message], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return messages whose thoughts have their opening tag, where the generation prompt of the template writes it."""
    mended = [dict(message) for message in messages]
    closing = [at for at, message in enumerate(messages) if _closes(message)]
    if not closing:
        return mended
    before = messages[: closing[0]] or [{"role": "user", "content": "?"}]
    opening = template.render(before, add_generation_prompt=True, options=options).text
    tags = _find_tags(opening)
    if tags is None:
        return mended
    for at in closing:
        content = mended[at]["content"]
        if tags[1] in content and tags[0].strip() not in content:
            mended[at]["content"] = tags[0] + content
    return mended


def check_thoughts(opening: str, added: str, message: Message, number: int) -> None:
    """Refuse a turn that a template has put an empty thought before, with the thought in the answer.

    Args:
        opening: the conversation up to the turn, with the generation prompt.
        added: what the turn adds to it.
        message: the turn.
        number: of the message, for people.
    """
    tags = _find_tags(opening)
    if not tags or not _closes(message) or added.count(tags[1]) <= message["content"].count(tags[1]):
        return
    raise DataError(
        f"message {number}: the chat template adds a thought of its own before the one of the message, because it does "
        f"not find the tags {tags[0].strip()} and {tags[1]}: give the thought as the template reads it (often in "
        "reasoning_content)"
    )


def _find_tags(opening: str) -> tuple[str, str] | None:
    """Return the tag that ends a generation prompt, with the white space after it, and the one that closes it."""
    found = _OPENS.search(opening)
    return (found.group(), f"{found[1]}/{found[2]}{found[3]}") if found else None


def _closes(message: Message) -> bool:
    content = message.get("content")
    return message["role"] == "assistant" and isinstance(content, str) and bool(_CLOSES.search(content))
