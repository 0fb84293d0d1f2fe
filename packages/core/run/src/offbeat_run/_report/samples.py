"""The completions of a report: a few of each kind, picked while the files are read, however long they are."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from offbeat_run._folder.folder import RunFolder
from offbeat_run._log.run_log import Generation, iter_generations

_SHOWN: Final = 8
_KEPT: Final = 64
"""Completions kept of one validation, to find those whose prompts two validations share."""
_MAX_SETS: Final = 32


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Completions under a heading."""

    title: str
    rows: list[Generation]


@dataclass(frozen=True, kw_only=True)
class BesideTable:
    """Completions of two validations of a set to the same prompts.

    Args:
        name: of the set.
        first, last: updates of the validations.
        pairs: completions of the first and of the last.
    """

    name: str
    first: int
    last: int
    pairs: list[tuple[Generation, Generation]]


@dataclass
class _Ends:
    """Completions of the first and of the last validation of one set."""

    first: list[Generation] = field(default_factory=list)
    last: list[Generation] = field(default_factory=list)

    def take(self, each: Generation) -> None:
        if not self.first or each.step == self.first[0].step:
            _keep(self.first, each)
        if not self.last or each.step > self.last[0].step:
            self.last = [each]
        elif each.step == self.last[0].step:
            _keep(self.last, each)

    def beside(self, name: str) -> Iterator[BesideTable]:
        later = {each.prompt: each for each in self.last}
        pairs = [(each, later[each.prompt]) for each in self.first if each.prompt in later]
        if pairs and self.first[0].step < self.last[0].step:
            yield BesideTable(name=name, first=self.first[0].step, last=self.last[0].step, pairs=pairs[:_SHOWN])


def _keep(kept: list[Generation], each: Generation) -> None:
    if len(kept) < _KEPT:
        kept.append(each)


def sample_tables(run: RunFolder, damaged: list[str]) -> tuple[list[BesideTable], list[SampleTable]]:
    """Pick completions: of the first validation beside the last one, of the last one, and of those trained on last.

    Args:
        run: open for reading.
        damaged: takes a text for each line that cannot be read.
    """
    sets: dict[str, _Ends] = {}
    for each in iter_generations(run, "validation", damaged):
        if each.set in sets or len(sets) < _MAX_SETS:
            sets.setdefault(each.set, _Ends()).take(each)
    tables = []
    if sets:
        last = max(ends.last[0].step for ends in sets.values())
        rows = [each for ends in sets.values() if ends.last[0].step == last for each in ends.last]
        tables.append(SampleTable(title=f"Validation after update {last}", rows=rows[:_SHOWN]))
    trained = deque(iter_generations(run, "train", damaged), maxlen=_SHOWN)
    if trained:
        tables.append(SampleTable(title="Trained on last", rows=[*reversed(trained)]))
    return [table for name, ends in sets.items() for table in ends.beside(name)], tables
