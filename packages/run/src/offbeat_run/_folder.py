"""The run folder: where everything a run writes has its name, one process at a time in it, and its checkpoints."""

import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from weakref import WeakSet

from offbeat_run._config.secrets import hide_secrets
from offbeat_run._config.text import dump_config
from offbeat_run._files import atomic_folder, atomic_write, remove_leftovers
from offbeat_run._quantities import size_text
from offbeat_types import RunFolderError, UserError

LOCK_NAME: Final = ".lock"
_LOCK_BYTES: Final = 512
_LOOK_S: Final = 0.5
_LOOK_AGAIN_S: Final = 0.01
_last_locked: list[Path] = []


def last_locked() -> Path | None:
    """The run folder this process locked last, or None: what an interrupted command says can be resumed."""
    return _last_locked[-1] if _last_locked else None


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The process that writes to a run folder, as its lock has it.

    Args:
        pid: process id; 0 where the process has only just taken the lock.
        host: machine of the process; empty where an older version has taken the lock.
        since_s: Unix time when it took the lock; 0 where the host is empty.
    """

    pid: int
    host: str
    since_s: float

    @classmethod
    def parse(cls, text: str) -> "Writer":
        """Read the text of a lock file; of one that holds anything else nobody is known."""
        try:
            match text.split():
                case [pid, host, since_s]:
                    return cls(pid=int(pid), host=host, since_s=float(since_s))
                case [pid]:
                    return cls(pid=int(pid), host="", since_s=0.0)
        except ValueError:
            pass
        return cls(pid=0, host="", since_s=0.0)

    def __str__(self) -> str:
        return f"process {self.pid or 'unknown'}" + (f" on {self.host}" if self.host else "")


class FolderLock:
    """An exclusive lock on a folder, held until `release` or the end of the process, however it ends.

    A forked child does not hold it: it would otherwise keep a killed run's folder locked for as long as it lives.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            RunFolderError: another process holds it; the text names its process id.
        """
        self._descriptor: int | None = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._is_taken():
            writer = Writer.parse(os.read(self._descriptor, _LOCK_BYTES).decode(errors="replace"))
            self.release()
            raise RunFolderError(
                f"{folder}: {writer} is working in this run folder; wait for it, end it, or choose another folder"
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()} {time.time()}\n".encode(), 0)
        _locks.add(self)
        _last_locked[:] = [folder]

    def _is_taken(self) -> bool:
        """Try to take it, for longer than `writer_of` holds it even where the processor is taken from it."""
        assert self._descriptor is not None
        end_s = time.monotonic() + _LOOK_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > end_s:
                    return False
                time.sleep(_LOOK_AGAIN_S)
            else:
                return True

    def forget(self) -> None:
        """Make `last_locked` forget this folder: there is nothing in it to resume."""
        _last_locked.clear()

    def release(self) -> None:
        """Let go; a second call does nothing. The lock file stays, since removing it would race."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locks: WeakSet[FolderLock] = WeakSet()


def _close_in_child() -> None:
    for lock in list(_locks):
        lock.release()  # closing a copy of the descriptor leaves the parent's lock in place


os.register_at_fork(after_in_child=_close_in_child)


def writer_of(folder: Path) -> Writer | None:
    """Return the process that writes to a run folder, on whichever machine; None where none holds the lock."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
    except OSError:
        return Writer.parse(os.read(descriptor, _LOCK_BYTES).decode(errors="replace"))
    finally:
        os.close(descriptor)
    return None


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
        self._write_scores({**self._scores(), str(step): score})

    def forget_scores(self, after_step: int) -> None:
        """Drop the scores of later steps, whose weights are made anew."""
        scores = self._scores()
        kept = {step: score for step, score in scores.items() if int(step) <= after_step}
        if kept != scores:
            self._write_scores(kept)

    def _write_scores(self, scores: dict[str, float]) -> None:
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

    def find(self, step: int) -> Checkpoint:
        """The one of a step.

        Raises:
            RunFolderError: there is none, or it is not whole.
        """
        found = {each.step: each for each in self.all()}
        if step not in found:
            known = ", ".join(map(str, found)) or "none"
            raise RunFolderError(f"--step {step}: no whole checkpoint of this update in {self.path}; there are {known}")
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


_MODE: Final = 0o750
"""Prompts, logs and weights are for the owner, and for the group to read as far as the umask allows. Nobody else gets
past this folder, whatever the modes of what lies in it."""


class RunFolder:
    """A folder that holds one run. Make one with `create` or `open`; close it, or use it in a `with` block.

    A new run that is refused or interrupted in its block before `keep` leaves no folder: its name is free again.

    Args:
        path: the folder.
        lock: held while this process writes to it; None for a reader.
    """

    def __init__(self, path: Path, lock: FolderLock | None) -> None:
        self.path, self._lock = path, lock
        self._stays, self._was_there = True, True
        self.config = path / "config.toml"
        self.settled = path / "settled.toml"
        self.plan = path / "plan.txt"
        self.metrics = path / "metrics.jsonl"
        self.alarms = path / "alarms.jsonl"
        self.tensorboard = path / "tensorboard"
        self.generations = path / "generations"
        self.validation = path / "validation"
        self.timeline = path / "timeline.json"
        self.logs = path / "logs"
        self.places = path / "places.json"
        self.profile = path / "profile"
        self.report = path / "report.html"
        self.checkpoints = Checkpoints(path / "checkpoints")

    @classmethod
    def create(cls, path: Path | str, *, required_bytes: int = 0) -> "RunFolder":
        """Make a new run folder and lock it.

        Args:
            path: must not exist, or be empty.
            required_bytes: free space the run will need.

        Raises:
            RunFolderError: it holds files, cannot be written, has no room, or another process is in it.
        """
        path = Path(path).expanduser().absolute()
        try:
            _refuse_contents(path)
            was_there = path.exists()
            path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            _forbid_others_to_write(path)
            lock = FolderLock(path)
        except OSError as error:
            raise RunFolderError(
                f"{path}: cannot write a run folder here: {error.strerror}; choose another place"
            ) from error
        try:
            _refuse_contents(path)  # again: another process may have been faster to the lock, and be gone by now
            _require_space(path, required_bytes)
            run = cls(path, lock)
            run._stays, run._was_there = False, was_there
            run._make_folders()
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str, *, write: bool = True, required_bytes: int = 0) -> "RunFolder":
        """Open an existing run folder: locked to resume it, or `write=False` to read while it may be running.

        Raises:
            RunFolderError: missing, not a run folder, no room, or another process is in it.
        """
        path = Path(path).expanduser().absolute()
        if not path.is_dir():
            raise RunFolderError(f"{path}: no such run folder")
        run = cls(path, None)
        if not run.config.is_file():
            raise RunFolderError(f"{path}: not a run folder: it holds no config.toml")
        if write:
            _require_space(path, required_bytes)
            run._lock = _lock_existing(path)
            _forbid_others_to_write(path)
            run._make_folders()
            for folder in (path, run.checkpoints.path, run.generations, run.logs):
                remove_leftovers(folder)
        return run

    def _make_folders(self) -> None:
        for folder in (self.tensorboard, self.generations, self.logs, self.checkpoints.path):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise RunFolderError(
                    f"{folder}: must be a folder that can be written: {error.strerror}; move what is there away"
                ) from error

    def write_config(self, config: Any, settled: Any = None) -> None:
        """Write the configuration to config.toml, and to settled.toml the same with what was chosen for open settings.

        Args:
            config: that a resume goes on with.
            settled: that the run works with; None where nothing was open.
        """
        self.write_text(self.config, dump_config(config))
        if settled is not None:
            self.write_text(self.settled, dump_config(settled))

    def write_plan(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write rows of (what, how much) to plan.txt."""
        self.write_text(self.plan, hide_secrets("".join(f"{name}: {text}\n" for name, text in rows)))

    def write_text(self, path: Path, text: str) -> None:
        """Write a text file of the run in one piece."""
        with atomic_write(path) as file:
            file.write(text)

    def log(self, role: str) -> Path:
        """The log file of a role, such as "rollout-0"."""
        return self.logs / f"{role}.log"

    def keep(self) -> None:
        """Say that the run has begun: from here on the folder stays, however the run ends."""
        self._stays = True

    def _remove(self) -> None:
        assert self._lock is not None
        self._lock.forget()
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not self._was_there:
            self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        if self._lock:
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stays and isinstance(error, UserError | KeyboardInterrupt):
            self._remove()
        self.close()


def check_shared(path: Path) -> None:
    """Refuse to work for a run whose folder is not on this machine: called by what writes checkpoints to it.

    Raises:
        RunFolderError: with the name of this machine.
    """
    if not path.is_dir():
        raise RunFolderError(
            f"{path} is not on {socket.gethostname()}, where the run has started a trainer: the run folder lies where "
            "every node has it under one path; choose such a place with --out"
        )


def _forbid_others_to_write(path: Path) -> None:
    """Take from everybody else the right to write: whoever can, can change what a run goes on from."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        path.chmod(mode & ~stat.S_IWOTH)


def _lock_existing(path: Path) -> FolderLock:
    try:
        return FolderLock(path)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}; a run resumes where it was made") from error


def _refuse_contents(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise RunFolderError(f"{path}: is a file; a run needs a folder of its own, choose another")
    held = [entry for entry in path.iterdir() if entry.name != LOCK_NAME]
    if held:
        raise RunFolderError(
            f"{path}: exists and is not empty; resume it with `resume {path}`, choose another folder, or remove it"
        )


def _require_space(path: Path, required_bytes: int) -> None:
    free = shutil.disk_usage(path).free
    if free < required_bytes:
        raise RunFolderError(
            f"{path}: no space left: this run needs {size_text(required_bytes)}, {size_text(free)} are free; "
            "free some, keep fewer checkpoints (--checkpoint.keep), or choose another disk"
        )
    probe = path / ".probe"
    try:
        probe.write_bytes(b"offbeat")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
