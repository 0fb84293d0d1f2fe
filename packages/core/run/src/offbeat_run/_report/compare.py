"""Two evaluations side by side: which items changed, what was said, and how sure the difference is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, DataError, atomic_write
from offbeat_run._report.assets import asset, page_template
from offbeat_run._validation.folder import read_eval_note
from offbeat_run._validation.items import ItemAnswers, answers_path, read_answers
from offbeat_run._validation.summary import Estimate

_SHOWN: Final = 200
"""Items on the page, those that changed most first."""
_TEXTS: Final = 3
"""Samples of an item on the page."""


@dataclass(frozen=True, kw_only=True)
class ItemPair:
    """An item as both evaluations have answered it."""

    before: ItemAnswers
    after: ItemAnswers

    @property
    def change(self) -> float:
        """Change of the share of samples that are right."""
        return self.after.share_right - self.before.share_right

    @property
    def kind(self) -> str:
        """Return what has become of it, for the page."""
        return "gained" if self.change > 0 else "lost" if self.change < 0 else "same"

    def texts(self) -> list[tuple[str, str]]:
        """Samples of both, side by side."""
        sides = [[sample.text for sample in side.samples[:_TEXTS]] for side in (self.before, self.after)]
        longest = max(map(len, sides))
        first, second = ([*side, *[""] * (longest - len(side))] for side in sides)
        return list(zip(first, second, strict=True))


@dataclass(frozen=True, kw_only=True)
class SetPair:
    """A set as both evaluations have answered it, the items that changed most first."""

    name: str
    pairs: list[ItemPair]

    def count(self, kind: str) -> int:
        """Items that were gained, lost, or are the same."""
        return sum(pair.kind == kind for pair in self.pairs)

    @property
    def shown(self) -> list[ItemPair]:
        """Return what a page has room for."""
        return self.pairs[:_SHOWN]

    @property
    def difference(self) -> Estimate:
        """Return the difference of the right shares, item by item: items hard for both widen no interval."""
        return Estimate.of([pair.change for pair in self.pairs])

    def describe(self) -> str:
        """Describe it in one line."""
        before, after = (
            sum(getattr(pair, side).share_right for pair in self.pairs) / len(self.pairs)
            for side in ("before", "after")
        )
        by = self.difference
        return (
            f"{self.name}: {before:.4f} -> {after:.4f}, by {by.value:+.4f} "
            f"(95% interval {by.low:+.4f} to {by.high:+.4f}); "
            f"of {len(self.pairs)} items {self.count('gained')} gained, {self.count('lost')} lost"
        )


def write_comparison(first: Path, second: Path, out: Path, names: Sequence[str] = ()) -> str:
    """Write a page with two evaluations side by side.

    Args:
        first: folder of an evaluation.
        second: folder of the later one.
        out: the page; an older one is replaced.
        names: of the sets; empty: all that both have.

    Returns:
        One line a set.

    Raises:
        RunFolderError: one is no folder of an evaluation.
        ConfigError: no such set in both.
        DataError: the items of a set differ.
    """
    notes = [read_eval_note(folder) for folder in (first, second)]
    marks = [note.get("marks", {}) for note in notes]
    both = [name for name in marks[0] if name in marks[1]]
    if unknown := [name for name in names if name not in both] or ([] if both else ["any"]):
        raise ConfigError(f"{first} and {second} have no set {unknown[0]} in common; in both are {', '.join(both)}")
    sets = [_pair(name, first, second) for name in (names or both)]
    page = page_template("compare.html").render(
        names=[_title(note, folder) for note, folder in zip(notes, (first, second), strict=True)],
        written=time.strftime("%Y-%m-%d %H:%M"),
        sets=sets,
        style=asset("page.css"),
    )
    with atomic_write(out) as file:
        file.write(page)
    return "".join(f"{each.describe()}\n" for each in sets)


def _title(note: dict[str, object], folder: Path) -> str:
    about = note.get("about")
    model = about.get("model") if isinstance(about, dict) else None
    return Path(str(model or folder)).name


def _pair(name: str, first: Path, second: Path) -> SetPair:
    sides = [{each.item: each for each in read_answers(answers_path(folder, name))} for folder in (first, second)]
    shared = [item for item in sorted(sides[0]) if item in sides[1]]
    for item in shared:
        if sides[0][item].prompt != sides[1][item].prompt:
            raise DataError(
                f"the set {name} of {first} and that of {second} ask different things: item {item} is "
                f"{sides[0][item].prompt[:60]!r} and {sides[1][item].prompt[:60]!r}; compare answers to the same items"
            )
    pairs = [ItemPair(before=sides[0][item], after=sides[1][item]) for item in shared]
    pairs = [pair for pair in pairs if pair.before.samples and pair.after.samples]
    if not pairs:
        raise DataError(f"the set {name}: no item is answered in both {first} and {second}")
    return SetPair(name=name, pairs=sorted(pairs, key=lambda pair: (-abs(pair.change), pair.before.item)))
