"""Draw a geometry data set in the layout of geo3k: figures, problems that need them, and their answers.

    python tools/draw_geometry.py FOLDER [--train 2000] [--test 200] [--seed 0] [--size-px 224] [--kinds KIND …]

Writes FOLDER/train.parquet and FOLDER/test.parquet with the columns of hiyouga/geometry3k: `images`, a list of
{bytes, path} with one PNG; `problem`, a text in which `<image>` marks the picture's place; `answer`, LaTeX as geo3k
writes it. The numbers stand in the picture only. The same arguments give the same files, and no problem of the test
file, with its numbers, is one of the train file.

Source: dataset card of hiyouga/geometry3k (features `images`, `problem`, `answer`).
"""

import argparse
import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]

SCHEMA = pa.schema(
    {
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "problem": pa.string(),
        "answer": pa.string(),
    }
)
NUM_TRIES = 1000


@dataclass(frozen=True)
class Problem:
    """A figure in the unit square, y upwards, with the quantity that it asks for.

    Args:
        key: kind and numbers; two problems with one key ask the same.
        outline: corners of a closed line, or centre and a point of a circle.
        labels: where to write what.
        lines: within the outline, each from one point to another.
        question, answer: the text, and LaTeX.
    """

    key: str
    outline: tuple[Point, ...]
    labels: tuple[tuple[Point, str], ...]
    question: str
    answer: str
    lines: tuple[tuple[Point, Point], ...] = ()


def right_triangle(rng: random.Random) -> Problem:
    """Draw a right triangle: two legs are given, and the problem asks for the hypotenuse."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    width, height = 0.7 * a / max(a, b), 0.7 * b / max(a, b)
    corners = ((0.15, 0.15), (0.15 + width, 0.15), (0.15, 0.15 + height))
    labels = (((0.15 + width / 2, 0.08), str(a)), ((0.07, 0.15 + height / 2), str(b)), (_between(*corners[1:]), "x"))
    return Problem(f"right_triangle {a} {b}", corners, labels, "Find x.", _root(a * a + b * b))


def triangle_angle(rng: random.Random) -> Problem:
    """Draw a triangle: two angles are given, and the problem asks for the third."""
    first, second = rng.randint(35, 80), rng.randint(35, 80)
    # As wide as the picture allows: the height over the base is 1 / (cot first + cot second).
    left, right = (1 / math.tan(math.radians(angle)) for angle in (first, second))
    base = min(0.76, 0.74 * (left + right))
    height = base / (left + right)
    corners = ((0.12, 0.12), (0.12 + base, 0.12), (0.12 + left * height, 0.12 + height))
    centre = (sum(x for x, _ in corners) / 3, sum(y for _, y in corners) / 3)
    spots = [_between(corner, centre, 0.4) for corner in corners]
    labels = tuple(zip(spots, (f"{first}°", f"{second}°", "x"), strict=True))
    question = "Find the measure of the angle x in degrees."
    return Problem(f"triangle_angle {first} {second}", corners, labels, question, str(180 - first - second))


def rectangle_area(rng: random.Random) -> Problem:
    """Draw a rectangle: two sides are given, and the problem asks for the area."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return _rectangle(f"rectangle_area {a} {b}", a, b, "Find the area of the rectangle.", str(a * b))


def rectangle_perimeter(rng: random.Random) -> Problem:
    """Draw a rectangle: two sides are given, and the problem asks for the perimeter."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return _rectangle(f"rectangle_perimeter {a} {b}", a, b, "Find the perimeter of the rectangle.", str(2 * (a + b)))


def squares_area(rng: random.Random) -> Problem:
    """Return a rectangle of unit squares, anywhere on a grid of eight by eight; the area is asked."""
    wide, high = rng.randint(1, 4), rng.randint(1, 4)
    left, low = rng.randint(1, 7 - wide), rng.randint(1, 7 - high)
    xs, ys = [(left + step) / 8 for step in range(wide + 1)], [(low + step) / 8 for step in range(high + 1)]
    lines = [((x, ys[0]), (x, ys[-1])) for x in xs[1:-1]] + [((xs[0], y), (xs[-1], y)) for y in ys[1:-1]]
    corners = ((xs[0], ys[0]), (xs[-1], ys[0]), (xs[-1], ys[-1]), (xs[0], ys[-1]))
    key = f"squares_area {wide} {left} {low} {high}"
    question = "Each square has area 1. Find the area of the rectangle."
    return Problem(key, corners, (), question, str(wide * high), tuple(lines))


def circle_area(rng: random.Random) -> Problem:
    """Return a question for the area, where the radius is given."""
    radius, turn = rng.randint(1, 20), rng.uniform(0, 2 * math.pi)
    edge = (0.5 + 0.38 * math.cos(turn), 0.5 + 0.38 * math.sin(turn))
    labels = ((_between((0.5, 0.5), edge), str(radius)),)
    answer = rf"{radius * radius if radius > 1 else ''} \pi".strip()
    return Problem(f"circle_area {radius}", ((0.5, 0.5), edge), labels, "Find the area of the circle.", answer)


def polygon_sides(rng: random.Random) -> Problem:
    """Return a regular polygon of any size, place and turn; the number of its sides is asked."""
    sides, radius, turn = rng.randint(3, 8), rng.uniform(0.2, 0.4), rng.uniform(0, 2 * math.pi)
    centre = (rng.uniform(radius + 0.05, 0.95 - radius), rng.uniform(radius + 0.05, 0.95 - radius))
    angles = [turn + 2 * math.pi * side / sides for side in range(sides)]
    corners = tuple((centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)) for angle in angles)
    return Problem(
        f"polygon_sides {sides} {turn:.4f}", corners, (), "How many sides does the polygon have?", str(sides)
    )


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    kind.__name__: kind
    for kind in (
        circle_area,
        polygon_sides,
        rectangle_area,
        rectangle_perimeter,
        right_triangle,
        squares_area,
        triangle_angle,
    )
}


def draw(problem: Problem, size_px: int) -> bytes:
    """Return the figure as a PNG of size_px × size_px, black on white."""
    image = Image.new("RGB", (size_px, size_px), "white")
    pen, line_px = ImageDraw.Draw(image), max(1, size_px // 100)
    points = [(x * size_px, (1 - y) * size_px) for x, y in problem.outline]
    if len(points) == 2:
        (x, y), radius = points[0], math.dist(*points)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline="black", width=line_px)
        pen.line(points, fill="black", width=line_px)
    else:
        pen.line([*points, points[0]], fill="black", width=line_px, joint="curve")
    for line in problem.lines:
        pen.line([(x * size_px, (1 - y) * size_px) for x, y in line], fill="black", width=line_px)
    font = ImageFont.load_default(size=max(8, size_px // 12))
    for (x, y), text in problem.labels:
        spot = (x * size_px, (1 - y) * size_px)
        pen.rectangle(pen.textbbox(spot, text, font=font, anchor="mm"), fill="white")
        pen.text(spot, text, fill="black", font=font, anchor="mm")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def problems(rng: random.Random, kinds: list[str], num: int, taken: set[str]) -> Iterator[Problem]:
    """Return `num` problems of alternating kinds, none of them in `taken`; only the caller adds them to it.

    Raises:
        SystemExit: the kind has no further problem to ask.
    """
    for number in range(num):
        kind = kinds[number % len(kinds)]
        for _ in range(NUM_TRIES):
            problem = KINDS[kind](rng)
            if problem.key not in taken:
                yield problem
                break
        else:
            raise SystemExit(f"{kind} has too few different problems: ask for fewer, or for more kinds")


def write(path: Path, rows: list[Problem], size_px: int) -> None:
    """Write one Parquet file in the layout of geo3k."""
    table = pa.Table.from_pylist(
        [
            {
                "images": [{"bytes": draw(row, size_px), "path": None}],
                "problem": f"<image>{row.question}",
                "answer": row.answer,
            }
            for row in rows
        ],
        schema=SCHEMA,
    )
    pq.write_table(table, path)


def main(arguments: list[str] | None = None) -> None:
    """Write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000, help="problems to train on")
    parser.add_argument("--test", type=int, default=200, help="problems held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size-px", type=int, default=224, help="width and height of a figure")
    parser.add_argument("--kinds", nargs="+", default=sorted(KINDS), choices=sorted(KINDS))
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    held_out = _different(random.Random(f"{options.seed} test"), options.kinds, options.test)
    train = list(
        problems(random.Random(f"{options.seed} train"), options.kinds, options.train, {row.key for row in held_out})
    )
    for name, rows in {"train": train, "test": held_out}.items():
        write(options.folder / f"{name}.parquet", rows, options.size_px)
        print(f"{options.folder / name}.parquet: {len(rows)} problems")


def _different(rng: random.Random, kinds: list[str], num: int) -> list[Problem]:
    """Return `num` problems, no two the same."""
    found: dict[str, Problem] = {}
    for problem in problems(rng, kinds, num, taken := set[str]()):
        found[problem.key] = problem
        taken.add(problem.key)
    return list(found.values())


def _rectangle(key: str, a: int, b: int, question: str, answer: str) -> Problem:
    width, height = 0.7 * a / max(a, b), 0.7 * b / max(a, b)
    corners = ((0.15, 0.15), (0.15 + width, 0.15), (0.15 + width, 0.15 + height), (0.15, 0.15 + height))
    labels = (((0.15 + width / 2, 0.08), str(a)), ((0.07, 0.15 + height / 2), str(b)))
    return Problem(key, corners, labels, question, answer)


def _between(first: Point, second: Point, share: float = 0.5) -> Point:
    return first[0] + share * (second[0] - first[0]), first[1] + share * (second[1] - first[1])


def _root(square: int) -> str:
    """Return √square in LaTeX, simplified: 5, or 2 \\sqrt { 221 }, as geo3k writes it."""
    factor = max(n for n in range(1, math.isqrt(square) + 1) if square % (n * n) == 0)
    rest = square // (factor * factor)
    if rest == 1:
        return str(factor)
    return rf"{factor if factor > 1 else ''} \sqrt {{ {rest} }}".strip()


if __name__ == "__main__":
    main()
