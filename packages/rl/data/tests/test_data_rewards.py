"""The score of a completion: where the answer is, when it is right, and functions of a user's own."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from offbeat_core import ConfigError, DataError
from offbeat_data import Prompt, Reward, RewardConfig, RewardError, build_reward
from offbeat_data._scoring.answers import last_boxed, last_number, to_number
from offbeat_data._scoring.votes import vote_of


def _prompt(answer: str | None = "12", **fields: Any) -> Prompt:
    return Prompt(index=7, ids=np.array([1, 2], np.int32), text="5+7=", answer=answer, fields=fields)


def _score(completion: str, answer: str | None = "12", **settings: Any) -> float:
    return build_reward(RewardConfig(**settings)).score(_prompt(answer), completion).value


@pytest.mark.parametrize(
    ("completion", "settings", "expected"),
    [
        (" 12\n", {}, 1.0),
        ("12.", {}, 0.0),
        ("so <answer>9</answer> no <answer> 12 </answer>", {"extract": "tag"}, 1.0),
        ("<final>12</final>", {"extract": "tag", "tag": "final"}, 1.0),
        ("<answer>12", {"extract": "tag"}, 0.0),
        (r"thus \boxed{9} and \boxed{12}", {"extract": "boxed"}, 1.0),
        ("The answer is 12 apples", {"extract": "pattern", "pattern": r"answer is (\d+)"}, 1.0),
        ("The answer is 12", {"extract": "pattern", "pattern": r"\d+"}, 1.0),
        ("none", {"extract": "pattern", "pattern": r"(\d+)"}, 0.0),
    ],
)
def test_exact_match_looks_where_it_is_told(completion: str, settings: dict[str, str], expected: float) -> None:
    assert _score(completion, name="exact_match", **settings) == expected


def test_exact_match_may_ignore_case() -> None:
    assert _score("PARIS", "Paris", name="exact_match") == 0.0
    assert _score("PARIS", "Paris", name="exact_match", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is 12.", "12"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("= -3.50", "-3.5"),
        ("$1,234,567.5 in all", "1234567.5"),
        ("1,2,3", "3"),
        ("6e23", "6e23"),
        ("1e999999999", "1e999999999"),
        ("3/4", "0.75"),
        (".5", "0.5"),
        ("a1b2", "2"),
        ("(4)-1", "1"),
        ("x = \u22123", "-3"),  # the minus sign of typeset mathematics
        ("5\u22123", "3"),
        ("2e\u22123", "2e-3"),
        ("7 - 2 = -5", "-5"),
        ("no number", None),
        ("5/0", None),
    ],
)
def test_the_last_number_of_a_text(text: str, expected: str | None) -> None:
    assert last_number(text) == (None if expected is None else to_number(expected))


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "it is {}.", "**{}**", "x={}", "({})", "{}\n"]))
def test_every_whole_number_is_found_exactly(number: int, form: str) -> None:
    assert last_number(form.format(number)) == number
    assert last_number(form.format(f"{number:,}")) == number


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("12.0", "12", 1.0),
        ("about 12.0000001", "12", 1.0),
        ("12.1", "12", 0.0),
        ("1,200", "1200", 1.0),
        ("3/4", "0.75", 1.0),
        ("100000000000000000000001", "100000000000000000000001", 1.0),
        ("1e999999999", "1e888888888", 0.0),
        ("9" * 10000, "12", 0.0),
        ("nothing", "12", 0.0),
        ("\u22125", "-5", 1.0),
        ("\u22125", "5", 0.0),
        ("-5", "\u22125", 1.0),
    ],
)
def test_number_match(completion: str, answer: str, expected: float) -> None:
    assert _score(completion, answer, name="number_match") == expected


def test_a_reference_can_be_found_inside_the_answer_column() -> None:
    solution = "5 and 7 make 12, so\n#### 12"
    assert _score("12", solution, name="exact_match", reference_pattern=r"####\s*(.*)") == 1.0
    with pytest.raises(DataError, match="finds nothing in the answer of prompt 7: 'twelve'"):
        _score("12", "twelve", name="number_match", reference_pattern=r"####\s*(.*)")


def test_references_that_cannot_be_compared_with_are_named() -> None:
    with pytest.raises(DataError, match="number_match needs a number in the answer of prompt 7: 'twelve'"):
        _score("12", "twelve", name="number_match")
    with pytest.raises(DataError, match="exact_match compares with a reference answer, and prompt 7 has none"):
        _score("12", None, name="exact_match")


MATH = [
    (r"the result is $\frac{1}{2}$", "0.5", {}, 1.0),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", {"extract": "boxed"}, 1.0),
    (r"so $x^2 + 2x + 1$", r"(x+1)^2", {}, 1.0),
    (r"so $x^2 + 2x$", r"(x+1)^2", {}, 0.0),
    ("no answer", "12", {"extract": "boxed"}, 0.0),
    ("12", "12", {}, 1.0),
    ("\u22125", "-5", {}, 1.0),
    ("\u22125", "5", {}, 0.0),
    ("", "12", {}, 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "settings", "expected"), MATH)
def test_math_verify_compares_expressions_off_the_main_thread(
    completion: str, answer: str, settings: dict[str, str], expected: float
) -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(_score(completion, answer, name="math_verify", **settings)))
    thread.start()
    thread.join(60)
    assert scores == [expected]


def test_boxes_are_matched_brace_by_brace() -> None:
    assert last_boxed(r"\boxed{a{b}c} and \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{never closed") is None
    assert last_boxed("no box") is None


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a Python module into the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda name, code: (tmp_path / f"{name}.py").write_text(code) and None


def test_a_function_gets_prompt_completion_and_options(write_module: Callable[[str, str], None]) -> None:
    write_module(
        "rewards_brevity",
        "def brevity(prompt, completion, limit=10):\n"
        "    return float(len(completion) <= limit and prompt.fields['level'] == 3 and prompt.answer == '12')\n",
    )
    name = "rewards_brevity:brevity"
    reward = build_reward(RewardConfig(name=name))
    short = build_reward(RewardConfig(name=name, function_options={name: {"limit": 2}}))
    assert reward.score(_prompt(level=3), "1234").value == 1.0
    assert reward.score(_prompt(level=4), "1234").value == 0.0
    assert short.score(_prompt(level=3), "1234").value == 0.0


def test_rewards_add_up_with_their_weights(write_module: Callable[[str, str], None]) -> None:
    write_module("rewards_length", "def length(prompt, completion):\n    return len(completion)\n")
    weights = {"exact_match": 2.0, "rewards_length:length": -0.25}
    score = build_reward(RewardConfig(weights=weights)).score(_prompt(), "12")
    assert score.value == 2.0 * 1.0 - 0.25 * 2
    assert score.parts == {"exact_match": 1.0, "rewards_length:length": 2.0}


@pytest.mark.parametrize(
    "value", ["None", "'1.0'", "b'1'", "float('nan')", "float('inf')", "[1, 2]", "{}", "1j", "10**400", "10**5000"]
)
def test_a_function_that_returns_no_finite_number_is_named(
    value: str, write_module: Callable[[str, str], None]
) -> None:
    write_module("rewards_value", f"def give(prompt, completion, value={value}):\n    return {value}\n")
    import sys

    sys.modules.pop("rewards_value", None)
    with pytest.raises(RewardError, match="rewards_value:give must return a finite number: on prompt 7") as caught:
        _score("x", name="rewards_value:give")
    assert str(copy.copy(caught.value)) == str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("value", ["True", "2", "__import__('numpy').float32(1.5)", "__import__('numpy').array(1)"])
def test_anything_that_is_a_number_will_do(value: str, write_module: Callable[[str, str], None]) -> None:
    write_module("rewards_number", f"def give(prompt, completion):\n    return {value}\n")
    import sys

    sys.modules.pop("rewards_number", None)
    score = build_reward(RewardConfig(name="rewards_number:give")).score(_prompt(), "x")
    assert type(score.value) is float


def test_a_coroutine_function_is_awaited(write_module: Callable[[str, str], None]) -> None:
    write_module(
        "rewards_async",
        "import asyncio\nasync def ask(prompt, completion):\n    await asyncio.sleep(0)\n    return len(completion)\n",
    )
    assert _score("four", name="rewards_async:ask") == 4.0


def test_a_function_that_raises_is_named(write_module: Callable[[str, str], None]) -> None:
    write_module("rewards_raise", "def boom(prompt, completion):\n    raise KeyError('colour')\n")
    with pytest.raises(RewardError, match="rewards_raise:boom raised KeyError on prompt 7: 'colour'"):
        _score("x", name="rewards_raise:boom")


def test_functions_that_are_not_there_are_refused_at_the_start(write_module: Callable[[str, str], None]) -> None:
    write_module("rewards_there", "def brevity(prompt, completion):\n    return 0\nnumber = 3\n")
    for name, message in {
        "rewards_nowhere:f": "importing rewards_nowhere failed: ModuleNotFoundError",
        "rewards_there:brevty": "has no function 'brevty'; nearest: brevity",
        "rewards_there:number": "has no function 'number': what it has of that name is of type int",
        "rewards_there:": "has no function ''",
    }.items():
        with pytest.raises(ConfigError, match=message):
            build_reward(RewardConfig(name=name))
    write_module("rewards_broken", "def f(:\n")
    with pytest.raises(ConfigError, match="importing rewards_broken failed: SyntaxError"):
        build_reward(RewardConfig(name="rewards_broken:f"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either name or weights, got neither"),
        ({"name": "exact_match", "weights": {"number_match": 1.0}}, "either name or weights, got both"),
        ({"name": "exactmatch"}, "no reward 'exactmatch'; perhaps exact_match"),
        ({"weights": {"exact_match": float("nan")}}, "exact_match needs a finite number"),
        ({"name": "exact_match", "extract": "pattern"}, "need each other"),
        ({"name": "exact_match", "pattern": "x"}, "need each other"),
        ({"name": "exact_match", "extract": "pattern", "pattern": "("}, "not a regular expression"),
        ({"name": "exact_match", "reference_pattern": "["}, "reward.reference_pattern is not a regular expression"),
        ({"name": "exact_match", "function_options": {"a:b": {}}}, "names a:b, which is no reward"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardConfig(**settings))


def test_a_reward_says_whether_it_needs_answers() -> None:
    assert RewardConfig(name="exact_match").needs_answer
    assert RewardConfig(weights={"a:b": 1.0, "math_verify": 1.0}).needs_answer
    assert not RewardConfig(name="reasoning_gym").needs_answer
    assert not RewardConfig(name="a:b").needs_answer


RIGHT = {
    "30": [
        "30", r"30^\circ", r"30^{\circ}", r"30 ^ \circ", "30°", "30º", "30^o", "30^{o}", "30 degrees",
        r"30\text{ degrees}", r"x = 30^{\circ}", r"m\angle A = 30", r"\angle ABC = 30^\circ", r"180-150=30",
        r"\textbf{30}",
    ],
    "12.5": [
        r"12.5 \text{ cm}", r"12.5\,\mathrm{cm}^2", r"12.5 \text{ square units}", r"\frac{25}{2}", "12.5 cm",
        "12.5 units^2", "12.5 cm²", r"12.5~\mathrm{m}^{2}", r"12.5\ m^2", "12.5 m^3", r"x \approx 12.5",
        r"\overline{AB} = 12.5",
    ],
    r"2 \sqrt { 221 }": [r"2\sqrt{221}", r"\sqrt{884}", "2√221", "2√(221)", r"2\sqrt{221} \text{ cm}"],
    r"6 \sqrt { 3 }": [r"6\sqrt3", "6√3", r"\frac{18}{\sqrt{3}}", r"6\sqrt{3}\ \mathrm{in}^2"],
    r"5 \sqrt { 2 } + 5": [r"5+5\sqrt{2}", "5 + 5√2"],
    r"\frac { 80 } { 9 }": [r"\frac{80}{9}", "80/9", r"8\frac{8}{9}"],
    r"\frac { \sqrt { 2 } } { 2 }": [r"\frac{1}{\sqrt{2}}", "√2/2"],
    r"36 \pi": [r"36\pi", "36π", "36 pi", r"36 \pi \text{ cm}^2", r"36\pi\ m^2"],
    "1,250": ["1250", "1,250"],
    "B": ["B", r"\text{B}"],
    "4m^2": ["4m^2"],
}  # fmt: skip
WRONG = {
    "30": ["60", r"60^\circ", "30^2", "", r"\pi"],
    "12.5": ["12.6", "12.5^2", r"12.5\pi"],
    r"2 \sqrt { 221 }": ["29.73", r"\sqrt{221}", "2√22", "221"],
    r"36 \pi": ["36", "113.1", r"6\pi"],
    "27": ["27^2", "27^3", "2 7^2"],
    "4m^2": ["4", "4m"],
}


@pytest.fixture(scope="module")
def reward() -> Reward:
    return build_reward(RewardConfig(name="math_verify"))


def score(reward: Reward, answer: str, written: str) -> float:
    prompt = Prompt(index=0, ids=np.zeros(1, np.int32), text="", answer=answer)
    return reward.score(prompt, rf"So the answer is \boxed{{{written}}}.").value


@pytest.mark.parametrize(("answer", "written"), [(answer, each) for answer, many in RIGHT.items() for each in many])
def test_right_answers_are_right(reward: Reward, answer: str, written: str) -> None:
    assert score(reward, answer, written) == 1.0


@pytest.mark.parametrize(("answer", "written"), [(answer, each) for answer, many in WRONG.items() for each in many])
def test_wrong_answers_are_wrong(reward: Reward, answer: str, written: str) -> None:
    assert score(reward, answer, written) == 0.0


@pytest.mark.parametrize(
    ("texts", "settings", "vote"),
    [
        (["so 7", "7.0", " 7.00 "], {"name": "number_match"}, "7"),
        (["1,000", "1000", "1e3"], {"weights": {"number_match": 1.0}}, "1000"),
        (["no idea", ""], {"name": "number_match"}, None),
        (["Two  thirds", " Two\nthirds"], {"name": "exact_match"}, "Two thirds"),
        (["PARIS", "Paris"], {"name": "exact_match", "ignore_case": True}, "paris"),
        (["x <answer> 7.0 </answer>"], {"name": "exact_match", "extract": "tag"}, "7.0"),
        (["7", "<answer> </answer>"], {"name": "exact_match", "extract": "tag"}, None),
    ],
)
def test_answers_that_mean_the_same_are_the_same_vote(
    texts: list[str], settings: dict[str, Any], vote: str | None
) -> None:
    assert {vote_of(text, RewardConfig(**settings)) for text in texts} == {vote}
