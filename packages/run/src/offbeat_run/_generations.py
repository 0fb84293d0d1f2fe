"""What the model said: some completions of each step, written down for people to read."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from offbeat_run._folder import RunFolder
from offbeat_run._jsonl import JsonlFile, cut_lines, read_lines
from offbeat_types import RunFolderError

GenerationKind = Literal["train", "validation"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One completion.

    Args:
        step: updates done when it was written down.
        kind: "train" or "validation".
        version: policy version of its oldest token.
        prompt: text, with special tokens.
        completion: text.
        reward: its reward.
        rewards: the parts of a reward that is a sum, by name.
        answer: what was expected, where that is known.
        stop_reason: as in `Completion`.
        num_tokens: of the completion.
        images: of the prompt, small copies for people: `data:` addresses of image files.
    """

    step: int
    kind: GenerationKind
    version: int
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float] = {}
    answer: str = ""
    stop_reason: str = ""
    num_tokens: int = 0
    images: tuple[str, ...] = ()


class GenerationsLog:
    """Writes generations/train.jsonl and generations/validation.jsonl.

    Args:
        run: where.
        resume_step: on resume, the step of the checkpoint: generations after it vanish.
    """

    def __init__(self, run: RunFolder, *, resume_step: int | None = None) -> None:
        self._folder = run.generations
        self._files: dict[str, JsonlFile] = {}
        if resume_step is not None:
            self.truncate_after(resume_step)

    def write(self, generations: Iterable[Generation]) -> None:
        """Append generations, each flushed."""
        for generation in generations:
            name = generation.kind
            if name not in self._files:
                self._files[name] = JsonlFile(self._folder / f"{name}.jsonl")
            self._files[name].write(msgspec.structs.asdict(generation))

    def truncate_after(self, step: int) -> None:
        """Forget every generation after `step`."""
        self.close()
        for path in self._folder.glob("*.jsonl"):
            cut_lines(path, lambda line: int(line["step"]) <= step)

    def close(self) -> None:
        """Close the files; a second call does nothing, a later write opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "GenerationsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_generations(run: RunFolder, kind: GenerationKind, damaged: list[str] | None = None) -> list[Generation]:
    """Read what was written of one kind, in order; a missing file has none.

    Args:
        run: where.
        kind: of generation.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, and nobody takes note of it.
    """
    path = Path(run.generations) / f"{kind}.jsonl"
    found: list[Generation] = []
    for line in read_lines(path, damaged):
        try:
            found.append(msgspec.convert(line, Generation))
        except msgspec.ValidationError as error:
            if damaged is None:
                raise RunFolderError(f"{path}: not a generation: {error}; remove the line, or restore it") from error
            damaged.append(f"{path}: not a generation: {error}")
    return found
