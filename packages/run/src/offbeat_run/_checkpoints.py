"""Checkpoints of a run: written in one piece, listed, pruned."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat_run._atomic import atomic_folder, atomic_write
from offbeat_types import RunFolderError

_MANIFEST = "checkpoint.json"
_SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    Args:
        step: updates done when it was written.
        path: its folder, in Hugging Face format with whatever else the run put beside it.
        score: of validation at that step, higher is better; None when there was none.
    """

    step: int
    path: Path
    score: float | None


class Checkpoints:
    """The folder of checkpoints. Any process may write one; only whole ones are listed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def write(self, step: int, *, score: float | None = None) -> Iterator[Path]:
        """Fill a new checkpoint: `with run.checkpoints.write(step) as folder:`; it appears when the block ends well.

        Raises:
            RunFolderError: no space left.
        """
        with atomic_folder(self.path / f"step-{step:06d}") as folder:
            yield folder
            sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
            manifest = {"step": step, "time_s": time.time(), "file_bytes": sizes}
            (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if score is not None:
            self.set_score(step, score)

    def set_score(self, step: int, score: float) -> None:
        """Note the validation score of a step, before or after its checkpoint; higher is better."""
        scores = {**self._scores(), str(step): score}
        with atomic_write(self.path / _SCORES) as file:
            json.dump(scores, file)

    def _scores(self) -> dict[str, float]:
        try:
            return dict(json.loads((self.path / _SCORES).read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def all(self) -> list[Checkpoint]:
        """Every complete checkpoint, oldest first. One with a file missing or cut short is not complete."""
        scores = self._scores()
        whole = sorted((_step(folder), folder) for folder in self.path.glob("step-*") if not _flaw(folder))
        return [Checkpoint(step=step, path=folder, score=scores.get(str(step))) for step, folder in whole]

    def latest(self) -> Checkpoint | None:
        """The complete checkpoint of the latest step; None when there is none."""
        found = self.all()
        return found[-1] if found else None

    def describe_resume(self) -> list[str]:
        """What a resumed run goes on from, in words: the latest whole checkpoint, and newer ones that are damaged."""
        latest = self.latest()
        flaws = {folder: _flaw(folder) for folder in sorted(self.path.glob("step-*"))}
        newer = [(folder, flaw) for folder, flaw in flaws.items() if flaw and (not latest or folder > latest.path)]
        return [
            *(f"checkpoint {folder.name} is damaged ({flaw}) and passed over" for folder, flaw in newer),
            f"resumes from update {latest.step} ({latest.path})" if latest else "no whole checkpoint: begins anew",
        ]

    def best(self) -> Checkpoint | None:
        """The one with the highest score, the earlier of equals; None when none has a score."""
        scored = [(each.score, -each.step, each) for each in self.all() if each.score is not None]
        return max(scored, key=lambda item: item[:2])[2] if scored else None

    def chosen(self) -> Checkpoint:
        """The best one, or the latest where none has a score: what a run gives to the world.

        Raises:
            RunFolderError: there is none.
        """
        found = self.best() or self.latest()
        if found is None:
            raise RunFolderError(f"{self.path.parent} holds no whole checkpoint to evaluate; resume the run to get one")
        return found

    def prune(self, keep: int) -> list[Checkpoint]:
        """Remove all but the last `keep` and the best. The latest stays whatever `keep` is.

        Returns:
            What was removed.
        """
        found = self.all()
        best = self.best()
        kept = {each.step for each in found[-max(keep, 1) :]} | ({best.step} if best else set())
        removed = [each for each in found if each.step not in kept]
        for each in removed:
            # The manifest goes first, so that a half-removed checkpoint is never taken for a whole one.
            (each.path / _MANIFEST).unlink(missing_ok=True)
        for folder in self.path.glob("step-*"):  # also what a kill has left of an earlier removal
            if not (folder / _MANIFEST).exists():
                shutil.rmtree(folder)
        return removed


def _step(folder: Path) -> int:
    return int(json.loads((folder / _MANIFEST).read_text())["step"])


def _flaw(folder: Path) -> str:
    """Why a checkpoint is not whole; empty when it is."""
    try:
        _step(folder)
        sizes = dict(json.loads((folder / _MANIFEST).read_text())["file_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is missing or cut short"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (has := file.stat().st_size) != size:
            return f"{name} has {has} bytes and was written with {size}"
    return ""
