"""Chat templates of model folders.

Source: https://huggingface.co/docs/transformers/chat_templating (template language, `{% generation %}`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offbeat_core import DataError, ModelError

Message = Mapping[str, Any]
Span = tuple[int, int]


# Unicode noncharacters, which no text holds: they enclose generation blocks while rendering and are then removed.
_START, _END = "\ufdd0", "\ufdd1"
STAND_IN: Final = "\ufdd2"
"""Stands for the words of a turn, where what a template writes around them is wanted."""
MARKS: Final = "\ufdd0-\ufdd3"
"""All noncharacters that this package gives a meaning, as a range of a regular expression."""


DECIDED_VARIABLES: Final = ("messages", "add_generation_prompt")
"""Variables of a template that `ChatTemplate.render` sets itself."""

# A template is a program: what it computes from messages of another shape raises what Python raises.
_RAISED_BY_TEMPLATES: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(jinja2.ext.Extension):
    """Encloses the output of `{% generation %}...{% endgeneration %}` in markers."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_END}"


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation as text.

    Args:
        text: what the model reads.
        spans: character ranges [start, end) inside `{% generation %}` blocks, in order; none without such blocks.
    """

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja text.
        special_tokens: such as {"eos_token": "<|im_end|>"}, visible to the template.

    Attributes:
        variables: names that the template reads, such as "tools".
        writes_calls: whether it writes an assistant's calls of tools, as far as its text shows.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self._special_tokens = source, dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.writes_calls = "tool_calls" in source or "tojson" in source  # or a message as a whole
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}; correct it in the model folder"
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> RenderedChat:
        """Render messages.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with what opens the assistant's turn.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: the template refuses the messages.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **options}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            marked = self._template.render(variables)
        except _RAISED_BY_TEMPLATES as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
        return _split_markers(marked)


_MAX_PRODUCT: Final = 1 << 24
"""Characters or elements of a text or a list that a template multiplies."""
_MAX_EXPONENT: Final = 64


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which one operator does not fill the memory: a template comes with a model, from anywhere."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Calculate; also what is constant, which is otherwise done when the template is read."""
        if operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
            raise jinja2.TemplateRuntimeError(f"an exponent may be {_MAX_EXPONENT} at most, and is {right}")
        for count, held in ((left, right), (right, left)):
            if operator == "*" and isinstance(count, int) and isinstance(held, str | bytes | list | tuple):
                num = count * len(held)
                if num > _MAX_PRODUCT:
                    raise jinja2.TemplateRuntimeError(
                        f"a product may have {_MAX_PRODUCT} elements, and would have {num}"
                    )
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the filters and functions of transformers that every chat template expects."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    del environment.globals["lipsum"]  # any number of words of no use
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model should not read.
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _split_markers(marked: str) -> RenderedChat:
    """Remove the markers and remember where they were."""
    pieces, spans, length, start = [], [], 0, 0
    for piece in re.split(f"([{_START}{_END}])", marked):
        if piece == _START:
            start = length
        elif piece == _END:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return RenderedChat(text="".join(pieces), spans=tuple(span for span in spans if span[0] < span[1]))
