"""Files and folders that are whole or absent, and reads that are bounded, whatever is found under a name."""

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from offbeat_core._errors import RunFolderError

TEMPORARY = ".tmp-"
OLD = ".old-"
_FAILS = (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV)  # a broken disk, a server that is gone or was set up anew


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield an open file that appears under its name only when the block ends well.

    Args:
        path: of the file; an older one is replaced.
        mode: "w" for text (UTF-8), "wb" for bytes.

    Raises:
        RunFolderError: no space left, or no right to write.
    """
    path = Path(path)
    temporary = _beside(path, TEMPORARY)
    try:
        with disk_errors(path), temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_new_file(path: Path, text: str, option: str) -> None:
    """Write what a command was asked for; a file that is there stays as it is.

    Args:
        path: of the file.
        text: of the file.
        option: of the command line that names it, for errors, such as "--out".

    Raises:
        RunFolderError: it is there already, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RunFolderError(f"{option} {path}: exists already; choose another name") from None
    except OSError as error:
        raise RunFolderError(f"{option} {path}: cannot be written: {error.strerror}; choose another place") from error


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield an empty folder that appears under its name only when the block ends well.

    Everything in it is on the disk before it gets its name. An older folder of that name is replaced.

    Raises:
        RunFolderError: no space left.
    """
    path = Path(path)
    temporary = _beside(path, TEMPORARY)
    temporary.mkdir(parents=True)
    try:
        with disk_errors(path):
            yield temporary
            publish_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Clear what a killed `atomic_write` or `atomic_folder` left; put back a folder caught between two renames."""
    for left in folder.glob(f"{TEMPORARY}*"):
        _remove(left)
    for old in folder.glob(f"{OLD}*"):
        _put_back(old)


def stage_folder(path: Path) -> Path:
    """Make an empty folder beside `path`, for a caller that writes it in parts and then calls `publish_folder`.

    What a killed process has left of the same name is cleared away before.
    """
    recover_folder(path)
    for left in path.parent.glob(f"{TEMPORARY}*-{path.name}"):
        if _name_of(left, TEMPORARY) == path.name:
            _remove(left)
    staged = _beside(path, TEMPORARY)
    staged.mkdir(parents=True)
    return staged


def publish_folder(staged: Path, path: Path, *, replaces: bool = True) -> None:
    """Give a staged folder its name; everything in it is on the disk before.

    Args:
        staged: of `stage_folder`.
        path: its name; may be there.
        replaces: what it holds is replaced; else it is kept, and what was staged comes into it, its folders last.
    """
    sync_tree(staged)
    if path.is_dir() and not replaces:
        for entry in sorted(staged.iterdir(), key=lambda each: each.is_dir()):
            entry.rename(path / entry.name)
        staged.rmdir()
        sync_path(path)
        return
    old = _beside(path, OLD)
    if path.exists():  # a rename cannot replace a folder that holds files: the old one steps aside, see `_put_back`
        path.rename(old)
    staged.rename(path)
    sync_path(path.parent)
    if old.exists():
        _remove(old)


def recover_folder(path: Path) -> None:
    """Put back a folder whose replacement was killed between its two renames."""
    for old in path.parent.glob(f"{OLD}*-{path.name}"):
        if _name_of(old, OLD) == path.name:
            _put_back(old)


def _put_back(old: Path) -> None:
    """Give a folder that has stepped aside its name again, unless the new one has got it."""
    named = old.with_name(_name_of(old, OLD))
    if named.exists():
        _remove(old)
    else:
        old.rename(named)


def _name_of(aside: Path, prefix: str) -> str:
    return aside.name.removeprefix(prefix).partition("-")[2]


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{uuid.uuid4().hex[:8]}-{path.name}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Return when a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return when a folder and everything in it is on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(root, name))
        sync_path(Path(root))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a disk that takes no more into one that says what to do.

    Args:
        path: what is being written in the block.

    Raises:
        RunFolderError: no space left, a file larger than allowed, no right to write, or a disk that fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunFolderError(
                f"{path}: no space left to write it ({error.strerror}); free some and resume the run"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from error
        if error.errno in _FAILS:
            raise RunFolderError(
                f"{path}: the disk or its file system fails ({error.strerror}); see the log of this machine's kernel, "
                "then resume the run"
            ) from error
        raise


_KINDS: Final = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link to nothing"}


def other_kind(path: Path) -> str:
    """Say what is at a path in place of a file, such as "a folder"; nothing where a file is, or nothing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return _KINDS[stat.S_IFLNK] if path.is_symlink() else ""
    return _kind(mode)


def _kind(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device or a socket")


def require_file(path: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe would never open, and a folder cannot be written to.

    Raises:
        RunFolderError: it is something else; with what it is.
    """
    if other := other_kind(path):
        raise RunFolderError(f"{path}: must be a file and is {other}; move it away")


def read_small(path: Path, max_bytes: int) -> bytes:
    """Read a file that is short, or is not what it should be.

    Raises:
        OSError: it cannot be read, is no file, or is longer.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # of a pipe, the end is read
        if other := _kind(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, f"it is {other}")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes")
    return content
