"""The checkpoints of a run: written whole or not at all, and read only if their bytes are those that were written.

checkpoint.json, the manifest of each, holds the size and the digest of every file, and a digest of itself. Listing
checkpoints compares sizes alone. Reading one compares the digests first, which takes a pass over all of its bytes.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import xxhash

from offbeat_core import (
    DIGEST_SUFFIX,
    ConfigError,
    RunFolderError,
    atomic_folder,
    atomic_write,
    describe_damage,
    digest_of,
    read_small,
    read_tensor_shapes,
)
from offbeat_run._console.printing import print_text

T = TypeVar("T")

Notify = Callable[[str], None]
"""Takes a line for people."""

MANIFEST: Final = "checkpoint.json"
_SCORES: Final = "scores.json"
_ASIDE: Final = "damaged-"
_MODEL_FOLDERS: Final = (".", "adapter")
"""Folders of a checkpoint that hold the model; the others are for resuming its training."""
_NUM_READERS: Final = 4
"""Files compared at a time: one reader alone does not get all that a disk can give."""
_MAX_SMALL_BYTES: Final = 1 << 24
"""Largest manifest or file of scores: they have some hundred bytes for each file or validation."""
_NAMED: Final = 3
"""Damaged checkpoints that an error names."""


class DamagedError(RunFolderError):
    """A file of a checkpoint is not what was written to it."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn whatever goes wrong in the block into an error that names the file which it reads.

    Args:
        name: of the file, in its checkpoint.

    Raises:
        DamagedError: the file cannot be read.
        ConfigError: it can be read and does not fit the settings.
    """
    try:
        yield
    except (ConfigError, DamagedError, MemoryError):
        raise
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise DamagedError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


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
        self._asked, self._answered = path / "asked", path / "answered"

    @contextmanager
    def write(self, step: int, *, score: float | None = None) -> Iterator[Path]:
        """Fill a new checkpoint: `with run.checkpoints.write(step) as folder:`; it appears when the block ends well.

        Raises:
            RunFolderError: no space left.
        """
        with suppress(FileNotFoundError):  # what is asked for from here on is a later state
            self._asked.replace(self._answered)
        with atomic_folder(self.path / step_name(step)) as folder:
            yield folder
            (folder / MANIFEST).write_bytes(_Manifest.describe(folder, step).encode())
        self._answered.unlink(missing_ok=True)
        if score is not None:
            self.set_score(step, score)

    def ask(self) -> None:
        """Ask the process that trains, by a file, for a checkpoint after the update in progress."""
        self._asked.touch()

    @property
    def is_asked(self) -> bool:
        """Return whether a checkpoint has been asked for since the last one was begun."""
        return self._asked.exists()

    @property
    def is_awaited(self) -> bool:
        """Return whether a checkpoint that was asked for is not there yet."""
        return self.is_asked or self._answered.exists()

    def forget_request(self) -> None:
        """Drop what was asked of a process that is gone."""
        for file in (self._asked, self._answered):
            file.unlink(missing_ok=True)

    def set_score(self, step: int, score: float) -> None:
        """Note the validation score of a step, before or after its checkpoint; higher is better."""
        self._write_scores({**self._scores(), step: score})

    def forget_scores(self, after_step: int) -> None:
        """Drop the scores of later steps, whose weights are made anew."""
        scores = self._scores()
        kept = {step: score for step, score in scores.items() if step <= after_step}
        if kept != scores:
            self._write_scores(kept)

    def _write_scores(self, scores: Mapping[int, float]) -> None:
        with atomic_write(self.path / _SCORES) as file:
            json.dump(scores, file)

    def _scores(self) -> dict[int, float]:
        """Read the scores; where the file is missing or damaged there are none, and the latest checkpoint counts."""
        try:
            return {
                int(step): float(score)
                for step, score in json.loads(read_small(self.path / _SCORES, _MAX_SMALL_BYTES)).items()
            }
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def all(self) -> list[Checkpoint]:
        """Every complete checkpoint, oldest first. One with a file missing or cut short is not complete."""
        scores = self._scores()
        whole: list[Checkpoint] = []
        for folder in self._folders():
            with suppress(DamagedError):
                step = _whole_as_named(folder).step
                whole.append(Checkpoint(step=step, path=folder, score=scores.get(step)))
        return whole

    def _folders(self) -> list[Path]:
        return sorted(self.path.glob("step-*"), key=lambda folder: by_step(folder.name))

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the latest step; None when there is none."""
        found = self.all()
        return found[-1] if found else None

    def read_latest(self, read: Callable[[Path], T], notify: Notify = print_text) -> tuple[Checkpoint, T] | None:
        """Read the latest checkpoint whose bytes are those that were written: a resumed run continues from there.

        Newer ones are damaged. They get another name, and are removed once the run has passed their step again.

        Args:
            read: returns what a run needs of the folder of a checkpoint. Any error but ConfigError means that this
                checkpoint is damaged; `reading` names the file.
            notify: is called with what is passed over, and with what is chosen.

        Returns:
            The checkpoint, and what `read` has returned; None where there is no checkpoint yet.

        Raises:
            RunFolderError: there are checkpoints, and all of them are damaged.
            ConfigError: of `read`.
        """
        damaged: dict[Path, DamagedError] = {}
        for folder in reversed(self._folders()):
            try:
                _whole_as_named(folder)
                step = check_checkpoint(folder, notify)
                with reading("one of its files"):
                    found = read(folder)
            except DamagedError as error:
                damaged[folder] = error
                continue
            for newer, flaw in damaged.items():
                aside = _set_aside(newer)
                notify(f"checkpoint {newer.name} is damaged ({flaw}) and passed over; it is kept as {aside.name}")
            notify(f"resumes from update {step} ({folder})")
            return Checkpoint(step=step, path=folder, score=self._scores().get(step)), found
        if damaged:
            # The newest one's error is the cause: a mistake of ours in `read` would look like damage to all of them.
            raise RunFolderError(_nothing_whole(self.path, damaged)) from next(iter(damaged.values()))
        notify("no whole checkpoint: begins anew")
        return None

    def best(self) -> Checkpoint | None:
        """Return the one with the highest score, the earlier of equals; None when none has a score."""
        scored = [(each.score, -each.step, each) for each in self.all() if each.score is not None]
        return max(scored, key=lambda item: item[:2])[2] if scored else None

    def chosen(self, notify: Notify = print_text) -> Checkpoint:
        """Return the best one, or the latest where none has a score: what a run gives to the world.

        Its model is as it was written; whichever is damaged is passed over for the next best.

        Args:
            notify: is called with what is passed over.

        Raises:
            RunFolderError: there is none.
        """
        for folder in self._folders():
            if not (folder / MANIFEST).exists():  # it is being removed
                continue
            try:
                _whole_as_named(folder)
            except DamagedError as flaw:
                notify(f"checkpoint {folder.name} is damaged ({flaw}) and passed over")
        left = {each.step: each for each in self.all()}
        while left:
            scored = [each for each in left.values() if each.score is not None]
            found = max(scored, key=lambda each: (each.score, -each.step)) if scored else left[max(left)]
            try:
                check_checkpoint(found.path, notify, model_only=True)
            except DamagedError as error:
                notify(f"checkpoint {found.path.name} is damaged ({error}) and passed over")
                del left[found.step]
            else:
                return found
        raise RunFolderError(f"{self.path.parent} holds no whole checkpoint to evaluate; resume the run to get one")

    def find(self, step: int, notify: Notify = print_text) -> Checkpoint:
        """Return the one of a step, whose model is as it was written.

        Raises:
            RunFolderError: there is none, or it is not whole.
        """
        found = {each.step: each for each in self.all()}
        if step not in found:
            known = ", ".join(map(str, found)) or "none"
            raise RunFolderError(f"--step {step}: no whole checkpoint of this update in {self.path}; there are {known}")
        check_model(found[step].path, notify)
        return found[step]

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
            (each.path / MANIFEST).unlink(missing_ok=True)
        for folder in self._folders():  # also what a kill has left of an earlier removal
            if not (folder / MANIFEST).exists():
                shutil.rmtree(folder)
        for folder in self.path.glob(f"{_ASIDE}step-*"):
            if found and by_step(folder.name.removeprefix(_ASIDE)) <= by_step(found[-1].path.name):
                shutil.rmtree(folder)
        return removed


def step_name(step: int) -> str:
    """Name the folder of a checkpoint."""
    return f"step-{step:06d}"


def by_step(name: str) -> tuple[int, str]:
    """Order names of checkpoints by their steps, which have more digits from a million on."""
    return len(name), name


def check_model(folder: Path, notify: Notify = print_text) -> None:
    """Compare a model with what was written, where its folder is a checkpoint or has digests beside its files.

    Args:
        folder: of the model.
        notify: is called where the checkpoint is of an older version, and cannot be checked.

    Raises:
        RunFolderError: the checkpoint is damaged; the text names the file.
    """
    try:
        if (folder / MANIFEST).is_file():
            check_checkpoint(folder, notify, model_only=True)
        else:
            files = sorted(path.with_suffix("") for path in folder.glob(f"*{DIGEST_SUFFIX}"))
            _require_same(folder, {path.name: digest_of(path) for path in files})
    except DamagedError as error:
        raise RunFolderError(f"{folder} is damaged: {error}; choose another checkpoint, or bring it back") from error


def check_checkpoint(folder: Path, notify: Notify, *, model_only: bool = False) -> int:
    """Compare the bytes of a checkpoint with its manifest, and return its step.

    Args:
        folder: of the checkpoint.
        notify: is called where there are no digests, because an older version has written it.
        model_only: leave out what only its training needs, most of the bytes.

    Raises:
        DamagedError: the text names the file, what was expected and what was found.
    """
    manifest = _whole(folder)
    names = [name for name in manifest.file_bytes if not model_only or str(Path(name).parent) in _MODEL_FOLDERS]
    if manifest.file_digests is not None:
        _require_same(folder, {name: manifest.file_digests[name] for name in names})
    else:
        _require_readable(folder, names)
        notify(f"checkpoint {folder.name} is of an older version and has no digests: changed bytes would not be seen")
    return manifest.step


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of checkpoint.json. Neither of the digests is there where an older version has written it."""

    step: int
    time_s: float
    file_bytes: dict[str, int]
    file_digests: dict[str, str] | None = None
    digest: str = ""

    @classmethod
    def describe(cls, folder: Path, step: int) -> "_Manifest":
        """Take down what is in a folder, with the digests that were made while it was written."""
        files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        return cls(
            step=step,
            time_s=time.time(),
            file_bytes={name: file.stat().st_size for name, file in files.items()},
            file_digests={name: digest_of(file) for name, file in files.items()},
        )

    @classmethod
    def read(cls, folder: Path) -> "_Manifest":
        """Read the one of a checkpoint.

        Raises:
            DamagedError: it is missing, or is not what was written.
        """
        with reading(MANIFEST):
            raw = read_small(folder / MANIFEST, _MAX_SMALL_BYTES)
            manifest = msgspec.json.decode(raw, type=cls)
            is_older = manifest.file_digests is None and not manifest.digest
            if not is_older and manifest.encode() != raw:
                raise DamagedError(f"{MANIFEST} does not have the digest that it was written with")
            return manifest

    def encode(self) -> bytes:
        """Return the bytes of the file, with the digest of all the rest."""
        rest = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        sealed = msgspec.structs.replace(self, digest=xxhash.xxh3_64_hexdigest(rest))
        return msgspec.json.format(msgspec.json.encode(sealed), indent=1)


def _whole(folder: Path) -> _Manifest:
    """Return the manifest of a checkpoint whose files are there, with the sizes that they were written with.

    Raises:
        DamagedError: it is not whole.
    """
    manifest = _Manifest.read(folder)
    for name, size in manifest.file_bytes.items():
        file = folder / name
        with reading(name):
            if not file.is_file():
                raise DamagedError(f"{name} is missing")
            if (has := file.stat().st_size) != size:
                raise DamagedError(f"{name} has {has} bytes and was written with {size}")
    return manifest


def _whole_as_named(folder: Path) -> _Manifest:
    """Return the same of a checkpoint of a run, whose folder has the name of its step.

    Raises:
        DamagedError: it is not whole, or was copied or moved from another step.
    """
    manifest = _whole(folder)
    if folder.name != (name := step_name(manifest.step)):
        raise DamagedError(f"{MANIFEST} is that of {name}")
    return manifest


def _require_same(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise DamagedError for the first file whose bytes are others than were written."""

    def compare(name: str) -> str:
        damage = describe_damage(folder / name, digests[name])
        return f"{name} {damage}" if damage else ""

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        if changed := next(filter(None, pool.map(compare, digests)), ""):
            raise DamagedError(changed)


def _require_readable(folder: Path, names: Collection[str]) -> None:
    """Raise DamagedError for the first file without the form that its name promises."""
    for name in names:
        with reading(name):
            if name.endswith(".safetensors"):
                read_tensor_shapes(folder / name)
            elif name.endswith(".json"):
                json.loads((folder / name).read_bytes())


def _set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint a name under which it counts no longer."""
    aside = folder.with_name(_ASIDE + folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _nothing_whole(path: Path, damaged: Mapping[Path, DamagedError]) -> str:
    named = "; ".join(f"{folder.name} ({flaw})" for folder, flaw in list(damaged.items())[:_NAMED])
    more = f"; and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
    return (
        f"every checkpoint in {path} is damaged: {named}{more}; bring one of them back from a copy, or remove them all "
        "to begin anew"
    )
