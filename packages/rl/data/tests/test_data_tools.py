"""A model calls tools in its text: what is read, what is answered, and what a calculator computes."""

import asyncio
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import ConfigError, DataError
from offbeat_data import Prompt, ToolCall, ToolEnvironment, calculate, calculator, read_tool_calls

PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?")


def say(environment, text):
    async def episode():
        await environment.reset(PROMPT)
        answers = await environment.step(text)
        assert await environment.reward() is None  # the reward section judges the last turn
        await environment.close()
        return None if answers is None else [answer["content"] for answer in answers]

    return asyncio.run(episode())


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("473*856", "404888"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*-4", "-20"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("6/3", "2"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@given(
    a=st.integers(-(10**9), 10**9),
    b=st.integers(-(10**9), 10**9),
    sign=st.sampled_from(["+", "-", "*", "//", "%", "/"]),
)
def test_the_calculator_agrees_with_python(a, b, sign):
    if not b and sign in ("//", "%", "/"):
        with pytest.raises(DataError, match="division by zero"):
            calculate(f"({a}){sign}({b})")
    elif sign == "/":
        assert float(calculate(f"({a})/({b})")) == pytest.approx(float(Fraction(a, b)), rel=1e-9)
    else:
        assert calculate(f"({a}){sign}({b})") == str(eval(f"({a}){sign}({b})"))


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "cannot read"),
        ("2+", "cannot read"),
        ("x+1", "cannot read"),
        ("__import__('os').system('true')", "cannot read"),
        ("True + 1", "cannot read"),
        ("'a'*3", "cannot read"),
        ("(" * 99 + ")" * 98, "cannot read"),
        ("9**9**9", "exponent"),
        ("2**0.5", "exponent"),
        ("9**64", "too large"),
        ("1e30*1e30", "too large"),
        ("1e999", "cannot read"),
        ("1" * 201, "200 characters"),
    ],
)
def test_the_calculator_refuses_the_rest_at_once(expression, complaint):
    begun_s = time.monotonic()
    with pytest.raises(DataError, match=complaint):
        calculate(expression)
    assert time.monotonic() - begun_s < 5  # 9**9**9 would take days


def test_calls_are_read_as_chat_models_write_them():
    text = "Let me see.\n" + call("add", '{"a": 1}') + " and " + call("stop", "{}")
    assert read_tool_calls(text) == [ToolCall(name="add", arguments={"a": 1}), ToolCall(name="stop")]
    assert read_tool_calls("no call <tool_call> here") == []


def test_tools_are_called_and_answer_one_by_one():
    async def slow(word):
        await asyncio.sleep(0)
        return {"word": word}

    environment = ToolEnvironment({"add": lambda a, b: a + b, "slow": slow})
    assert say(environment, call("add", '{"a": 1, "b": 2}') + call("slow", '{"word": "hé"}')) == [
        "3",
        '{"word": "hé"}',
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("subtract", "{}"), "error: there is no tool subtract; there are add"),
        ("<tool_call>{</tool_call>", "error: a tool call must be a JSON object"),
        ("<tool_call>[1]</tool_call>", 'error: a tool call must be a JSON object with "name"'),
        (call("add", "[1]"), 'error: "arguments" must be a JSON object'),
        (call("add", '{"a": 1}'), "error: "),
        (call("add", '{"a": 1, "b": "x"}'), "error: unsupported operand"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(text, answer):
    answers = say(ToolEnvironment({"add": lambda a, b: a + b}), text)
    assert answers is not None
    assert answers[0].startswith(answer)


def test_a_turn_without_a_call_is_the_answer():
    assert say(calculator(), "It is 12.") is None


def test_the_calculator_is_called_in_either_form():
    assert say(calculator(), call("calculator", '{"expression": "4*3"}')) == ["12"]
    assert say(calculator(r"\[(.*?)\]"), "[4*3] or [5*5]") == ["12", "25"]
    assert say(calculator(r"\[(.*?)\]"), "[4*]") == [
        "error: cannot read '4*': numbers, + - * / // % ** and parentheses are known"
    ]


@pytest.mark.parametrize(("pattern", "text"), [("(", "not a regular expression"), ("a", "needs a group")])
def test_a_pattern_that_finds_no_expression_is_refused(pattern, text):
    with pytest.raises(ConfigError, match=text):
        calculator(pattern)


def test_half_a_character_in_a_call_is_told_to_the_model() -> None:
    [call] = read_tool_calls('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')
    assert "surrogates not allowed" in call.complaint
