"""Control tokens in the words of a data set: what users and tools say stays words, and such rows are counted."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from offbeat_data._chat.template import Message
from offbeat_data._sources.rows import naming_row
from offbeat_data._tokenizer import Tokenizer

_WORDS: Final = "words"
_TEXTS: Final = "texts"
_ANSWERED: Final = "answered"
_CALLS: Final = "calls"
_TOOLS: Final = "tools"
_USUAL_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_OF_OTHERS: Final = ("tools", "documents")
"""Variables of chat templates that hold words of rows, servers and clients."""


def escape_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose control tokens are words, other than the assistant's.

    What an assistant says may hold control tokens on purpose: its calls and thoughts are written with them.
    """
    return [dict(each) if each["role"] == "assistant" else escape_value(tokenizer, each) for each in messages]


def escape_value(tokenizer: Tokenizer, value: Any) -> Any:
    """Return JSON data with all its texts escaped; see `Tokenizer.escape`."""
    if isinstance(value, str):
        return tokenizer.escape(value)
    if isinstance(value, Mapping):
        return {escape_value(tokenizer, key): escape_value(tokenizer, item) for key, item in value.items()}
    return [escape_value(tokenizer, item) for item in value] if isinstance(value, list) else value


def escape_tools(tokenizer: Tokenizer, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return variables of a chat template whose `tools` and `documents` are words: others have written them."""
    words = {name: escape_value(tokenizer, options[name]) for name in _OF_OTHERS if options.get(name)}
    return {**options, **words} if words else options


def _find_control(tokenizer: Tokenizer, value: Any) -> str:
    if isinstance(value, str):
        return tokenizer.find_control(value)
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return next(filter(None, (_find_control(tokenizer, part) for part in parts)), "")


@dataclass
class _Finding:
    first: str
    example: str
    num: int = 0
    last: str = ""


class RowNotes:
    """Counts of what rows hold by accident, each with the first row and an example.

    Attributes:
        roles: messages by their role.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.roles = Counter[str]()
        self._tokenizer, self._found = tokenizer, dict[str, _Finding]()
        self._row, self._num_rows, self._num_turns = "", 0, 0

    @contextmanager
    def reading(self, source: str, number: int) -> Iterator[None]:
        """Count a row, and name it in the text of a DataError that comes of it."""
        self._row, self._num_rows = f"{source}, row {number}", self._num_rows + 1
        with naming_row(source, number):
            yield

    def words(self, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
        """Count the roles of a conversation, and look for control tokens in what the model reads of it."""
        self.roles.update(str(message["role"]) for message in messages)
        template = self._tokenizer.require_template()
        if not template.writes_calls and any(message.get("tool_calls") for message in messages):
            self._add_once(_CALLS, "")
        if options.get("tools") and "tools" not in template.variables:
            self._add_once(_TOOLS, "")
        read = [message for message in messages if message["role"] != "assistant"]
        self._look(_WORDS, [*read, *(options.get(name) for name in _OF_OTHERS)])

    def prompt(self, messages: Sequence[Message]) -> None:
        """Note a prompt that ends with the answer."""
        if messages[-1]["role"] == "assistant":
            self._add(_ANSWERED, "")

    def texts(self, *texts: str) -> None:
        """Look for control tokens in texts that no chat template is applied to."""
        self._look(_TEXTS, list(texts))

    def turns(self, num_turns: int, open_ends: Sequence[str]) -> None:
        """Count turns, and those without an end token, each by what comes in its place."""
        self._num_turns += num_turns
        for example in open_ends:
            self._add("turns", example)

    def _look(self, kind: str, value: Any) -> None:
        example = _find_control(self._tokenizer, value)
        if example:
            self._add_once(kind, example)

    def _add_once(self, kind: str, example: str) -> None:
        """Add to a count of rows, although a row may be looked at several times."""
        if kind not in self._found or self._found[kind].last != self._row:
            self._add(kind, example)

    def _add(self, kind: str, example: str) -> None:
        found = self._found.setdefault(kind, _Finding(first=self._row, example=example))
        found.num, found.last = found.num + 1, self._row

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for people."""
        says = {
            _WORDS: self._say_words,
            _TEXTS: self._say_texts,
            _ANSWERED: self._say_answered,
            _CALLS: self._say_calls,
            _TOOLS: self._say_tools,
            "turns": self._say_turns,
        }
        found = tuple(say(self._found[kind]) for kind, say in says.items() if kind in self._found)
        return (*self._unusual_roles(), *found)

    def _unusual_roles(self) -> Iterator[str]:
        if unusual := {role: number for role, number in self.roles.items() if role not in _USUAL_ROLES}:
            roles = ", ".join(f"{number} of {role!r}" for role, number in unusual.items())
            yield (
                f"messages of unusual roles: {roles}; most chat templates know {', '.join(_USUAL_ROLES)}, and leave "
                "others out or write them down as they are"
            )

    def _say_words(self, found: _Finding) -> str:
        return (
            f"{found.num} of {self._num_rows} rows hold control tokens in words that the model reads, such as "
            f"{found.example!r} (first: {found.first}): they are encoded as plain text and control nothing"
        )

    def _say_texts(self, found: _Finding) -> str:
        return (
            f"{found.num} of {self._num_rows} rows hold control tokens in texts without a chat template, such as "
            f"{found.example!r} (first: {found.first}): they stay control tokens, which is right where a template was "
            "applied to the texts already, and wrong for the words of users"
        )

    def _say_answered(self, found: _Finding) -> str:
        return (
            f"{found.num} of {self._num_rows} prompts end with a message of the assistant (first: {found.first}), and "
            "the model is asked to speak after it: a prompt is what comes before the answer"
        )

    def _say_calls(self, found: _Finding) -> str:
        return (
            f"{found.num} of {self._num_rows} rows hold calls of tools (first: {found.first}), which the chat template "
            "leaves out: use a template that writes tool_calls, or write the calls into the content"
        )

    def _say_tools(self, found: _Finding) -> str:
        return (
            f"{found.num} of {self._num_rows} rows bring tools (first: {found.first}), which the chat template does "
            "not show to the model: use a template that reads the variable tools, or describe them in a system message"
        )

    def _say_turns(self, found: _Finding) -> str:
        ends = [repr(self._tokenizer.token_text(end)) for end in sorted(self._tokenizer.end_ids)]
        stops = f"that the model stops at ({', '.join(ends)})" if ends else "to stop at: the model has no end token"
        what = f"; the chat template puts {found.example!r} there" if found.example else ""
        return (
            f"{found.num} of {self._num_turns} assistant turns end without a token {stops}{what} (first: "
            f"{found.first}), so it does not learn to stop there: name the id of the token that ends a turn under "
            "eos_token_id of generation_config.json, or let the chat template end the turns by the end token"
        )
