"""What the benchmarks share: a command line, sides that take turns, and rows as a table or as JSON."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def parser_of(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A command line that tells the module's docstring, with --json and these numbers as options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead of a table")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def take_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each side returned, round by round: so what else the machine does falls on all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
    return found


def show(rows: Sequence[Row], *, as_json: bool = False, title: str = "") -> None:
    """Print rows of the same keys as Markdown under a title with the machine's load, or as JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    print(f"{title}{'; ' if title else ''}{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    for cells in (list(rows[0]), ["---"] * len(rows[0]), *(map(_cell, row.values()) for row in rows)):
        print(f"| {' | '.join(cells)} |")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
