"""Drawn geometry problems: the layout of geo3k, answers that are right, figures that carry the numbers."""

import io
import math
import random

import pyarrow.parquet as pq
import pytest
from draw_geometry import KINDS, draw, main
from math_verify import parse, verify
from PIL import Image


def expected(key):
    """Return the answer by school arithmetic, from a problem's kind and numbers."""
    kind, *numbers = key.split()
    first, second = float(numbers[0]), float(numbers[-1])
    return {
        "circle_area": math.pi * first**2,
        "polygon_sides": first,
        "rectangle_area": first * second,
        "rectangle_perimeter": 2 * (first + second),
        "right_triangle": math.hypot(first, second),
        "squares_area": first * second,
        "triangle_angle": 180 - first - second,
    }[kind]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_answer_in_latex_is_the_right_number(kind):
    rng = random.Random(1)
    for _ in range(20):
        problem = KINDS[kind](rng)
        [value] = [part for part in parse(f"${problem.answer}$") if not isinstance(part, str)]
        assert float(value) == pytest.approx(expected(problem.key))
        assert verify(parse(f"${problem.answer}$"), parse(rf"\boxed{{{problem.answer}}}"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_everything_drawn_lies_inside_the_picture(kind):
    rng = random.Random(2)
    for _ in range(20):
        image = Image.open(io.BytesIO(draw(KINDS[kind](rng), 112))).convert("L")
        ink = Image.eval(image, lambda value: 255 - value).getbbox()
        assert image.size == (112, 112)
        assert ink
        assert min(ink) > 0
        assert max(ink) < 112


def test_files_have_the_layout_of_geo3k_and_share_no_problem(tmp_path):
    main([str(tmp_path), "--train", "60", "--test", "12", "--size-px", "64"])
    train, test = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    assert (len(train), len(test)) == (60, 12)
    assert {tuple(row) for row in train + test} == {("images", "problem", "answer")}
    assert all(row["problem"].count("<image>") == len(row["images"]) == 1 for row in train + test)
    pictures = [{row["images"][0]["bytes"] + row["problem"].encode() for row in rows} for rows in (train, test)]
    assert not pictures[0] & pictures[1]


def test_a_seed_gives_the_same_files(tmp_path):
    for name, seed in {"a": "3", "b": "3", "c": "4"}.items():
        main([str(tmp_path / name), "--train", "12", "--test", "6", "--size-px", "48", "--seed", seed])
    first, same, other = ((tmp_path / name / "train.parquet").read_bytes() for name in "abc")
    assert first == same != other


def test_too_many_problems_of_a_small_kind_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="circle_area has too few different problems"):
        main([str(tmp_path), "--test", "50", "--kinds", "circle_area"])
