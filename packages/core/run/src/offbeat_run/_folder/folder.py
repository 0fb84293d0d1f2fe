"""The run folder: where everything a run writes has its name, and one process at a time writes in it."""

import json
import os
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from offbeat_core import RunFolderError, UserError, atomic_write, dump_config, remove_leftovers, user_path
from offbeat_run._checkpoints import Checkpoints
from offbeat_run._console.printing import shown
from offbeat_run._console.quantities import size_text
from offbeat_run._folder.lock import LOCK_NAME, FolderLock, last_locked

CHECKPOINTS: Final = "checkpoints"


def last_has_checkpoint() -> bool:
    """Return whether the run folder that this process locked last holds a whole checkpoint."""
    folder = last_locked()
    return folder is not None and Checkpoints(folder / CHECKPOINTS).latest() is not None


_MODE: Final = 0o750
"""Prompts, logs and weights are for the owner, and for the group to read as far as the umask allows. No other user gets
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
        self.hub = path / "hub.json"
        self.plan = path / "plan.txt"
        self.metrics = path / "metrics.jsonl"
        self.sessions = path / "sessions.jsonl"
        self.alarms = path / "alarms.jsonl"
        self.tensorboard = path / "tensorboard"
        self.generations = path / "generations"
        self.validation = path / "validation"
        self.timeline = path / "timeline.json"
        self.logs = path / "logs"
        self.places = path / "places.json"
        self.profile = path / "profile"
        self.report = path / "report.html"
        self.checkpoints = Checkpoints(path / CHECKPOINTS)

    @classmethod
    def create(cls, path: Path | str, *, required_bytes: int = 0) -> "RunFolder":
        """Make a new run folder and lock it.

        Args:
            path: must not exist, or be empty.
            required_bytes: free space the run will need.

        Raises:
            RunFolderError: it holds files, cannot be written, has no room, or another process is in it.
        """
        path = user_path(path).absolute()
        try:
            _refuse_contents(path)
            was_there = path.exists()
            path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            _forbid_others(path, stat.S_IRWXO)
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
        path = user_path(path).absolute()
        if path.is_file():
            raise RunFolderError(f"{path}: is a file; give the folder of a run, such as runs/my-20261121-101500")
        if not path.is_dir():
            raise RunFolderError(f"{path}: no such run folder")
        run = cls(path, None)
        if not run.config.is_file():
            raise RunFolderError(f"{path}: not a run folder: it holds no config.toml")
        if write:
            _require_run(run)
            _require_space(path, required_bytes)
            run._lock = _lock_existing(path)
            _forbid_others(path, stat.S_IWOTH)  # rights to read that were given since were given on purpose
            run._make_folders()
            for folder in (path, run.checkpoints.path, run.generations, run.logs):
                remove_leftovers(folder)
            run.checkpoints.forget_request()
        return run

    def _make_folders(self) -> None:
        for folder in (self.tensorboard, self.generations, self.logs, self.checkpoints.path):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise RunFolderError(
                    f"{folder}: must be a folder that can be written: {error.strerror}; move the existing file away"
                ) from error

    def write_config(
        self, config: Any, settled: Any = None, hub_digests: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """Write the configuration to config.toml, and to settled.toml the same with what was chosen for open settings.

        Args:
            config: that a resume continues with.
            settled: that the run works with; None where nothing was open.
            hub_digests: of files that came from the Hub, by the name of their repository and their own.

        Raises:
            RunFolderError: the run was begun with a file of another digest.
        """
        if hub_digests:
            self._write_digests(hub_digests)
        self.write_text(self.config, dump_config(config))
        if settled is not None:
            self.write_text(self.settled, dump_config(settled))

    def _write_digests(self, digests: Mapping[str, Mapping[str, str]]) -> None:
        """Note what came from the Hub; what the run was begun with has to be the same for good."""
        begun: dict[str, dict[str, str]] = json.loads(self.hub.read_text()) if self.hub.is_file() else {}
        for name, files in digests.items():
            for file, digest in files.items():
                if begun.get(name, {}).get(file, digest) != digest:
                    raise RunFolderError(
                        f"{name}: {file} is not the one that this run was begun with, by its digest; remove the model "
                        "from the Hub's cache, and resume again"
                    )
        self.write_text(self.hub, json.dumps({**begun, **digests}, indent=1, sort_keys=True) + "\n")

    def write_plan(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write rows of (what, how much) to plan.txt."""
        self.write_text(self.plan, shown("".join(f"{name}: {text}\n" for name, text in rows)))

    def write_text(self, path: Path, text: str) -> None:
        """Write a text file of the run in one piece."""
        with atomic_write(path) as file:
            file.write(text)

    def log(self, role: str) -> Path:
        """Return the log file of a role, such as "rollout-0"."""
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


def _forbid_others(path: Path, rights: int) -> None:
    """Take rights from all other users: those who can write can change what a run continues from."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & rights:
        path.chmod(mode & ~rights)


def _lock_existing(path: Path) -> FolderLock:
    try:
        return FolderLock(path)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}; a run resumes where it was made") from error


def _require_run(run: RunFolder) -> None:
    """Refuse a folder that has a user's own config.toml: folders of a run would be made beside it."""
    if not (os.path.lexists(run.sessions) or os.path.lexists(run.checkpoints.path)):
        raise RunFolderError(
            f"{run.path}: not a run folder: beside its config.toml there is neither {run.sessions.name} nor "
            f"{CHECKPOINTS}/, so no run was begun here; begin one with: train {run.config}"
        )


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
