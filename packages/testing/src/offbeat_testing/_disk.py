"""Disks and what becomes of files on them: power failures, damage, checkpoints of earlier versions."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

_PAGE_BYTES: Final = 4096

DAMAGES: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "a byte at the beginning": lambda whole: bytes([whole[0] ^ 0x40]) + whole[1:],
    "a byte in the middle": lambda whole: (
        whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 0x40]) + whole[len(whole) // 2 + 1 :]
    ),
    "a byte at the end": lambda whole: whole[:-1] + bytes([whole[-1] ^ 0x40]),
    "cut short": lambda whole: whole[: len(whole) // 2],
    "a page of zeros": lambda whole: bytes(min(_PAGE_BYTES, len(whole))) + whole[_PAGE_BYTES:],
}
"""Damage that a disk, a copy or a crash may do to a file that is not empty and does not begin with a page of zeros."""

Inode = tuple[int, int]


def drop_digests(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint as versions without digests did, for its files as they are now."""
    path = checkpoint / "checkpoint.json"
    manifest = json.loads(path.read_text())
    sizes = {name: (checkpoint / name).stat().st_size for name in manifest["file_bytes"]}
    older = {"step": manifest["step"], "time_s": manifest["time_s"], "file_bytes": sizes}
    path.write_text(json.dumps(older, indent=1))


@dataclass(frozen=True)
class DiskStep:
    """A rename, or the removal of a folder, and what a power failure just before it would have taken.

    Args:
        source: path in the folder of the record.
        target: the new path; "" for a removal.
        unsynced: of what is moved or removed: files whose bytes are not on the disk, and names below it.
        unsynced_beside: of everything else.
    """

    source: str
    target: str
    unsynced: tuple[str, ...]
    unsynced_beside: tuple[str, ...]


class DiskRecord:
    """Records what is forced onto the disk in a folder while the block runs.

        with DiskRecord(folder) as disk:
            save(folder / "state")
        assert not any(step.unsynced for step in disk.steps)  # nothing has its name before its bytes are on the disk
        assert disk.unsynced() == []

    The bytes of a file outlast a power failure when `os.fsync` or `os.fdatasync` was called after they were written;
    a name outlasts it when `os.fsync` was called on its folder. Calls of other processes are not seen.

    Args:
        folder: must be there; what is in it when the block begins counts as synced.

    Attributes:
        steps: renames and removals by `shutil.rmtree`, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.steps: list[DiskStep] = []
        self._folder = folder.resolve()
        self._bytes: dict[Inode, bytes] = {}
        self._names: dict[Inode, dict[str, Inode]] = {}
        self._held: dict[Inode, int] = {}
        self._patches = pytest.MonkeyPatch()

    def unsynced(self) -> list[str]:
        """Files and folders that a power failure would take now, or leave with other bytes, sorted."""
        return sorted({*self._unsynced_bytes(), *self._unsynced_names()})

    def __enter__(self) -> Self:
        for path in [self._folder, *self._folder.rglob("*")]:
            self._note(path)
        fsync, fdatasync = os.fsync, os.fdatasync
        self._patches.setattr(os, "fsync", lambda file: self._sync(file, fsync))
        self._patches.setattr(os, "fdatasync", lambda file: self._sync(file, fdatasync))
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
            self._patches.setattr(module, name, self._recorded(getattr(module, name), moves=module is os))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.undo()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _sync(self, file: Any, sync: Callable[[int], None]) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        status = os.fstat(descriptor)
        inode = status.st_dev, status.st_ino
        for path in [self._folder, *self._folder.rglob("*")]:
            if _inode(path) == inode:
                self._note(path)  # before the call: what is written meanwhile may come too late for it
        sync(descriptor)

    def _note(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._hold(path)] = {each.name: self._hold(each) for each in path.iterdir()}
        elif path.is_file():
            self._bytes[self._hold(path)] = _digest(path)

    def _hold(self, path: Path) -> Inode:
        """Keep a file open, so that no later one gets its number."""
        inode = _inode(path)
        if inode not in self._held and (path.is_dir() or path.is_file()):
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _recorded(self, call: Callable[..., None], *, moves: bool) -> Callable[..., None]:
        def record(source: Any, *arguments: Any, **options: Any) -> None:
            path = Path(source).absolute()
            if path.is_relative_to(self._folder) and path.exists():
                target = Path(arguments[0]).absolute() if moves else None
                self.steps.append(self._step(path, target))
            call(source, *arguments, **options)

        return record

    def _step(self, source: Path, target: Path | None) -> DiskStep:
        moved = self._relative(source)
        lost_bytes, lost_names = self._unsynced_bytes(), self._unsynced_names()
        within = {each for each in (*lost_bytes, *lost_names) if each.startswith(f"{moved}/")}
        within |= {moved} & set(lost_bytes)
        beside = {*lost_bytes, *lost_names} - within - {moved}
        return DiskStep(moved, self._relative(target) if target else "", tuple(sorted(within)), tuple(sorted(beside)))

    def _unsynced_bytes(self) -> list[str]:
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        return [self._relative(path) for path in files if self._bytes.get(_inode(path)) != _digest(path)]

    def _unsynced_names(self) -> list[str]:
        names = [(path, self._names.get(_inode(path.parent), {})) for path in self._folder.rglob("*")]
        return [self._relative(path) for path, synced in names if synced.get(path.name) != _inode(path)]

    def _relative(self, path: Path) -> str:
        return os.path.relpath(path, self._folder)


def _inode(path: Path) -> Inode:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()
