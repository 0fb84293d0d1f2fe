"""Completions that repeat themselves without an end are read in a time that grows with their length."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_data._chat.thoughts import _closes
from offbeat_data._environments.tools import read_tool_calls, without_tool_calls
from offbeat_data._scoring.answers import as_latex, last_in_tag
from offbeat_data._scoring.code.code import program_of

NUM = 200_000
DEADLINE_S = 20.0
"""A machine that is busy takes a second; the square of NUM takes hours."""


@pytest.mark.parametrize(
    ("read", "text"),
    [
        pytest.param(lambda text: last_in_tag(text, "answer"), "<answer>" * NUM, id="tags"),
        pytest.param(read_tool_calls, "<tool_call>" * NUM, id="calls"),
        pytest.param(without_tool_calls, "<tool_call>" * NUM, id="calls left out"),
        pytest.param(program_of, "```" + " " * NUM + "x", id="blanks after a fence"),
        pytest.param(program_of, "```python" + "\t" * NUM + "x", id="blanks after its language"),
        pytest.param(program_of, "```\n" * NUM, id="fences"),
        pytest.param(as_latex, " " * NUM + "x", id="blanks before a degree"),
        pytest.param(lambda text: _closes({"role": "assistant", "content": text}), "</" + "think" * NUM, id="thoughts"),
    ],
)
def test_repetitions_take_time_by_their_length(read: Callable[[str], Any], text: str) -> None:
    started_s = time.monotonic()
    read(text)
    assert time.monotonic() - started_s < DEADLINE_S


PIECES = st.lists(st.sampled_from(["<answer>", "</answer>", "<tool_call>", "</tool_call>", "x", "\n", " ", "<"]))


@given(PIECES)
def test_marks_are_found_as_by_a_regular_expression(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_in_tag(text, "answer") == (found[-1].strip() if found else None)
    pattern = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)
    assert len(read_tool_calls(text)) == len(pattern.findall(text))
    assert without_tool_calls(text) == pattern.sub("", text).strip()


@given(st.lists(st.sampled_from(["```", "python", "py", " ", "\t", "\n", "x", "`"])))
def test_programs_are_found_as_by_the_plain_expression(pieces: list[str]) -> None:
    text = "".join(pieces)
    plain = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
    blocks = plain.findall(text)
    source = blocks[-1] if blocks else text
    assert program_of(text) == (source if source.strip() else None)
