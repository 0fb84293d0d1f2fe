"""The items of validation sets over a run: which turned right or wrong between validations, for the report."""

from dataclasses import dataclass
from typing import Final

from offbeat_run._folder.folder import RunFolder
from offbeat_run._validation.items import ItemHistory, item_histories, iter_answers

_ITEMS: Final = 25
_VALIDATIONS: Final = 16
"""Validations on the page at most; the first and the last one are always among them."""


@dataclass(frozen=True, kw_only=True)
class ItemTable:
    """Items of one set, those that changed most often first.

    Args:
        name: of the set.
        summary: in one sentence.
        steps: of the validations shown.
        rows: the items shown.
    """

    name: str
    summary: str
    steps: list[int]
    rows: list[ItemHistory]


def item_tables(run: RunFolder, damaged: list[str]) -> list[ItemTable]:
    """Return one table for each set that was validated twice or more, of a few validations where there are many.

    Args:
        run: open for reading.
        damaged: takes a word for each line that cannot be read.
    """
    tables = []
    for path in sorted(run.validation.glob("*.jsonl")):
        steps = _chosen(sorted({each.step for each in iter_answers(path, damaged)}))
        if len(steps) > 1:
            shown = set(steps)
            histories = item_histories(each for each in iter_answers(path, []) if each.step in shown)
            changed = [each for each in histories if each.flips or each.change]
            tables.append(
                ItemTable(
                    name=path.stem,
                    summary=_summary(histories, steps),
                    steps=steps,
                    rows=changed[:_ITEMS],
                )
            )
    return tables


def _summary(histories: list[ItemHistory], steps: list[int]) -> str:
    gained = sum(each.change > 0 for each in histories)
    lost = sum(each.change < 0 for each in histories)
    back = sum(each.flips > 1 for each in histories)
    return (
        f"Of {len(histories)} items {gained} were right more often in the validation of update {steps[-1]} than in "
        f"that of update {steps[0]}, and {lost} less often; {back} turned right or wrong more than once in the "
        f"{len(steps)} validations shown."
    )


def _chosen(steps: list[int]) -> list[int]:
    """Evenly, the first and the last among them."""
    if len(steps) <= _VALIDATIONS:
        return steps
    last = len(steps) - 1
    return [steps[round(number * last / (_VALIDATIONS - 1))] for number in range(_VALIDATIONS)]
