"""Data for a rehearsal, drawn on the spot: figures for a model that sees, sums for one that does not."""

import json
import random
from pathlib import Path
from typing import Any, Final

from offbeat_recipes._tiny_model import SQUARE_PX

NUM_DRAWN: Final = 512
"""Rows of a drawn file."""


def draw_figures(path: Path, *, prompt_column: str, answer_column: str, seed: int) -> None:
    """Write rectangles of up to 4 x 4 squares and ask for their area.

    Args:
        path: of a JSONL file; the figures lie beside it.
        prompt_column: of the question.
        answer_column: of the area.
        seed: of what is drawn.
    """
    from PIL import Image, ImageDraw

    path.parent.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(seed), []
    for number in range(NUM_DRAWN):
        wide, high = draw.randint(1, 4), draw.randint(1, 4)
        image = Image.new("RGB", (4 * SQUARE_PX, draw.choice((2, 3, 4)) * SQUARE_PX), "white")
        ImageDraw.Draw(image).rectangle((0, 0, wide * SQUARE_PX - 1, high * SQUARE_PX // 2 - 1), fill="black")
        image.save(path.parent / f"{number}.png")
        rows.append({"images": [f"{number}.png"], prompt_column: "<image>=", answer_column: str(wide * high)})
    _write(path, rows)


def draw_sums(path: Path, *, prompt_column: str, answer_column: str, seed: int) -> None:
    """Write sums of two numbers of up to two digits.

    Args:
        path: of a JSONL file.
        prompt_column: of the question.
        answer_column: of the sum.
        seed: of what is drawn.
    """
    draw, rows = random.Random(seed), []
    for _ in range(NUM_DRAWN):
        first, second = draw.randrange(100), draw.randrange(100)
        rows.append({prompt_column: f"{first}+{second}=", answer_column: str(first + second)})
    _write(path, rows)


def draw_chats(path: Path, *, messages_column: str, seed: int) -> None:
    """Write conversations of two turns about sums.

    Args:
        path: of a JSONL file.
        messages_column: of the conversation.
        seed: of what is drawn.
    """
    draw, rows = random.Random(seed), []
    for _ in range(NUM_DRAWN):
        messages = []
        for first, second in [(draw.randrange(10), draw.randrange(10)) for _ in range(2)]:
            messages.append({"role": "user", "content": f"{first}+{second}="})
            messages.append({"role": "assistant", "content": str(first + second)})
        rows.append({messages_column: messages})
    _write(path, rows)


def draw_pairs(path: Path, *, prompt_column: str, chosen_column: str, rejected_column: str, seed: int) -> None:
    """Write sums with the right answer and a wrong one.

    Args:
        path: of a JSONL file.
        prompt_column: of the question.
        chosen_column: of the sum.
        rejected_column: of another number.
        seed: of what is drawn.
    """
    draw, rows = random.Random(seed), []
    for _ in range(NUM_DRAWN):
        question, right, wrong = _draw_answers(draw)
        rows.append({prompt_column: question, chosen_column: right, rejected_column: wrong})
    _write(path, rows)


def draw_ratings(path: Path, *, prompt_column: str, completion_column: str, label_column: str, seed: int) -> None:
    """Write sums with an answer that is right or wrong.

    Args:
        path: of a JSONL file.
        prompt_column: of the question.
        completion_column: of the answer.
        label_column: whether it is right.
        seed: of what is drawn.
    """
    draw, rows = random.Random(seed), []
    for _ in range(NUM_DRAWN):
        (question, *answers), is_right = _draw_answers(draw), draw.random() < 0.5
        rows.append({prompt_column: question, completion_column: answers[not is_right], label_column: is_right})
    _write(path, rows)


def _draw_answers(draw: random.Random) -> tuple[str, str, str]:
    """Return a sum, its answer, and a wrong one of the same length."""
    first, second = draw.randrange(10), draw.randrange(10, 90)
    right = first + second
    wrong = draw.choice([number for number in range(10, 99) if number != right])
    return f"{first}+{second}=", str(right), str(wrong)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
