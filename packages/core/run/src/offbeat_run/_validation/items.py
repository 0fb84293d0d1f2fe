"""Answers to each item of a validation: lines of JSON that survive a kill, and what changed between two."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from offbeat_run._folder.lines import JsonlFile, cut_lines, read_lines

HELD_OUT: Final = "held-out"
"""Name of the set that the section `data` holds out."""


class SampledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of an item.

    Args:
        reward: its reward.
        right: whether the reward makes it a right answer.
        vote: the answer found in it, None where there is none.
        num_tokens: that the model wrote.
        num_turns: of its episode; 0 where there is no environment.
        stop_reason: as in `Completion`; `length` where any limit of tokens or turns has ended the sample.
        versions: [policy version, tokens] of each run of tokens that one version has sampled.
        text: where it is kept.
    """

    reward: float
    right: bool
    vote: str | None = None
    num_tokens: int = 0
    num_turns: int = 0
    stop_reason: str = ""
    versions: tuple[tuple[int, int], ...] = ()
    text: str = ""


class ItemAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a set, and what it was answered in one validation.

    Args:
        step: updates done when the validation began.
        item: its place in the set, counted from 0.
        prompt: text, cut where only the beginning is kept.
        answer: that was expected, where it is known.
        samples: in order; fewer than asked for where some could not be scored.
    """

    step: int
    item: int
    prompt: str
    answer: str = ""
    samples: tuple[SampledAnswer, ...] = ()

    @property
    def share_right(self) -> float:
        """Share of the samples that are right; there is at least one."""
        return sum(sample.right for sample in self.samples) / len(self.samples)


class AnswersLog:
    """Writes NAME.jsonl for each set, one flushed line an item.

    Args:
        folder: made where it is missing.
        resume_step: on resume, the step of the checkpoint: what validations after it have written vanishes.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self._folder = folder
        self._files: dict[str, JsonlFile] = {}
        if resume_step is not None:
            for path in folder.glob("*.jsonl"):
                cut_lines(path, lambda line: int(line["step"]) <= resume_step)

    def write(self, name: str, items: Iterable[ItemAnswers]) -> None:
        """Append items of one set."""
        if name not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[name] = JsonlFile(answers_path(self._folder, name))
        for item in items:
            self._files[name].write(msgspec.to_builtins(item))

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "AnswersLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers_path(folder: Path, name: str) -> Path:
    """Return the file of one set."""
    return folder / f"{name}.jsonl"


def read_answers(path: Path, damaged: list[str] | None = None) -> list[ItemAnswers]:
    """Read the file of one set, in the order written; a line cut short by a kill is left out, a missing file is empty.

    Args:
        path: of the file.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, and `damaged` is None.
    """
    return list(iter_answers(path, damaged))


def iter_answers(path: Path, damaged: list[str] | None = None) -> Iterator[ItemAnswers]:
    """Yield what `read_answers` lists, an item at a time."""
    return read_lines(path, lambda line: msgspec.convert(line, ItemAnswers), "answers of an item", damaged)


class ItemHistory(msgspec.Struct, frozen=True, kw_only=True):
    """An item over the validations of a run.

    Args:
        item: its place in the set.
        prompt: text.
        answer: that was expected.
        shares: share of its samples that were right, by step.
    """

    item: int
    prompt: str
    answer: str
    shares: dict[int, float]

    @property
    def flips(self) -> int:
        """Return how often it went from mostly right to mostly wrong or back."""
        rightly = [share >= 0.5 for _, share in sorted(self.shares.items())]
        return sum(before != after for before, after in pairwise(rightly))

    @property
    def change(self) -> float:
        """Change of the share, from the first to the last validation."""
        steps = sorted(self.shares)
        return self.shares[steps[-1]] - self.shares[steps[0]]


def item_histories(answers: Iterable[ItemAnswers]) -> list[ItemHistory]:
    """Items of one set, those that changed most often first; items without a sample are left out."""
    found: dict[int, ItemHistory] = {}
    for each in answers:
        if each.samples:
            kept = found.setdefault(
                each.item, ItemHistory(item=each.item, prompt=each.prompt, answer=each.answer, shares={})
            )
            kept.shares[each.step] = each.share_right
    return sorted(found.values(), key=lambda history: (-history.flips, -abs(history.change), history.item))
