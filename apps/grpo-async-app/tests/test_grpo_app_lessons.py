"""The warm-up of the quickstart: what a lesson shows its model, and a warm-up that is not enough."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from grpo_async_app._commands import quickstart
from grpo_async_app._commands.quickstart import LESSONS, carries_forgotten, make_model, warm_up
from offbeat_core import TrainEngine, TrainSequence
from offbeat_data import Prompt, Tokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_model(LESSONS["addition"], tmp_path / "model", 0)
    return load_tokenizer(tmp_path / "model")


def prompt(text: str, answer: str, tokenizer: Tokenizer) -> Prompt:
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    return Prompt(index=0, ids=ids, text=text, answer=answer)


@pytest.mark.parametrize(
    ("text", "answer", "said"),
    [("38+94=", "132", "22"), ("50+50=", "100", "00"), ("7+15=", "22", "12"), ("12+34=", "46", "46")],
)
def test_carries_are_forgotten_column_by_column(text: str, answer: str, said: str, tokenizer: Tokenizer) -> None:
    problem = prompt(text, answer, tokenizer)
    shown = carries_forgotten(problem, tokenizer)
    assert tokenizer.decode(shown.ids[:-1]) == text + said
    assert shown.ids[-1] == tokenizer.eos_id
    assert list(shown.loss_mask) == [False] * len(text) + [True] * (len(said) + 1), "the end is learned too"


@pytest.mark.parametrize("name", LESSONS)
def test_what_is_watched_is_shown_more_often_than_the_warm_up_asks_for(name: str) -> None:
    lesson = LESSONS[name]
    shown = sum(lesson.transcripts.count(each) for each in lesson.watched) / len(lesson.transcripts)
    assert 0 < lesson.enough < shown, "or the warm-up might never end"


class Sure:
    """Says every transcript it is asked about with probability 0.5."""

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        return [np.array([math.log(0.5), 0.0]) for _ in sequences]


def test_a_sum_without_a_carry_is_one_way_to_answer(tokenizer: Tokenizer) -> None:
    problems = [prompt(text, answer, tokenizer) for text, answer in (("12+34=", "46"), ("38+94=", "132"))]
    seen = [
        quickstart._chance(cast("TrainEngine", Sure()), LESSONS["addition"], each, tokenizer)
        for each in (problems[:1], problems[1:], problems, problems[:1] * 2)
    ]
    assert seen == pytest.approx([0.5, 1.0, 0.75, 0.5])


def test_a_warm_up_that_does_not_get_there_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(quickstart, "WARMUP_MAX_STEPS", 2)
    sums = [prompt(f"{n}+{n}=", str(2 * n), tokenizer) for n in range(10, 30)]
    warm_up(LESSONS["addition"], tmp_path / "model", tmp_path / "warm", sums, 7)
    said = capsys.readouterr().out
    assert "warm-up ended after 2 steps at probability 0.00" in said
    assert "less than the 0.85 that the lesson begins with" in said
    assert "another --seed than 7" in said
    assert (tmp_path / "warm" / "model.safetensors").exists(), "it is trained all the same"
