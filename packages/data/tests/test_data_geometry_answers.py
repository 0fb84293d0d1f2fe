"""Answers to geometry problems are compared as mathematics, however a model writes degrees, units, roots and π."""

import numpy as np
import pytest

from offbeat_data import Prompt, Reward, RewardConfig, build_reward

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
