"""Files to read: Python files under the paths given, each once, without following links to folders."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

# Of other programs, or copies of what is read elsewhere.
NEVER_READ: Final = frozenset(
    (
        ".eggs",
        ".git",
        ".hg",
        ".mypy_cache",
        ".nox",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        "__pycache__",
        "node_modules",
        "venv",
    )
)
MAX_FILE_BYTES: Final = 8_000_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read.

    Attributes:
        file: how to open it.
        path: relative to the project's root, with forward slashes; how findings name it.
        below: the same, relative to the path given: what its modules' names follow from.
    """

    file: Path
    path: str
    below: str


def read_source(source: SourceFile) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: it cannot be read, or has more than MAX_FILE_BYTES, whose syntax tree would not fit into memory.
    """
    size_bytes = source.file.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"has {size_bytes} bytes, over {MAX_FILE_BYTES}")
    return source.file.read_bytes()


def find_files(
    paths: Sequence[Path], root: Path | None = None, exclude: Sequence[str] = ()
) -> tuple[list[SourceFile], list[tuple[str, str]]]:
    """Find the Python files.

    Args:
        paths: files, which are read whatever they are called, and folders, whose `*.py` are.
        root: what paths of findings are relative to; by default the path given, or its folder.
        exclude: glob patterns of files or folders, relative to the root; `*` also matches `/`.

    Returns:
        Files in the order of their paths, and folders that cannot be read, each with why.
    """
    found: dict[str, SourceFile] = {}
    unreadable: list[tuple[str, str]] = []
    for given in paths:
        base = given.parent if given.is_file() else given
        start = os.path.abspath(root or base)
        names = [given.name] if given.is_file() else _walk(base, start, exclude, unreadable)
        for name in names:
            file = base / name
            path = _relative(os.path.abspath(file), start)
            if given.is_file() or not _is_excluded(path, exclude):
                found.setdefault(os.path.realpath(file), SourceFile(file, path, name))
    return sorted(found.values(), key=lambda each: each.path), unreadable


def _walk(folder: Path, root: str, exclude: Sequence[str], unreadable: list[tuple[str, str]]) -> Iterator[str]:
    """Names of Python files below a folder, relative to it."""

    def failed(error: OSError) -> None:
        unreadable.append((_relative(os.path.abspath(error.filename), root), error.strerror or str(error)))

    for here, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(
            name
            for name in folders
            if name not in NEVER_READ
            and not _is_excluded(_relative(os.path.abspath(os.path.join(here, name)), root), exclude)
        )
        for name in sorted(files):
            if name.endswith(".py") and os.path.isfile(os.path.join(here, name)):  # and not a pipe, which never ends
                yield os.path.relpath(os.path.join(here, name), folder).replace(os.sep, "/")


def _relative(path: str, root: str) -> str:
    """Relative to the root with forward slashes; whole where it is not under it."""
    try:
        inside = os.path.commonpath([path, root]) == root
    except ValueError:  # two drives of Windows
        inside = False
    return (os.path.relpath(path, root) if inside else path).replace(os.sep, "/")


def _is_excluded(path: str, exclude: Sequence[str]) -> bool:
    return any(
        fnmatchcase(path, pattern.rstrip("/")) or fnmatchcase(path, f"*/{pattern.rstrip('/')}") for pattern in exclude
    )
