"""The transcripts that a lesson of the quickstart shows while it warms its model up."""

from collections import Counter
from pathlib import Path

import pytest

from grpo_async_app._commands.quickstart import LESSONS, WARMUP_BATCH, carries_forgotten, make_model
from offbeat_data import Prompt, Tokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_model(LESSONS["addition"], tmp_path, 0)
    return load_tokenizer(tmp_path)


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
def test_every_batch_shows_what_is_wanted_as_often(name: str, tokenizer: Tokenizer) -> None:
    lesson = LESSONS[name]
    shown = Counter(lesson.transcripts[at % len(lesson.transcripts)] for at in range(WARMUP_BATCH))
    share = 1 / len(lesson.transcripts)
    assert shown[lesson.wanted] / WARMUP_BATCH == pytest.approx(share, abs=0.02)
    assert 0 < lesson.enough < share, "or the warm-up might never end"
