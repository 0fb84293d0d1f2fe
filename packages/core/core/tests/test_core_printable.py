"""Characters that a terminal would obey are written as escapes; everything that people read is left as it is."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import printable

OBEYED = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), 0x061C]
OBEYED += [*range(0x2066, 0x206A), 0xD800, 0xDFFF]


@pytest.mark.parametrize("code", OBEYED, ids=hex)
def test_control_characters_are_escaped(code: int) -> None:
    shown = printable(f"a{chr(code)}b")
    assert shown.startswith("a\\")
    assert shown.isascii()
    assert shown.isprintable()


@pytest.mark.parametrize("text", ["plain\n\ttext", "größer ¿qué?", "漢字　かな", "👩‍👩‍👧 می‌خواهم", "a\u00a0b", "עברית"])
def test_words_of_any_language_stay(text: str) -> None:
    assert printable(text) == text


def test_a_line_end_of_windows_is_one_and_a_lone_return_is_reported() -> None:
    assert printable("one\r\ntwo\rthree") == "one\ntwo\\rthree"


@given(st.text(st.characters(max_codepoint=sys.maxunicode, exclude_categories=())))
def test_nothing_that_is_obeyed_is_left_and_all_can_be_encoded(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not {chr(code) for code in OBEYED} & set(shown)
    assert printable(shown) == shown
