"""The folder of an evaluation: answers that survive a kill, and the table made of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from offbeat_core import RunFolderError, atomic_write, read_small
from offbeat_run._folder.lock import FolderLock
from offbeat_run._validation.items import AnswersLog, ItemAnswers, answers_path, read_answers
from offbeat_run._validation.summary import SetSummary, table_json, table_markdown, table_text

_ASKED: Final = "eval.json"
_MAX_NOTE_BYTES: Final = 1 << 24
TABLE: Final = "table"


class EvalFolder:
    """Answers of sets under one model, one process at a time in it. Use it in a `with` block.

    Args:
        path: made where it is missing.
        about: what is evaluated, for people, such as {"model": ...}.
        asked: by set, all that its answers depend on, as plain data: answers to other questions are not continued.

    Raises:
        RunFolderError: another process works in it, it cannot be written, or holds answers to something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        self.path, self._about, self._marks = path, dict(about), {name: _mark(each) for name, each in asked.items()}

    def __enter__(self) -> "EvalFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error.strerror}; choose another --out") from error
        self._lock.forget()  # this is no run to resume: the same command continues it
        try:
            self._take_note()
            self._log = AnswersLog(self.path)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        self._lock.release()

    def _take_note(self) -> None:
        note = read_eval_note(self.path) if (self.path / _ASKED).is_file() else {}
        marks = dict(note.get("marks", {}))
        for name, mark in self._marks.items():
            if marks.get(name, mark) != mark and answers_path(self.path, name).is_file():
                raise RunFolderError(
                    f"{self.path} holds answers of the set {name} from other weights, prompts, reference answers or "
                    "settings of sampling, judging or the agent: choose another --out, or remove "
                    f"{answers_path(self.path, name).name} there"
                )
        with atomic_write(self.path / _ASKED) as file:
            json.dump({"about": self._about, "marks": {**marks, **self._marks}}, file, indent=1)

    def answered(self, name: str) -> dict[int, ItemAnswers]:
        """Return the answers that exist already, by item."""
        return {each.item: each for each in read_answers(answers_path(self.path, name))}

    def write(self, name: str, item: ItemAnswers) -> None:
        """Add an item; it is in the file before this returns."""
        self._log.write(name, [item])

    def write_table(self, summaries: Sequence[SetSummary]) -> str:
        """Write table.txt, table.json and table.md.

        Returns:
            The table as text.
        """
        text = table_text(summaries)
        forms = {"txt": text, "md": table_markdown(summaries), "json": table_json(summaries, **self._about)}
        for suffix, form in forms.items():
            with atomic_write(self.path / f"{TABLE}.{suffix}") as file:
                file.write(form)
        return text


def read_eval_note(path: Path) -> dict[str, Any]:
    """Return what an evaluation's folder says of itself.

    Raises:
        RunFolderError: it is no folder of an evaluation.
    """
    try:
        note = msgspec.json.decode(read_small(path / _ASKED, _MAX_NOTE_BYTES), type=dict[str, dict[str, Any]])
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: not the folder of an evaluation: it has no {_ASKED} that can be read") from error
    return note


def _mark(asked: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()
